"""Task quality: the right answer scores, another does not, and methods are compared on the same answers."""

import builtins
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.prompts import Prompt, read_prompts
from lasd.evaluation.quality import check_references, final_number, load_scorer, qualities

EOS = 0


class Letters:
    """Token i is the i-th letter of an alphabet of digits and words."""

    symbols = ("", "18", "7", " the answer is ", "cat", " sat", " ran")

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.symbols[token] for token in tokens)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 x 400 = $1,200.00.", "1200"),
        ("5 apples\n#### 18", "18"),
        ("#### 18 apples, of which 3 are red", "3"),
        ("it is -4.", "-4"),
        ("about .5 litres", "0.5"),
        ("18.50 dollars", "18.5"),
        ("\\boxed{42}", "42"),
        ("in 2,000, then 7", "7"),
    ],
)
def test_the_final_number_is_read(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "####"])
def test_a_text_without_a_number_has_none(text: str) -> None:
    assert final_number(text) is None


@pytest.mark.parametrize(("answer", "score"), [("it is 18.0", 1.0), ("it is 17", 0.0), ("no idea", 0.0)])
def test_maths_is_exact_match(answer: str, score: float) -> None:
    assert load_scorer("math").score(answer, "9 + 9 = <<9+9=18>>18\n#### 18") == {"correct": score}


def test_rouge_is_that_of_the_package() -> None:
    pytest.importorskip("rouge_score", reason="the extra `eval` is not installed")
    scores = load_scorer("summaries").score("the cat sat", "the cat ran")
    assert scores == pytest.approx({"rouge1": 2 / 3, "rouge2": 1 / 2, "rougeL": 2 / 3})


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_rouge(name: str, *args: Any) -> Any:
        if name.startswith("rouge_score"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_rouge)
    with pytest.raises(LasdError, match=r"needs the package rouge-score .*: pip install 'lasd\[eval\]'"):
        load_scorer("summaries")


def test_methods_are_compared_with_plain_on_the_same_answers() -> None:
    prompts = [Prompt(str(i), None, (1,), "#### 18") for i in range(20)]
    right, wrong = [3, 1, EOS], [3, 2]
    answers = {"plain": [right] * 15 + [wrong] * 5, "m (typical 0.09/0.3, LOSSY)": [right] * 10 + [wrong] * 10}
    found = qualities(answers, prompts, load_scorer("math"), Letters(), (EOS,))
    plain, lossy = found["plain"], found["m (typical 0.09/0.3, LOSSY)"]
    assert (plain["correct"]["mean"], lossy["correct"]["mean"]) == (0.75, 0.5)
    assert lossy["correct"]["vs_plain"] == -0.25
    low, high = lossy["correct"]["vs_plain_interval95"]
    assert -0.5 < low < -0.25 < high <= 0
    assert plain["correct"]["vs_plain_interval95"] == [0, 0]
    assert (plain["ended"]["mean"], lossy["ended"]["mean"]) == (0.75, 0.5)


@pytest.mark.parametrize(("reference", "line"), [(None, "prompt 7 has no reference"), ("a cat", "holds no number")])
def test_a_prompt_that_cannot_be_scored_is_named(reference: str | None, line: str) -> None:
    with pytest.raises(LasdError, match=line):
        check_references([Prompt("7", None, (1,), reference)], load_scorer("math"))


def read(target: TargetModel, tmp_path: Path, *records: dict[str, Any], **options: Any) -> list[Prompt]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(path, target, **options)


@pytest.mark.parametrize(
    "record",
    [
        {"turns": ["q", "and?"], "reference": ["#### 3", "#### 4"]},  # Spec-Bench
        {"question": "q", "answer": "#### 3"},  # GSM8K
        {"prompt": "q", "summary": "#### 3"},
    ],
)
def test_references_are_read_as_the_data_sets_have_them(
    record: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    (prompt,) = read(target, tmp_path, record)
    assert prompt.reference == "#### 3"
    assert prompt.ids == tuple(target.encode_chat([{"role": "user", "content": "q"}]))


def test_categories_are_chosen_before_the_limit_counts(target: TargetModel, tmp_path: Path) -> None:
    rows = [{"id": i, "category": "ab"[i % 2], "prompt": "q"} for i in range(6)]
    chosen = read(target, tmp_path, *rows, categories=("b",), limit=2)
    assert [prompt.id for prompt in chosen] == ["1", "3"]


def test_a_category_that_is_not_there_is_one_line(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(LasdError, match="no record of category c: its categories are a"):
        read(target, tmp_path, {"prompt": "q", "category": "a"}, categories=("c",))
