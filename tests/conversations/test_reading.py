"""Files of every known shape are read, and of damaged ones every whole record is saved."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lasd.conversations import read_conversations
from lasd.errors import LasdError


def sharegpt(name: str, *texts: str) -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[index % 2], "value": text} for index, text in enumerate(texts)]
    return {"id": name, "conversations": turns}


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


def jsonl(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


ONE, TWO = sharegpt("one", "hi", "hello", "bye"), sharegpt("two", "what?", "that")
TALKS = [messages("hi", "hello", "bye"), messages("what?", "that")]
SHAPES = {
    "sharegpt.json": json.dumps([ONE, TWO]),
    "sharegpt_pretty.json": json.dumps([ONE, TWO], indent=2),
    "sharegpt.jsonl": jsonl(ONE, TWO),
    "messages.json": json.dumps([{"messages": talk} for talk in TALKS]),
    "messages.jsonl": jsonl(*[{"messages": talk} for talk in TALKS]),
    "arrays.json": json.dumps(TALKS),
    "arrays.jsonl": jsonl(*TALKS),
    "turns.jsonl": jsonl({"turns": ["hi", "bye"]}, {"turns": ["what?"]}),
    "turns.json": json.dumps([{"turns": ["hi", "bye"]}, {"turns": ["what?"]}]),
    "wrapped.json": json.dumps({"data": [ONE, TWO]}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_same_user_turns(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(SHAPES[name])
    conversations, report = read_conversations(path)
    assert [conversation.user_turns for conversation in conversations] == [["hi", "bye"], ["what?"]]
    assert (report.read, report.kept) == (2, 2)


def test_one_record_alone_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(ONE, indent=1))
    assert [c.id for c in read_conversations(path)[0]] == ["one"]


def test_openai_content_parts_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    parts = [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]
    path.write_text(jsonl({"messages": [{"role": "user", "content": parts}]}))
    assert read_conversations(path)[0][0].user_turns == ["look\nhere"]


@pytest.mark.parametrize("indent", [None, 2])
def test_whole_records_before_a_cut_are_saved(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps([sharegpt(f"c{i}", f"question {i}", "answer") for i in range(20)], indent=indent)
    path = tmp_path / "cut.json"
    path.write_text(text[: text.index("question 15") + 4])
    conversations, report = read_conversations(path)
    assert [c.id for c in conversations] == [f"c{i}" for i in range(15)]
    assert dict(report.set_aside) == {"cut_off_json": 1}


def test_a_cut_jsonl_loses_only_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(jsonl(ONE, TWO)[:-12])
    conversations, report = read_conversations(path)
    assert [c.id for c in conversations] == ["one"]
    assert dict(report.set_aside) == {"cut_off_json": 1}


def test_a_broken_line_in_the_middle_is_set_aside_alone(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(jsonl(ONE) + '{"id": "x", "conversations": [{\n' + jsonl(TWO))
    conversations, report = read_conversations(path)
    assert [c.id for c in conversations] == ["one", "two"]
    assert dict(report.set_aside) == {"broken_json": 1}


def test_reading_goes_on_behind_damage_inside_an_array(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    parts = [json.dumps(sharegpt(f"c{i}", f"q{i}", "a")) for i in range(4)]
    parts[1] = parts[1].replace('"value": "q1"', '"value": q1')
    path.write_text("[" + ", ".join(parts) + "]")
    conversations, report = read_conversations(path)
    assert [c.id for c in conversations] == ["c0", "c2", "c3"]
    assert dict(report.set_aside) == {"broken_json": 1}


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(jsonl({"turns": ["ok"]}).encode() + b'{"turns": ["caf\xe9"]}\n')
    conversations, report = read_conversations(path)
    assert conversations[1].user_turns == ["caf\ufffd"]
    assert report.repaired["invalid_utf8"] == 1


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl({"turns": ["a"]}, {"turns": ["b"]}).encode())
    assert len(read_conversations(path)[0]) == 2


@pytest.mark.parametrize(("content", "words"), [(None, "does not exist"), ("", "is empty"), (" \n\n", "is empty")])
def test_a_missing_or_empty_file_is_one_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LasdError, match=words) as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(LasdError, match="is a folder"):
        read_conversations(tmp_path)


def test_limit_stops_early(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text(jsonl(*[{"turns": [f"q{i}"]} for i in range(50)]))
    conversations, report = read_conversations(path, limit=7)
    assert (len(conversations), report.read) == (7, 7)


def test_thirty_megabytes_cut_off_are_read_in_seconds(tmp_path: Path) -> None:
    filler = "some words of an answer that goes on. " * 40
    text = json.dumps([sharegpt(f"c{i}", f"question {i}", filler) for i in range(20_000)])[:30_000_000]
    path = tmp_path / "big.json"
    path.write_text(text)
    start = time.process_time()
    conversations, report = read_conversations(path)
    assert time.process_time() - start < 10
    assert len(conversations) > 15_000
    assert report.set_aside["cut_off_json"] == 1


def test_a_messy_real_file_is_read_whole() -> None:
    folder = os.environ.get("LASD_DATA_DIR")
    path = Path(folder or ".") / "sharegpt_sample.json"
    if folder is None or not path.is_file():
        pytest.skip("LASD_DATA_DIR does not name a folder with sharegpt_sample.json")
    conversations, report = read_conversations(path, use="training")
    assert report.read == report.kept + sum(report.set_aside.values()) == 1352
    assert all(conversation.messages[-1].role == "assistant" for conversation in conversations)
    assert report.repaired["renamed_id"] == report.repaired["empty_turn"] == 1
