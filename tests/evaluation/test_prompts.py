"""Prompts: each accepted form, and one line for each mistake."""

import json
from pathlib import Path

import pytest

from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.prompts import Prompt, read_prompts
from tests.evaluation.tiny import MAX_POSITIONS

RECORDS = {
    "turns": {"turns": ["Hi", "more"]},
    "prompt": {"prompt": "Hi"},
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}]},
    "chat in prompt": {"prompt": [{"role": "user", "content": "Hi"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "no"}]},
    "sharegpt that starts with gpt": {
        "conversations": [{"from": "gpt", "value": "no"}, {"from": "human", "value": "Hi"}]
    },
}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(prompts: list[Prompt], target: TargetModel) -> list[str]:
    return [target.tokenizer.decode(prompt.ids) for prompt in prompts]


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_each_form_yields_the_first_user_turn_by_the_chat_template(
    record: dict[str, object], target: TargetModel, tmp_path: Path
) -> None:
    prompts = read_prompts(write(tmp_path / "p.jsonl", record), target)
    assert texts(prompts, target) == ["<|user|>Hi<|assistant|>"]


def test_plain_lines_are_prompts_and_blank_ones_are_not(target: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  two\n")
    assert texts(read_prompts(path, target), target) == ["<|user|>one<|assistant|>", "<|user|>two<|assistant|>"]


def test_a_json_array_is_read_like_lines(target: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"id": "x", "prompt": "one"}, "two"]))
    assert [prompt.id for prompt in read_prompts(path, target)] == ["x", "2"]


def test_a_line_separator_inside_a_json_line_does_not_end_it(target: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert len(read_prompts(path, target)) == 1


def test_a_leading_system_message_is_kept(target: TargetModel, tmp_path: Path) -> None:
    record = {"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]}
    prompts = read_prompts(write(tmp_path / "p.jsonl", record), target)
    assert texts(prompts, target) == ["<|system|>Be<|user|>Hi<|assistant|>"]


def test_id_category_and_limit(target: TargetModel, prompts_file: Path) -> None:
    prompts = read_prompts(prompts_file, target, limit=2)
    assert [(prompt.id, prompt.category) for prompt in prompts] == [("1", "ab"), ("2", "ab")]


def test_raw_leaves_the_template_out(target: TargetModel, tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path / "p.jsonl", {"prompt": "Hi"}), target, raw=True)
    assert texts(prompts, target) == ["Hi"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "is empty: expected at least one record"),
        ("[]", "no prompt in .*: expected at least one record"),
        ('{"prompt": "a"}\n{"pro', "p.jsonl line 2 is not JSON"),
        ('{"story": 1}', "record 1 has no user turn .its keys: story.: expected"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "record 1 has no user turn"),
        ('{"turns": [" "]}', "the first user turn of .* record 1 is empty"),
        (json.dumps({"id": 7, "prompt": "a" * MAX_POSITIONS}), "prompt 7 of .* longer than the 256 positions of"),
    ],
)
def test_a_bad_file_is_one_line(content: str, line: str, target: TargetModel, tmp_path: Path) -> None:
    path = tmp_path / ("p.json" if content.startswith("[") else "p.jsonl")
    path.write_text(content)
    with pytest.raises(LasdError, match=line) as caught:
        read_prompts(path, target)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(LasdError, match=r"no prompt file .*absent\.jsonl: expected"):
        read_prompts(tmp_path / "absent.jsonl", target)


def test_room_for_new_tokens_is_checked(target: TargetModel, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a" * 100})
    length = len(read_prompts(path, target)[0].ids)
    with pytest.raises(LasdError, match=f"lower --max-new-tokens to {MAX_POSITIONS - length} "):
        read_prompts(path, target, max_new_tokens=200)
