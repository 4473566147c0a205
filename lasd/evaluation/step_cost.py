"""What a step costs in a batch, and with our attention: `python -m lasd.evaluation.step_cost --model demo`.

Two questions, each answered by passes that take turns on this machine:

- A step of 8 sequences against 8 single steps, and the ratio that t(rows) predicts: 8 trees of n nodes are 8n rows.
- A step of 32 rows behind 2,048 cached tokens with our attention and cache, against the same step in the user's own
  model: its own attention with a full float mask and a DynamicCache; and, to tell attention from cache, the same with
  our cache.

Legend: B sequences, N rows of a pass.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lasd.decoding.attention import StepRows
from lasd.decoding.cache import KVCache
from lasd.decoding.decoder import Decoder
from lasd.decoding.loading import load_target
from lasd.decoding.rows import verify_rows
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.step_time import WARM_UP_CALLS, interleaved_medians
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.devices import on_device
from lasd.drafters.base import Budget, DraftContext, StepOutcome
from lasd.errors import LasdError, entry
from lasd.evaluation.environment import environment
from lasd.evaluation.journal import write_text_atomic

TOLERANCE = 0.15
"""How far the measured ratio of a batch may be from the predicted one."""
RAGGED = 3
"""Tokens by which a batch's sequences differ in length from one to the next: a real batch is never even."""


class StarDrafter:
    """Drafts the same tokens as children of the root in each step: all that matters is what the step costs."""

    def __init__(self, nodes: int, vocab_size: int):
        self.max_nodes, self.vocab_size = nodes, vocab_size
        self.shape = star(nodes)

    def start(self, context: DraftContext) -> None:
        """It keeps no state."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[Budget]) -> list[DraftTree]:
        """Root and children, within the budget."""
        shapes = [self.shape.limited(budget.max_nodes, budget.max_depth) for budget in budgets]
        device = contexts[0].hidden_D.device
        tokens = [
            [context.root, *(node % self.vocab_size for node in range(1, shape.num_nodes))]
            for context, shape in zip(contexts, shapes, strict=True)
        ]
        return [DraftTree(shape, on_device(ids, device)) for shape, ids in zip(shapes, tokens, strict=True)]

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """It keeps no state."""


def star(nodes: int) -> TreeShape:
    """A root with `nodes` - 1 children."""
    return TreeShape([-1] + [0] * (nodes - 1))


def batch_cost(
    target: TargetModel, *, size: int = 8, nodes: int = 16, context: int = 256, repeats: int = 15
) -> dict[str, Any]:
    """A step of `size` sequences with a tree of `nodes` each, against as many single steps.

    Returns:
        medians in ms, and for the verify pass and for the decoder's whole step (draft to commit): `measured` =
        batch / (size x single), `predicted` = t(size x nodes) / (size x t(nodes)), and `deviation` =
        measured / predicted - 1.
    """
    if size < 2 or nodes < 1 or context <= RAGGED * size:
        raise LasdError(
            f"the cost of a batch was asked for {size} sequences, {nodes} nodes, {context} cached tokens; it needs at "
            f"least 2 sequences, 1 node and {RAGGED * size + 1} tokens"
        )
    steps = WARM_UP_CALLS + repeats
    _check_positions(target, context + 2 * steps + 8 + size * nodes)
    lengths = [context - RAGGED * b for b in range(size)]
    times = interleaved_medians(
        {
            "single_pass": verify_pass(target, [context], nodes),
            "single_pass_of_all_rows": verify_pass(target, [context], size * nodes),
            "batch_pass": verify_pass(target, lengths, nodes),
            "single_step": _decoder_step(target, [context], nodes, steps),
            "batch_step": _decoder_step(target, lengths, nodes, steps),
        },
        target.device,
        repeats,
    )
    predicted = times["single_pass_of_all_rows"] / (size * times["single_pass"])
    parts = {
        part: _ratio(times[f"batch_{part}"] / (size * times[f"single_{part}"]), predicted) for part in ("pass", "step")
    }
    return {"size": size, "nodes": nodes, "context": context, "repeats": repeats, "ms": times, **parts}


def attention_cost(target: TargetModel, *, rows: int = 32, context: int = 2048, repeats: int = 15) -> dict[str, Any]:
    """One verify pass with our attention and cache, and the same pass in the user's own model.

    Returns:
        medians in ms; `speedup` = own model with a DynamicCache / ours; `speedup_attention` = own attention with our
        cache / ours; `largest_difference` of the logits, over their largest value.
    """
    if rows < 2 or context < 1:
        raise LasdError(
            f"attention was to be compared at {rows} rows and {context} cached tokens; take at least 2 and 1"
        )
    _check_positions(target, context + rows)
    step = _rows(target, [context], rows)
    ours, dynamic = target.new_cache(1, context + rows), DynamicCache()
    _fill(target, context, ours, dynamic)

    def own_with_our_cache() -> Tensor:
        ours.begin(0, 1, rows)
        return target.own_forward(step, ours, [context])

    def restore() -> None:
        extra = dynamic.get_seq_length() - context
        if extra:
            dynamic.crop(-extra)

    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: target.forward(step, ours, "all")[0],
        "own_model": lambda: target.own_forward(step, dynamic, [context]),
        "own_attention_our_cache": own_with_our_cache,
    }
    logits = {}
    for name, call in calls.items():
        logits[name] = call().float()
        restore()
    times = interleaved_medians(calls, target.device, repeats, between=restore)
    largest = max(float((logits[name] - logits["ours"]).abs().max()) for name in calls)
    return {
        "rows": rows,
        "context": context,
        "repeats": repeats,
        "own_attention": str(target.config._attn_implementation),
        "ms": times,
        "speedup": times["own_model"] / times["ours"],
        "speedup_attention": times["own_attention_our_cache"] / times["ours"],
        "largest_difference": largest / float(logits["ours"].abs().max()),
    }


def verify_pass(target: TargetModel, lengths: list[int], nodes: int) -> Callable[[], object]:
    """A verify pass behind `lengths` cached tokens; it commits nothing, so it can run again."""
    cache = target.new_cache(len(lengths), max(lengths) + nodes)
    cache.advance(0, lengths)
    step = _rows(target, lengths, nodes)
    return lambda: target.forward(step, cache, "all")[0].max(-1)


def report(result: dict[str, Any]) -> str:
    """The results as text."""
    return "\n".join([*(_batch_lines(cost) for cost in result["batch"]), _attention_lines(result["attention"])])


def _batch_lines(cost: dict[str, Any]) -> str:
    ms, size = cost["ms"], cost["size"]
    lines = [
        f"batch of {size}, {cost['nodes']} nodes each, {cost['context']} cached tokens: a step takes "
        f"{ms['batch_step']:.2f} ms, {size} single steps {size * ms['single_step']:.2f} ms"
    ]
    for part in ("pass", "step"):
        one = cost[part]
        verdict = "within" if one["within"] else "NOT within"
        lines.append(
            f"  {part}: {one['measured']:.3f} of the single ones, t(rows) predicts {one['predicted']:.3f} "
            f"({one['deviation']:+.0%}, {verdict} {TOLERANCE:.0%})"
        )
    return "\n".join(lines)


def _attention_lines(cost: dict[str, Any]) -> str:
    ms, own = cost["ms"], f"the model's own {cost['own_attention']}"
    return (
        f"{cost['rows']} rows behind {cost['context']} cached tokens: {ms['ours']:.2f} ms with ours\n"
        f"  {own} with a DynamicCache: {ms['own_model']:.2f} ms ({cost['speedup']:.2f}x)\n"
        f"  {own} with our cache: {ms['own_attention_our_cache']:.2f} ms ({cost['speedup_attention']:.2f}x)\n"
        f"  logits differ by at most {cost['largest_difference']:.1e} of the largest"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m lasd.evaluation.step_cost", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="short name, folder or Hub id; `demo` is a small one")
    parser.add_argument("--dtype", default="auto", help="bf16, fp16, fp32, or auto: the checkpoint's own")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, or auto: a GPU if there is one")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16], help="tree nodes of each sequence")
    parser.add_argument("--batch-context", type=int, default=256, help="cached tokens of the batch's longest sequence")
    parser.add_argument("--rows", type=int, default=32, help="rows of the step that attention is compared in")
    parser.add_argument("--context", type=int, default=2048, help="cached tokens before it")
    parser.add_argument("--repeats", type=int, default=15, help="rounds behind each median")
    parser.add_argument("--output", type=Path, help="FILE.json")
    options = parser.parse_args(arguments)
    target = load_target(options.model, dtype=options.dtype, device=options.device)
    sizes = {"size": options.batch_size, "context": options.batch_context, "repeats": options.repeats}
    result = {
        "model": target.name,
        "environment": environment(target),
        "batch": [batch_cost(target, nodes=nodes, **sizes) for nodes in options.nodes],
        "attention": attention_cost(target, rows=options.rows, context=options.context, repeats=options.repeats),
    }
    print(report(result))
    if options.output is not None:
        write_text_atomic(options.output, json.dumps(result, indent=1) + "\n")


def _rows(target: TargetModel, lengths: list[int], nodes: int) -> StepRows:
    tokens_N = torch.arange(nodes, device=target.device) % target.vocab_size
    trees = [DraftTree(star(nodes), tokens_N) for _ in lengths]
    return verify_rows(batch_trees(trees, target.device), trees, lengths)


def _decoder_step(target: TargetModel, lengths: list[int], nodes: int, steps: int) -> Callable[[], object]:
    """One more step of a decoder that holds sequences of these lengths, for up to `steps` calls."""
    drafter = StarDrafter(nodes, target.vocab_size) if nodes > 1 else None
    params = SamplingParams(max_new_tokens=2 * steps + 2, eos_token_ids=())
    longest = min(max(lengths) + params.max_new_tokens, target.max_positions)
    decoder = Decoder(target, drafter, max_slots=len(lengths), max_context=longest)
    ids_BN = torch.randint(target.vocab_size, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    decoder.admit([ids[:length] for ids, length in zip(ids_BN.tolist(), lengths, strict=True)], params)
    return decoder.step


def _fill(target: TargetModel, context: int, ours: KVCache, dynamic: DynamicCache) -> None:
    """Gives both caches the same random keys and values: one sequence of `context` tokens."""
    ours.begin(0, 1, context)
    for layer, layout in enumerate(target.layout):
        keys, values = (
            torch.randn(1, layout.heads, context, size, device=layout.device).to(layout.dtype)
            for size in (layout.key_size, layout.value_size)
        )
        ours.update(keys, values, layer)
        dynamic.update(keys, values, layer)
    ours.advance(0, [context])


def _ratio(measured: float, predicted: float) -> dict[str, float | bool]:
    deviation = measured / predicted - 1
    return {"measured": measured, "predicted": predicted, "deviation": deviation, "within": deviation <= TOLERANCE}


def _check_positions(target: TargetModel, needed: int) -> None:
    if needed > target.max_positions:
        raise LasdError(
            f"step costs were asked for at up to {needed} tokens, {target.name} has {target.max_positions} positions; "
            "ask for a smaller context, fewer nodes or fewer repeats"
        )


if __name__ == "__main__":
    entry(main)
