"""`lasd generate`: answers one prompt or a file of prompts, streamed as text or as JSON lines."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.stats import DecodeStats
from lasd.decoding.target import TargetModel
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from lasd.evaluation.metrics import PLAIN
from lasd.evaluation.prompts import Prompt, check_file, check_length, encode, read_prompts
from lasd.evaluation.setup import ModelChoice, method_label, refuse_typical_without_drafts
from lasd.streaming import TextStream


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
    decoder, label = open_decoder(config.choice, config.method, params)
    for prompt in _prompts(config, decoder.target):
        if as_json:
            result = decoder.generate([prompt.ids], params)[0]
            print(json.dumps(answer_record(prompt, result, label, params), ensure_ascii=False), flush=True)
            continue
        if config.prompts is not None:
            print(f"[{prompt.id}]")
        stream = TextStream(decoder.target.tokenizer, params.stop)
        result = decoder.generate([prompt.ids], params, on_tokens=partial(_show_tokens, stream))[0]
        _show(stream.finish(result.text) + "\n")
        print(f"{label}: {statistics_line(result)}", file=sys.stderr, flush=True)


def open_decoder(choice: ModelChoice, method: str | None, params: SamplingParams) -> tuple[Decoder, str]:
    """The decoder of one method (by default the artifact's, or plain), and what to call it beside its results."""
    target, artifact = choice.load()
    method = method or (artifact.manifest.kind if artifact is not None else PLAIN)
    refuse_typical_without_drafts(params.typical, [method])
    return Decoder(target, load_drafter(artifact, target, method)), method_label(method, params)


def _show_tokens(stream: TextStream, index: int, tokens: list[int]) -> None:
    _show(stream.take(tokens))


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _prompts(config: GenerateConfig, target: TargetModel) -> list[Prompt]:
    if config.prompts is not None:
        return read_prompts(config.prompts, target, config.limit, max_new_tokens=1, raw=config.raw)
    if not config.prompt:
        raise LasdError("--prompt is empty: expected some text")
    ids = encode(target, [{"role": "user", "content": config.prompt}], raw=config.raw)
    check_length(target, len(ids), 1)
    return [Prompt("prompt", None, tuple(ids))]


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
    return f"{describe_stats(result.stats)}; ended by {result.finish_reason}"


def describe_stats(stats: DecodeStats) -> str:
    """Speed and acceptance of one answer, or of several merged, in a line."""
    speed = stats.tokens / stats.total_s if stats.total_s else 0.0
    return (
        f"{stats.tokens} tokens in {stats.total_s:.2f} s, {speed:.1f} tokens/s; {stats.tokens_per_step:.2f} tokens a "
        f"step in {stats.steps} steps, {sum(stats.accepted_per_step)} of {stats.nodes - stats.steps} drafted tokens "
        f"accepted; prefill {stats.prefill_s:.2f} s, draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, "
        f"overhead {stats.overhead_s:.2f} s"
    )
