"""Each kind of broken record is repaired or set aside, and the report says how many and why."""

import json
from pathlib import Path
from typing import Any

import pytest

from lasd.conversations import REASONS, Conversation, Report, read_conversations


def read(tmp_path: Path, *records: Any, use: str = "prompts") -> tuple[list[Conversation], Report]:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_conversations(path, use=use)  # type: ignore[arg-type]


def record(*turns: tuple[str, Any], **extra: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **extra}


def contents(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def test_a_first_turn_from_gpt_is_dropped(tmp_path: Path) -> None:
    (conversation,), report = read(tmp_path, record(("gpt", "welcome"), ("human", "hi"), ("gpt", "hello")))
    assert contents(conversation) == [("user", "hi"), ("assistant", "hello")]
    assert report.repaired == {"first_turn_assistant": 1}


def test_empty_turns_are_dropped(tmp_path: Path) -> None:
    (conversation,), report = read(tmp_path, record(("human", "hi"), ("gpt", "  "), ("human", "there"), ("gpt", None)))
    assert conversation.user_turns == ["hi", "there"]
    assert report.repaired == {"empty_turn": 1}


def test_an_unknown_role_sets_the_record_aside(tmp_path: Path) -> None:
    kept, report = read(tmp_path, record(("human", "hi"), ("narrator", "meanwhile"), id="x"))
    assert kept == []
    assert report.set_aside == {"unknown_role": 1}
    assert report.aside_ids == [("x", "unknown_role")]


def test_a_tool_call_ends_the_conversation_before_it(tmp_path: Path) -> None:
    tools = (("function_call", "{}"), ("observation", "sun"))
    talk = record(("human", "weather?"), *tools, ("gpt", "sunny"), ("human", "thanks"))
    (conversation,), report = read(tmp_path, talk)
    assert contents(conversation) == [("user", "weather?")]
    assert report.repaired == {"tool_turns": 1}


def test_a_repeated_id_with_other_turns_gets_a_number(tmp_path: Path) -> None:
    kept, report = read(tmp_path, *[record(("human", text), id="same") for text in ("a", "b", "c")])
    assert [conversation.id for conversation in kept] == ["same", "same~2", "same~3"]
    assert report.repaired == {"renamed_id": 2}


def test_the_same_prompts_count_once(tmp_path: Path) -> None:
    pair = (record(("human", "a"), ("gpt", "1"), id="x"), record(("human", "a"), ("gpt", "2"), id="y"))
    kept, report = read(tmp_path, *pair)
    assert [conversation.id for conversation in kept] == ["x"]
    assert report.set_aside == {"duplicate": 1}


def test_for_training_other_answers_are_other_records(tmp_path: Path) -> None:
    pair = (record(("human", "a"), ("gpt", "1")), record(("human", "a"), ("gpt", "2")))
    assert len(read(tmp_path, *pair, use="training")[0]) == 2


def test_no_user_turn_is_set_aside(tmp_path: Path) -> None:
    assert read(tmp_path, record(("gpt", "hello")))[1].set_aside == {"no_user_turn": 1}


def test_for_training_an_answer_is_needed(tmp_path: Path) -> None:
    lonely = record(("human", "hi"))
    assert read(tmp_path, lonely, use="training")[1].set_aside == {"no_assistant_turn": 1}
    assert len(read(tmp_path, lonely)[0]) == 1


def test_for_training_turns_alternate_and_end_with_an_answer(tmp_path: Path) -> None:
    turns = (("human", "a"), ("human", "b"), ("gpt", "c"), ("human", "d"))
    (conversation,), report = read(tmp_path, record(*turns), use="training")
    assert contents(conversation) == [("user", "a\n\nb"), ("assistant", "c")]
    assert report.repaired == {"merged_turns": 1, "unanswered_tail": 1}


def test_system_turns_stay_at_the_front_only(tmp_path: Path) -> None:
    (conversation,), report = read(tmp_path, record(("system", "be kind"), ("human", "hi"), ("system", "now rude")))
    assert conversation.system == "be kind"
    assert contents(conversation) == [("system", "be kind"), ("user", "hi")]
    assert report.repaired == {"late_system": 1}


def test_html_is_cleaned_and_counted_or_kept(tmp_path: Path) -> None:
    path = tmp_path / "html.jsonl"
    path.write_text(json.dumps({"turns": ["one<br>two"]}) + "\n")
    cleaned, report = read_conversations(path)
    kept, _ = read_conversations(path, html="keep")
    assert (cleaned[0].user_turns, kept[0].user_turns) == (["one\ntwo"], ["one<br>two"])
    assert report.repaired == {"html": 1}


def test_half_of_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "surrogate.jsonl"
    path.write_text('{"turns": ["smile \\ud83d!"]}\n')
    (conversation,), report = read_conversations(path)
    assert conversation.user_turns[0].encode("utf-8")
    assert report.repaired == {"lone_surrogate": 1}


@pytest.mark.parametrize("raw", [7, "text", {"foo": 1}, {"conversations": 3}, {"conversations": [5]}])
def test_what_is_no_record_is_set_aside(tmp_path: Path, raw: Any) -> None:
    assert read(tmp_path, raw, {"turns": ["fine"]})[1].set_aside == {"not_a_record": 1}


def test_images_are_set_aside(tmp_path: Path) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}
    assert read(tmp_path, image)[1].set_aside == {"non_text_content": 1}


def test_ids_come_from_the_record_or_its_text(tmp_path: Path) -> None:
    kept, _ = read(tmp_path, {"question_id": 81, "turns": ["a"], "category": "writing"}, {"turns": ["b"]})
    assert (kept[0].id, kept[0].category) == ("81", "writing")
    assert kept[1].id.startswith("text-")


def test_an_id_made_from_the_text_does_not_depend_on_the_place(tmp_path: Path) -> None:
    first, _ = read(tmp_path, {"turns": ["a"]}, {"turns": ["b"]})
    second, _ = read(tmp_path, {"turns": ["b"]})
    assert second[0].id == first[1].id


def test_the_report_adds_up_and_explains_itself(tmp_path: Path) -> None:
    talks = (record(("gpt", "x"), ("human", "hi")), record(("gpt", "x")))
    _, report = read(tmp_path, *talks, {"foo": 1}, {"turns": ["a"]})
    assert report.read == report.kept + sum(report.set_aside.values()) == 4
    assert set(report.repaired) | set(report.set_aside) <= set(REASONS)
    assert report.table().row_count == 5
    assert json.loads(json.dumps(report.to_dict()))["set_aside"] == {"no_user_turn": 1, "not_a_record": 1}
