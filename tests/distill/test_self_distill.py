"""The command as a user runs it, on a tiny random model: output, resume after SIGKILL, refusals, several processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distill import self_distill
from distill.sample import coloured
from distill.store import finished_ids
from lasd.conversations import DistilledRecord, load_distilled
from lasd.errors import LasdError
from tests.distill.conftest import save_tiny_model

pytest.importorskip("trl")
ENTRY = Path(self_distill.__file__)


def write_prompts(path: Path, count: int, turns: int = 1) -> Path:
    rows = [
        {"id": f"p{i}", "category": "ab"[i % 2], "turns": [f"say {i * 7919} {t}" for t in range(turns)]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(model: Path, prompts: Path, output: Path, *more: str) -> list[str]:
    needed = ["--model", str(model), "--prompts", str(prompts), "--output", str(output), "--dtype", "fp32"]
    return [*needed, "--device", "cpu", "--max_new_tokens", "12", "--batch_size", "4", *more]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], **environment: str) -> None:
    monkeypatch.setattr(sys, "argv", ["self_distill.py", *arguments])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    self_distill.main()


def records(output: Path) -> dict[str, tuple[list[int], list[int]]]:
    return {record.id: (record.input_ids, record.loss_mask) for record in load_distilled(output).load()}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 10, turns=2)


def test_the_folder_holds_records_a_readable_copy_and_a_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    output = tmp_path / "out"
    run(monkeypatch, flags(tiny_model, prompts, output))
    data = load_distilled(output)
    conversations = {record.id.split("#")[0] for record in data}
    readable = [json.loads(line) for line in (output / "sharegpt" / "shard-00000-00000.jsonl").open()]
    assert conversations == {row["id"] for row in readable} == {f"p{i}" for i in range(10)}
    assert [turn["from"] for turn in readable[0]["conversations"]][:2] == ["human", "gpt"]
    counts = data.manifest["counts"]
    assert counts["labelled_tokens"] == sum(sum(record.loss_mask) for record in data)
    assert counts["answered"] == 10
    (spent,) = data.manifest["runs"]
    assert spent["tokens"] == counts["labelled_tokens"]
    assert 0 < spent["prefill_s"] + spent["verify_s"] + spent["overhead_s"] <= spent["seconds"]
    assert (output / "config.yaml").is_file()


def test_the_model_is_the_one_that_the_data_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    from lasd.decoding.loading import load_target

    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    target = load_target(str(tiny_model), device="cpu")
    data = load_distilled(tmp_path / "out")
    data.check_against(target)
    target.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(LasdError, match="template_fingerprint"):
        data.check_against(target)


def test_labels_are_what_greedy_decoding_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    import torch

    from lasd.decoding.loading import load_target

    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    model = load_target(str(tiny_model), dtype="fp32", device="cpu").model
    for record in load_distilled(tmp_path / "out").load():
        ids = torch.tensor([record.input_ids])
        predicted = model(ids).logits[0, :-1].argmax(-1).tolist()
        wrong = [i for i, token in enumerate(predicted) if record.loss_mask[i + 1] and token != record.input_ids[i + 1]]
        assert wrong == []


def test_batches_do_not_change_greedy_or_sampled_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    for name, size in (("one", "1"), ("five", "5")):
        sampled = ["--temperature", "0.8", "--top_p", "0.9", "--seed", "3", "--batch_size", size]
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / name, *sampled))
    assert records(tmp_path / "one") == records(tmp_path / "five")


def test_kill_9_and_the_same_command_give_the_same_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 120, turns=2)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, str(ENTRY), *flags(tiny_model, prompts, killed)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 400
        while not finished_ids(killed)[0] and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done, _ = finished_ids(killed)
    assert 0 < len(done) < 120, (process.returncode, (tmp_path / "log").read_text())
    with pytest.raises(LasdError, match="unfinished"):
        load_distilled(killed)
    before = (killed / "data" / "shard-00000-00000.jsonl").read_bytes()
    run(monkeypatch, flags(tiny_model, prompts, killed))
    run(monkeypatch, flags(tiny_model, prompts, whole))
    assert records(killed) == records(whole)
    kept = before[: before.rindex(b"\n") + 1].splitlines()[: len(done)]
    assert (killed / "data" / "shard-00000-00000.jsonl").read_bytes().splitlines()[: len(kept)] == kept
    assert load_distilled(killed).fingerprint() == load_distilled(whole).fingerprint()


def test_a_finished_run_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    before = (tmp_path / "out" / "data" / "shard-00000-00000.jsonl").read_bytes()
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    assert (tmp_path / "out" / "data" / "shard-00000-00000.jsonl").read_bytes() == before


def test_another_setting_names_the_field_and_both_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    with pytest.raises(LasdError, match=r"settings\.temperature 0\.0, this command says 0\.7"):
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out", "--temperature", "0.7"))


def test_another_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(LasdError, match="weights_fingerprint"):
        run(monkeypatch, flags(other, prompts, tmp_path / "out"))


def test_a_changed_prompt_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    write_prompts(prompts, 11)
    with pytest.raises(LasdError, match=r"prompts\.sha256"):
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))


def test_batch_size_may_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out", "--batch_size", "2"))


def test_two_processes_share_the_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    run(monkeypatch, flags(tiny_model, prompts, shared), RANK="1", WORLD_SIZE="2")
    with pytest.raises(LasdError, match="unfinished"):
        load_distilled(shared)
    run(monkeypatch, flags(tiny_model, prompts, shared), RANK="0", WORLD_SIZE="2")
    run(monkeypatch, flags(tiny_model, prompts, alone), RANK="0", WORLD_SIZE="1")
    assert records(shared) == records(alone)
    assert len(list((shared / "data").iterdir())) == 2


def test_a_run_goes_on_with_fewer_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"), RANK="1", WORLD_SIZE="2")
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"), RANK="0", WORLD_SIZE="1")
    names = [record.id for record in load_distilled(tmp_path / "out")]
    assert len(names) == len(set(names))


def test_over_long_and_evaluation_prompts_are_set_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path
) -> None:
    prompts, evaluation = tmp_path / "prompts.jsonl", tmp_path / "eval.jsonl"
    rows = ["short one", "long " * 60, "What stands in the evaluation file?", "short two"]
    prompts.write_text("".join(json.dumps({"id": text[:9].strip(), "turns": [text]}) + "\n" for text in rows))
    evaluation.write_text(json.dumps({"turns": ["what stands in the evaluation file"]}) + "\n")
    more = ["--max_prompt_tokens", "100", "--exclude", str(evaluation)]
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out", *more))
    data = load_distilled(tmp_path / "out")
    assert data.manifest["report"]["set_aside"] == {"contaminated": 1, "over_long": 1}
    assert {record.id.split("#")[0] for record in data} == {"short one", "short two"}
    aside = (tmp_path / "out" / "set_aside" / "prompts.jsonl").read_text()
    assert '"contaminated"' in aside
    assert '"over_long"' in aside


def test_limit_counts_usable_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out", "--limit", "3", "--multi_turn", "false"))
    assert {record.id for record in load_distilled(tmp_path / "out")} == {"p0", "p1", "p2"}


def test_nothing_usable_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": []}\n')
    with pytest.raises(LasdError, match="no prompt of"):
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_answers_that_do_not_fit_the_model_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    with pytest.raises(LasdError, match="512 positions"):
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out", "--max_prompt_tokens", "505"))


def test_progress_is_written_as_json_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
    last = json.loads((tmp_path / "out" / "progress.jsonl").read_text().splitlines()[-1])
    assert last["turns_done"] == last["turns_total"] == 20
    assert last["tokens_per_s"] > 0


def test_check_prints_the_report_and_runs_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["a"]}\n{"conversations": [{"from": "gpt", "value": "x"}]}\n')
    monkeypatch.setattr(self_distill, "distil", lambda *args: pytest.fail("a model was run"))
    run(monkeypatch, ["--prompts", str(prompts), "--check"])
    assert "no user turn" in capsys.readouterr().out


def test_by_path_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command: list[Any] = [sys.executable, ENTRY, "--prompts", "nosuch.jsonl", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: prompt file nosuch.jsonl does not exist")


@pytest.mark.slow
def test_torchrun_starts_two_ranks_that_share_the_work(tmp_path: Path, tiny_model: Path, prompts: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ENTRY)]
    done = subprocess.run(
        [*command, *flags(tiny_model, prompts, tmp_path / "out")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len({record.id.split("#")[0] for record in load_distilled(tmp_path / "out")}) == 10
    assert all(path.stat().st_size for path in (tmp_path / "out" / "data").iterdir())


def test_a_sample_shows_labels_in_colour(tokenizer: Any) -> None:
    ids = tokenizer("ask tell", add_special_tokens=False)["input_ids"]
    text = coloured(DistilledRecord("r", ids, [0] * 4 + [1] * 4, 1, None, ["eos"]), tokenizer)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans[-2:]] == [
        ("ask ", "dim"),
        ("tell", "green"),
    ]


def test_no_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path, prompts: Path
) -> None:
    import torch

    from lasd.decoding.decoder import Decoder

    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "admit", out_of_memory)
    with pytest.raises(LasdError, match="lower --batch_size"):
        run(monkeypatch, flags(tiny_model, prompts, tmp_path / "out"))
