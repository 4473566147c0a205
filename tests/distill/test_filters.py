"""Prompts that stand in an evaluation file are recognised through case, spacing and wrapping; others are not."""

import json
from pathlib import Path

import pytest

from distill.filters import Contamination, set_aside_contaminated
from lasd.conversations import Conversation, Message, Report

LONG = (
    "Imagine you are participating in a race with a group of people and you have just overtaken the second person, "
    "what is your current position and where is the person you just overtook"
)


@pytest.fixture
def known(tmp_path: Path) -> Contamination:
    path = tmp_path / "eval.jsonl"
    turns = [[LONG + "?", "Continue."], ["Hi"], ["Describe a vivid and unique character, using strong imagery."]]
    path.write_text("".join(json.dumps({"turns": one}) + "\n" for one in turns))
    return Contamination([path])


def talk(*turns: str) -> Conversation:
    return Conversation("x", [Message("user", turn) for turn in turns])


@pytest.mark.parametrize(
    "turns",
    [
        (LONG + "?",),
        (LONG.upper().replace(" ", "  "),),
        ("Please answer: " + LONG + "? Thanks.",),
        ("hello", "describe a vivid and unique character using strong imagery"),
        ("hi!",),
    ],
)
def test_evaluation_prompts_are_recognised(known: Contamination, turns: tuple[str, ...]) -> None:
    assert talk(*turns) in known


@pytest.mark.parametrize(
    "turns",
    [
        ("Describe a vivid dream.",),
        ("What is a race?", "Continue."),
        ("Something else.", "Hi"),
        ("Imagine you are participating in a race with a group of people and a dog that barks " + "and so on " * 60,),
    ],
)
def test_other_prompts_are_not(known: Contamination, turns: tuple[str, ...]) -> None:
    assert talk(*turns) not in known


def test_contaminated_prompts_are_set_aside_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"turns": ["What is the answer to everything?"]}) + "\n")
    report = Report(read=2)
    kept = set_aside_contaminated([talk("what is the answer to everything"), talk("other")], report, [path])
    assert [one.user_turns for one in kept] == [["other"]]
    assert (report.kept, dict(report.set_aside)) == (1, {"contaminated": 1})
