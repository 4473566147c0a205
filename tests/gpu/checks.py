"""The checks of check_gpu.py. Each takes a Bench and returns an Outcome.

Legend: B sequences, N rows of a pass.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.step_time import measure_step_time, synchronize
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.base import Drafter
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads
from lasd.evaluation.step_cost import attention_cost, batch_cost
from tests.drafters_under_test import TREE, Answers, Scripted
from tests.gpu.waits import waits_of_steps

ROUNDING_GAP = 1e-3
"""Two fp32 answers that part where the top two logits are closer than this part by rounding."""


@dataclass(frozen=True)
class Sizes:
    """What is run: the model's shape and how much of each check."""

    model: dict[str, int]
    split_layers: int
    prompts: tuple[int, ...]
    """Lengths of the prompts whose answers are compared."""
    answer: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    speed_prompt: int
    speed_answer: int
    batch: tuple[int, int]
    """Nodes and cached tokens of the batch's step."""
    attention: tuple[int, int]
    """Rows and cached tokens of the step that attention is compared in."""
    repeats: int


FULL = Sizes(
    model={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
    },
    split_layers=4,
    prompts=(24, 97, 211),
    answer=64,
    rows=(1, 8, 16, 32, 64, 128),
    contexts=(256, 2048, 8192),
    speed_prompt=256,
    speed_answer=128,
    batch=(16, 256),
    attention=(32, 2048),
    repeats=7,
)
"""1.1 billion parameters."""
TINY = Sizes(
    model={
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    split_layers=2,
    prompts=(3, 9, 17),
    answer=16,
    rows=(1, 4),
    contexts=(8, 16),
    speed_prompt=8,
    speed_answer=8,
    batch=(4, 32),
    attention=(4, 32),
    repeats=1,
)


@dataclass
class Bench:
    """Where and at which sizes the checks run."""

    device: torch.device
    sizes: Sizes
    seed: int = 0
    model: LlamaForCausalLM | None = None

    def target(self, dtype: torch.dtype) -> TargetModel:
        """The random model in this dtype; made once, converted in place."""
        if self.model is None:
            self.model = random_model(self.sizes.model, self.device, self.seed)
        return TargetModel(self.model.to(dtype), name="random llama")

    def prompt(self, length: int) -> list[int]:
        """Random tokens, the same for the same length."""
        generator = torch.Generator().manual_seed(self.seed + length)
        return torch.randint(3, self.sizes.model["vocab_size"], (length,), generator=generator).tolist()


@dataclass
class Outcome:
    """What a check found. `passed` None: it was measured or skipped, there is nothing to pass."""

    summary: str
    passed: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)


def random_model(shape: dict[str, int], device: torch.device, seed: int) -> LlamaForCausalLM:
    """A llama of this shape with random fp32 weights and no end-of-text token."""
    torch.manual_seed(seed)
    config = LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    with device:
        model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:  # scaled so that answers vary and the top two logits are far apart
            spread = 0.02 if "embed" in name else (1.0 if "lm_head" in name else 1.5) * parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=spread)
    return model.float().eval()


def always_right(target: TargetModel, answers: Answers) -> Drafter:
    """A tree whose first path is the answer."""
    return Scripted(answers, target.vocab_size, TREE, right=True, device=target.device)


def random_heads(target: TargetModel, shape: TreeShape) -> Drafter:
    """Medusa with random heads: mostly wrong."""
    torch.manual_seed(7)
    heads = MedusaHeads(target.hidden_size, shape.max_depth)
    for parameter in heads.parameters():
        parameter.data.normal_(0, target.hidden_size**-0.5)
    return MedusaDrafter(heads, shape, target)


def own_answer(model: Any, prompt: Sequence[int], count: int, device: torch.device) -> list[int]:
    """What transformers' generate answers, greedy."""
    ids = torch.tensor([prompt], device=device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def exactness(bench: Bench) -> Outcome:
    """fp32: plain decoding, random Medusa heads and an always-right tree against generate, at B = 1 and 3."""
    target, count = bench.target(torch.float32), bench.sizes.answer
    prompts = [bench.prompt(length) for length in bench.sizes.prompts]
    answers = {tuple(prompt): own_answer(target.model, prompt, count, bench.device) for prompt in prompts}
    drafters = {
        "plain": None,
        "medusa tree, random heads": random_heads(target, TreeShape.from_dense([4, 2, 2])),
        "always-right tree": always_right(target, answers),
    }
    found: dict[str, Any] = {}
    for name, drafter in drafters.items():
        for slots in (1, len(prompts)):
            params = SamplingParams(max_new_tokens=count, eos_token_ids=())
            results = Decoder(target, drafter, max_slots=slots).generate(prompts, params)
            pairs = zip(prompts, results, strict=True)
            gaps = [
                gap for prompt, one in pairs if (gap := parting_gap(target, prompt, answers, one.tokens)) is not None
            ]
            per_step = sum(r.stats.tokens - 1 for r in results) / sum(r.stats.steps for r in results)
            found[f"{name}, B = {slots}"] = {"parted_at_gaps": gaps, "tokens_per_step": per_step}
    gaps = [gap for one in found.values() for gap in one["parted_at_gaps"]]
    right = [one["tokens_per_step"] for name, one in found.items() if name.startswith("always-right")]
    passed = max(gaps, default=0.0) < ROUNDING_GAP and min(right) > 1.5
    summary = f"{len(found) * len(prompts) - len(gaps)} of {len(found) * len(prompts)} answers equal generate's"
    if gaps:
        summary += f"; the others part at top-two gaps of at most {max(gaps):.1e}"
    distinct = [len(set(answer)) for answer in answers.values()]
    return Outcome(summary, passed, {"methods": found, "distinct_tokens": distinct})


def parting_gap(target: TargetModel, prompt: list[int], answers: Answers, tokens: list[int]) -> float | None:
    """None if the answers are equal; else the gap of the top two logits where they part (infinite at other lengths)."""
    own = answers[tuple(prompt)]
    if own == tokens:
        return None
    place = next((i for i, pair in enumerate(zip(own, tokens, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return float("inf")
    with torch.inference_mode():
        ids = torch.tensor([prompt + own[:place]], device=target.device)
        best = target.model(ids).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def step_times(bench: Bench) -> Outcome:
    """t(rows, context) in bf16."""
    sizes = bench.sizes
    times = measure_step_time(bench.target(torch.bfloat16), sizes.rows, sizes.contexts, sizes.repeats)
    lines = [f"rows {' '.join(f'{n:>7}' for n in times.rows)}"]
    for context, line in zip(times.contexts, times.measured_ms, strict=True):
        lines.append(f"{context:>5} cached " + " ".join(f"{ms:7.2f}" for ms in line) + " ms")
    return Outcome("\n".join(lines), None, times.to_dict())


def plain_speed(bench: Bench) -> Outcome:
    """Plain decoding against generate in bf16: tokens/s, taking turns, medians of three."""
    target, count = bench.target(torch.bfloat16), bench.sizes.speed_answer
    prompt, decoder = bench.prompt(bench.sizes.speed_prompt), Decoder(target)
    calls: dict[str, Callable[[int], object]] = {
        "generate": lambda n: own_answer(target.model, prompt, n, bench.device),
        "plain": lambda n: decoder.generate([prompt], SamplingParams(max_new_tokens=n, eos_token_ids=())),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(min(8, count))
    for _ in range(3):
        for name, call in calls.items():
            synchronize(bench.device)
            start = time.perf_counter()
            call(count)
            synchronize(bench.device)
            seconds[name].append(time.perf_counter() - start)
    rates = {name: count / sorted(taken)[1] for name, taken in seconds.items()}
    ratio = rates["plain"] / rates["generate"]
    summary = f"plain {rates['plain']:.1f} tokens/s, generate {rates['generate']:.1f}: {ratio:.2f}x"
    return Outcome(summary, None if bench.sizes is TINY else ratio >= 1, {"tokens_per_s": rates, "ratio": ratio})


def host_waits(bench: Bench) -> Outcome:
    """A step makes the host wait for the device once: when it reads what was decided."""
    target, steps = bench.target(torch.bfloat16), 6
    shape = TreeShape.from_dense([4, 2, 2])
    settings = {"eos_token_ids": (), "max_new_tokens": 64}
    cases = {
        "plain": (None, 1, SamplingParams(**settings)),
        "medusa": (shape, 1, SamplingParams(**settings)),
        "medusa, B = 3": (shape, 3, SamplingParams(**settings)),
        "medusa sampling, B = 3": (shape, 3, SamplingParams(**settings, temperature=0.8, top_k=20, top_p=0.9)),
    }
    found = {}
    for name, (tree, slots, params) in cases.items():
        decoder = Decoder(target, random_heads(target, tree) if tree else None, max_slots=slots)
        decoder.admit([bench.prompt(length) for length in bench.sizes.prompts[:slots]], params)
        for _ in range(3):
            decoder.step()
        found[name] = waits_of_steps(decoder.step, steps, bench.device)
    worst = max(one["waits_per_step"] for one in found.values())
    summary = ", ".join(f"{name}: {one['waits_per_step']:g}" for name, one in found.items())
    return Outcome(f"waits a step: {summary} ({found['plain']['how']})", worst <= 1, found)


def step_costs(bench: Bench) -> Outcome:
    """A step of 8 sequences against 8 single steps, and our attention against the model's own, in bf16."""
    target, sizes = bench.target(torch.bfloat16), bench.sizes
    batch = batch_cost(target, nodes=sizes.batch[0], context=sizes.batch[1], repeats=sizes.repeats)
    attention = attention_cost(target, rows=sizes.attention[0], context=sizes.attention[1], repeats=sizes.repeats)
    summary = (
        f"a step of 8 costs {batch['step']['measured']:.3f} of 8 single ones, t(rows) predicts "
        f"{batch['step']['predicted']:.3f}\n{attention['rows']} rows behind {attention['context']} tokens: "
        f"{attention['speedup']:.2f}x the speed of the model's own {attention['own_attention']}"
    )
    return Outcome(summary, None, {"batch": batch, "attention": attention})


def split_over_devices(bench: Bench) -> Outcome:
    """fp32: a model whose layers are on two devices (or are brought from the CPU), against generate before."""
    try:
        from accelerate import dispatch_model
    except ImportError:
        return Outcome("skipped: accelerate is not installed")
    sizes, layers = bench.sizes, bench.sizes.split_layers
    model = random_model(sizes.model | {"num_hidden_layers": layers}, bench.device, bench.seed)
    prompts = [bench.prompt(length) for length in sizes.prompts]
    answers = {tuple(prompt): own_answer(model, prompt, sizes.answer, bench.device) for prompt in prompts}
    first, second = devices_for_split(bench.device)
    last = second if second != "cpu" else first
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}
    places |= {f"model.layers.{i}": first if i < layers // 2 else second for i in range(layers)}
    target = TargetModel(dispatch_model(model, device_map=places, force_hooks=True), name="split llama")
    gaps = []
    for drafter in (None, random_heads(target, TreeShape.from_dense([4, 2, 2])), always_right(target, answers)):
        params = SamplingParams(max_new_tokens=sizes.answer, eos_token_ids=())
        results = Decoder(target, drafter, max_slots=len(prompts)).generate(prompts, params)
        gaps += [parting_gap(target, p, answers, r.tokens) for p, r in zip(prompts, results, strict=True)]
    parted = [gap for gap in gaps if gap is not None]
    summary = f"layers on {first} and {second}: {len(gaps) - len(parted)} of {len(gaps)} answers equal generate's"
    return Outcome(summary, max(parted, default=0.0) < ROUNDING_GAP, {"device_map": places, "parted_at_gaps": parted})


def devices_for_split(device: torch.device) -> tuple[Any, Any]:
    """Two GPUs, else the GPU and the CPU, else the CPU twice."""
    if device.type != "cuda":
        return device.type, device.type
    return (0, 1) if torch.cuda.device_count() > 1 else (0, "cpu")


CHECKS: dict[str, Callable[[Bench], Outcome]] = {
    "exactness, fp32": exactness,
    "split over devices, fp32": split_over_devices,
    "step times, bf16": step_times,
    "plain against generate, bf16": plain_speed,
    "host waits, bf16": host_waits,
    "step costs, bf16": step_costs,
}
