"""The command line: thin, quick to start, and one line for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lasd import cli
from tests.evaluation.tiny import load_tiny, save_heads, save_model, write_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `heads` for it, and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("cli")
    save_model(folder / "model")
    save_heads(folder / "heads", load_tiny(folder / "model"))
    write_prompts(folder / "prompts.jsonl")
    return folder


class Lasd:
    """Runs `lasd` in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys

    def __call__(self, command: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); relative names are those of the test folder."""
        self.monkeypatch.chdir(self.folder)
        self.monkeypatch.setattr(sys, "argv", ["lasd", *command.split(" ")])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = self.capsys.readouterr()
        return int(exit_.value.code or 0), out, err


@pytest.fixture
def lasd(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lasd:
    return Lasd(folder, monkeypatch, capsys)


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, lasd.cli; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_help_names_the_commands(lasd: Lasd) -> None:
    code, out, _ = lasd("--help")
    assert code == 0
    assert all(name in out for name in ("generate", "bench", "prove", "show"))


def test_generate_prints_tokens_text_and_statistics_as_json(lasd: Lasd) -> None:
    code, out, _ = lasd("generate --model model --artifact heads --prompt hello --max-new-tokens 9 --json")
    record = json.loads(out)
    assert code == 0
    assert len(record["tokens"]) <= 9
    assert record["stats"]["tokens"] == len(record["tokens"])
    assert {"text", "finish_reason"} <= set(record)


def test_generate_streams_the_text_and_ends_with_a_line_of_statistics(lasd: Lasd) -> None:
    _, out, _ = lasd("generate --model model --prompt hello --max-new-tokens 9 --json")
    code, streamed, err = lasd("generate --model model --prompt hello --max-new-tokens 9")
    assert code == 0
    assert streamed == json.loads(out)["text"] + "\n"
    assert "tokens/s" in err.splitlines()[-1]


def test_generate_answers_a_file_with_a_line_of_json_each(lasd: Lasd) -> None:
    _, out, _ = lasd("generate --model model --prompts prompts.jsonl --limit 2 --max-new-tokens 4 --json")
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["1", "2"]


def test_the_methods_give_the_same_text(lasd: Lasd) -> None:
    command = "generate --model model --artifact heads --prompt hello --max-new-tokens 20 --dtype fp32 --json --method "
    plain, medusa = (json.loads(lasd(command + method)[1]) for method in ("plain", "medusa"))
    assert plain["tokens"] == medusa["tokens"]
    assert plain["stats"]["steps"] > medusa["stats"]["steps"]


def test_a_sampled_answer_depends_on_the_seed(lasd: Lasd) -> None:
    command = "generate --model model --prompt hello --max-new-tokens 12 --temperature 2 --json --seed "
    first, again, other = (json.loads(lasd(command + seed)[1])["tokens"] for seed in "112")
    assert first == again != other


def test_raw_leaves_the_chat_template_out(lasd: Lasd) -> None:
    _, out, _ = lasd("generate --model model --prompt hello --max-new-tokens 1 --json --raw")
    assert json.loads(out)["prompt_tokens"] == len("hello")


def test_bench_prints_a_table_and_writes_the_file(lasd: Lasd) -> None:
    code, out, _ = lasd(
        "bench --model model --artifact heads --prompts prompts.jsonl --limit 2 --max-new-tokens 4 --output b.json"
    )
    assert code == 0
    assert "medusa" in out
    assert "medusa" in json.loads((lasd.folder / "b.json").read_text())["methods"]


def test_prove_exits_with_0_when_all_are_equal(lasd: Lasd) -> None:
    code, out, _ = lasd(
        "prove --model model --artifact heads --prompts prompts.jsonl --max-new-tokens 24 --output p.json"
    )
    assert code == 0
    assert "equal" in out
    assert json.loads((lasd.folder / "p.json").read_text())["proven"] is True


def test_prove_exits_with_1_when_nothing_was_drafted(lasd: Lasd) -> None:
    code, out, _ = lasd("prove --model model --artifact heads --prompts prompts.jsonl --max-new-tokens 1 --json")
    assert code == 1
    assert json.loads(out)["greedy"][1]["verdict"] == "nothing proven"


def test_prove_takes_several_batch_sizes_and_samples(lasd: Lasd) -> None:
    code, out, _ = lasd(
        "prove --model model --artifact heads --prompts prompts.jsonl --max-new-tokens 24 --batch-size 1 "
        "--batch-size 2 --sampling --samples 80 --temperature 0.3 --json"
    )
    result = json.loads(out)
    assert code == 0
    assert [row["batch_size"] for row in result["greedy"]] == [1, 1, 2, 2]
    assert [row["verdict"] for row in result["sampling"]] == ["same law", "same law"]


def test_typical_acceptance_is_named_lossy_in_text_and_json(lasd: Lasd) -> None:
    command = (
        "generate --model model --artifact heads --prompt a --max-new-tokens 5 --temperature 0.7 --typical 0.1,0.3"
    )
    assert lasd(command)[2].splitlines()[-1].startswith("medusa (typical 0.1/0.3, LOSSY): ")
    record = json.loads(lasd(command + " --json")[1])
    assert (record["method"], record["lossy"]) == ("medusa (typical 0.1/0.3, LOSSY)", True)


def test_show_names_the_base_model(lasd: Lasd) -> None:
    code, out, _ = lasd("show heads")
    assert code == 0
    assert "Medusa heads for" in out


MISTAKES = {
    "generate --model model": "neither --prompt nor --prompts given: expected exactly one",
    "generate --model model --prompt a --prompts prompts.jsonl": "both --prompt and --prompts given: expected",
    "generate --model model --prompt a --method medsa": "method 'medsa' is unknown",
    "generate --model model --prompt a --method medusa": "method medusa needs an artifact",
    "generate --model model --prompt a --dtype int3": "dtype is 'int3'",
    "generate --model model --prompt a --top-p 0": "top_p is 0.0",
    "generate --model lama-2-7b --prompt a": "llama-2-7b",
    "generate --model model --prompts absent.txt": "no prompt file absent.txt",
    "bench --model model --artifact absent --prompts prompts.jsonl --output x.json": "artifact absent does not exist",
    "bench --model model --prompts prompts.jsonl --output x.txt": "expected a file name that ends in .json",
    "bench --model model --prompts prompts.jsonl --max-new-tokens 999 --output x.json": "lower --max-new-tokens to",
    "prove --model model --artifact model --prompts prompts.jsonl": "model has no lasd.json",
    "generate --model model --artifact heads --prompt a --typical 0.09,0.3": "a temperature above 0",
    "generate --model model --prompt a --temperature 1 --typical 0.09,0.3": "plain decoding, which drafts nothing",
    "generate --model model --artifact heads --prompt a --temperature 1 --typical 9": "expected EPSILON,DELTA",
    "bench --model model --prompts prompts.jsonl --output x.json --quality poems": "expected one of math, summaries",
    "bench --model model --prompts prompts.jsonl --output x.json --quality math": "prompt 1 has no reference",
    "bench --model model --prompts prompts.jsonl --output x.json --category zz": "its categories are ab, cd",
    "prove --model model --prompts prompts.jsonl --record": "--record without --artifact",
    "prove --model model --prompts prompts.jsonl --sampling --samples 5": "--samples is 5",
    "show absent": "artifact absent does not exist",
}


@pytest.mark.parametrize(("command", "line"), MISTAKES.items(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_code_2(command: str, line: str, lasd: Lasd) -> None:
    code, _, err = lasd(command)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert line in last


def test_an_artifact_of_another_model_names_what_differs(lasd: Lasd) -> None:
    save_model(lasd.folder / "other", seed=1)
    code, _, err = lasd("generate --model other --artifact heads --prompt a")
    assert code == 2
    assert "weights_fingerprint" in err
