"""`lasd generate`: answers one prompt or a file of prompts, streamed as text or as JSON lines."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from lasd.evaluation.metrics import PLAIN
from lasd.evaluation.prompts import Prompt, check_file, check_length, encode, read_prompts
from lasd.evaluation.setup import ModelChoice, method_label, refuse_typical_without_drafts


@dataclass(frozen=True)
class GenerateConfig:
    """What to answer: the text `prompt`, or the records of the file `prompts`."""

    choice: ModelChoice
    method: str | None = None
    prompt: str | None = None
    prompts: Path | None = None
    limit: int | None = None
    raw: bool = False


def run_generate(config: GenerateConfig, params: SamplingParams, *, as_json: bool) -> None:
    """Answers the prompts one by one on stdout; without `as_json` a line of statistics follows each on stderr."""
    if config.prompts is not None:
        check_file(config.prompts)
    target, artifact = config.choice.load()
    prompts = _prompts(config, target)
    method = config.method or (artifact.manifest.kind if artifact is not None else PLAIN)
    refuse_typical_without_drafts(params.typical, [method])
    label = method_label(method, params)
    decoder = Decoder(target, load_drafter(artifact, target, method))
    for prompt in prompts:
        if as_json:
            result = decoder.generate([prompt.ids], params)[0]
            print(json.dumps(answer_record(prompt, result, label, params), ensure_ascii=False), flush=True)
            continue
        if config.prompts is not None:
            print(f"[{prompt.id}]")
        stream = TextStream(target.tokenizer)
        result = decoder.generate([prompt.ids], params, on_tokens=stream.take)[0]
        stream.finish(result.text)
        print(f"{label}: {statistics_line(result)}", file=sys.stderr, flush=True)


def _prompts(config: GenerateConfig, target: TargetModel) -> list[Prompt]:
    if config.prompts is not None:
        return read_prompts(config.prompts, target, config.limit, max_new_tokens=1, raw=config.raw)
    if not config.prompt:
        raise LasdError("--prompt is empty: expected some text")
    ids = encode(target, [{"role": "user", "content": config.prompt}], raw=config.raw)
    check_length(target, len(ids), 1)
    return [Prompt("prompt", None, tuple(ids))]


class TextStream:
    """Prints an answer while it grows: only text that later tokens cannot change any more."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.printed = ""

    def take(self, index: int, tokens: Sequence[int]) -> None:
        """Called by the decoder with newly committed tokens."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # an unfinished character
            self._print(text)

    def finish(self, text: str) -> None:
        """Prints what is left of the whole answer, and ends the line."""
        self._print(text)
        print(flush=True)

    def _print(self, text: str) -> None:
        if text.startswith(self.printed):
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text


def answer_record(prompt: Prompt, result: GenerationResult, label: str, params: SamplingParams) -> dict[str, Any]:
    """One answer as JSON."""
    return {
        "id": prompt.id,
        "category": prompt.category,
        "method": label,
        "lossy": params.typical is not None,
        "tokens": result.tokens,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "stats": result.stats.to_dict(),
    }


def statistics_line(result: GenerationResult) -> str:
    """Speed and acceptance of one answer in a line."""
    stats = result.stats
    speed = stats.tokens / stats.total_s if stats.total_s else 0.0
    return (
        f"{stats.tokens} tokens in {stats.total_s:.2f} s, {speed:.1f} tokens/s; {stats.tokens_per_step:.2f} tokens a "
        f"step in {stats.steps} steps; prefill {stats.prefill_s:.2f} s, draft {stats.draft_s:.2f} s, "
        f"verify {stats.verify_s:.2f} s, overhead {stats.overhead_s:.2f} s; ended by {result.finish_reason}"
    )
