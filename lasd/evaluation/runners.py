"""The contestants of a measurement: transformers' own `generate`, and a lasting `Decoder` for each method.

Each runner takes the prompts of one unit as token ids and returns a `Run`. Tokenisation is not timed; prefill is.

Legend: B prompts of the unit, T tokens of the longest prompt.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from transformers import GenerationConfig

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.drafters.base import Drafter
from lasd.evaluation.metrics import REFERENCE, Run, cut_at_eos


class Runner(Protocol):
    """One contestant."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        """Answers the prompts as one batch; `at_most` new tokens shortens the answers (for warming up)."""
        ...


class GenerateRunner:
    """transformers' `generate` as users call it: the model's own attention, its default cache, left padding.

    Args:
        target: whose model answers.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy; else it samples, from a seed that follows from `seed` and the prompts.
        seed: see `temperature`.
    """

    name = REFERENCE

    def __init__(self, target: TargetModel, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> None:
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.temperature, self.seed = temperature, seed
        self.pad_token_id = _pad_token_id(target)

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        """See `Runner`."""
        input_ids_BT, mask_BT = self._left_padded(prompts)
        config = self._config(min(at_most or self.max_new_tokens, self.max_new_tokens))
        if self.temperature:
            torch.manual_seed(prompt_seed(self.seed, prompts[0]))
        synchronize(self.target.device)
        start = time.perf_counter()
        output = self.target.model.generate(input_ids_BT, attention_mask=mask_BT, generation_config=config)
        synchronize(self.target.device)
        seconds = time.perf_counter() - start
        answers = output[:, input_ids_BT.shape[1] :].tolist()
        run = Run([cut_at_eos(answer, self.target.eos_token_ids) for answer in answers], seconds, steps=0)
        run.steps = run.nodes = run.kept  # one token a step
        return run

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        rows = [[self.pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        device = self.target.device
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        """Greedy or pure sampling; values that the model's own generation config would fill in are set to "off"."""
        sampling = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.temperature else {}
        return GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=bool(self.temperature),
            **sampling,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=list(self.target.eos_token_ids) or None,
            pad_token_id=self.pad_token_id,
        )


class DecoderRunner:
    """One of our methods; the decoder, its cache and its drafter live as long as the runner.

    Args:
        name: the method's.
        target: what decodes.
        drafter: None for plain decoding.
        params: of every answer; when sampling, each prompt has a seed of its own, the same for all methods.
        max_slots: prompts at a time.
        max_context: most tokens of prompt and answer.
    """

    def __init__(
        self,
        name: str,
        target: TargetModel,
        drafter: Drafter | None,
        params: SamplingParams,
        *,
        max_slots: int = 1,
        max_context: int | None = None,
    ) -> None:
        self.name = name
        self.target = target
        self.params = params
        self.decoder = Decoder(target, drafter, max_slots=max_slots, max_context=max_context)

    def run(self, prompts: Sequence[Sequence[int]], at_most: int | None = None) -> Run:
        """See `Runner`."""
        count = min(at_most or self.params.max_new_tokens, self.params.max_new_tokens)
        params = [
            replace(self.params, max_new_tokens=count, seed=prompt_seed(self.params.seed, ids)) for ids in prompts
        ]
        synchronize(self.target.device)
        start = time.perf_counter()
        results = self.decoder.generate(prompts, params)
        synchronize(self.target.device)
        seconds = time.perf_counter() - start
        return _run_of(results, seconds, self.target.eos_token_ids)


def _run_of(results: Sequence[GenerationResult], seconds: float, eos_token_ids: Sequence[int]) -> Run:
    stats = [result.stats for result in results]
    return Run(
        tokens=[cut_at_eos(result.tokens, eos_token_ids) for result in results],
        seconds=seconds,
        steps=sum(one.steps for one in stats),
        accepted_per_step=[count for one in stats for count in one.accepted_per_step],
        nodes=sum(one.nodes for one in stats),
        prefill_s=sum(one.prefill_s for one in stats),
        draft_s=sum(one.draft_s for one in stats),
        verify_s=sum(one.verify_s for one in stats),
        overhead_s=sum(one.overhead_s for one in stats),
    )


def prompt_seed(seed: int, ids: Sequence[int]) -> int:
    """A seed for one prompt: the same for every method, another for another prompt."""
    return zlib.crc32(repr((seed, list(ids))).encode())


def synchronize(device: torch.device) -> None:
    """Waits for an accelerator to finish its work, so that the clock sees it; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _pad_token_id(target: TargetModel) -> int:
    pad = target.tokenizer.pad_token_id
    if pad is not None:
        return int(pad)
    return target.eos_token_ids[0] if target.eos_token_ids else 0
