"""What a tree search found: the tables a person reads, and the profile that the decoder reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from search.calibrate_heads import Calibration
from search.tree_growth import Growth, replay
from search.tree_sizing import Measurement, Prediction, StepCosts

PLAIN = "plain"
CURVE_SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Choice:
    """The trees compared at one number of cached tokens, and the one that was fastest.

    Attributes:
        context: cached tokens of the predictions.
        shapes: name -> tree; None is plain decoding.
        predictions: name -> what was predicted.
        measurements: name -> what the decoder did.
    """

    context: int
    shapes: Mapping[str, TreeShape | None]
    predictions: Mapping[str, Prediction]
    measurements: Mapping[str, Measurement]

    @property
    def best(self) -> str:
        """Name of the tree with most tokens a second as measured."""
        return max(
            (name for name in self.shapes if name != PLAIN), key=lambda name: self.measurements[name].tokens_per_s
        )

    @property
    def shape(self) -> TreeShape:
        """The chosen tree."""
        shape = self.shapes[self.best]
        assert shape is not None
        return shape

    @property
    def gain(self) -> float:
        """Measured tokens a second of the chosen tree over those of plain decoding."""
        return self.measurements[self.best].tokens_per_s / self.measurements[PLAIN].tokens_per_s


def accuracy_table(calibration: Calibration) -> Table:
    """Rates by head."""
    counts = calibration.counts
    tops = sorted({top for top in (1, 3, 5) if top < counts.max_rank} | {counts.max_rank})
    seen = f"{calibration.answers} answers, {calibration.tokens:,} tokens"
    table = Table(title=f"Heads on {seen} ({calibration.own_share:.1%} the model's own)")
    for name in ("head", "judged", *(f"top-{top}" for top in tops)):
        table.add_column(name, justify="right")
    for head in range(counts.num_heads):
        shares = [f"{counts.top(top)[head]:.3f}" for top in tops]
        table.add_row(str(head + 1), f"{counts.trials[head]:,}", *shares)
    return table


def curve_table(growth: Growth, calibration: Calibration, costs: StepCosts, contexts: Sequence[int]) -> Table:
    """Tokens a step and milliseconds a step against the size of the tree."""
    replayed = replay(growth, calibration.runs)
    table = Table(title="What more nodes buy, and what they cost", caption="tokens/step: a replay of the answers above")
    for name in ("nodes", "depth", "tokens/place", "tokens/step", *(f"ms at {context:,}" for context in contexts)):
        table.add_column(name, justify="right")
    for nodes in sorted({size for size in CURVE_SIZES if size < growth.max_nodes} | {growth.max_nodes}):
        depth = growth.depth(nodes)
        steps_ms = [f"{costs.step_ms(nodes, depth, context):.1f}" for context in contexts]
        tokens = [f"{growth.expected_tokens(nodes):.3f}", f"{replayed[nodes - 1]:.3f}"]
        table.add_row(str(nodes), str(depth), *tokens, *steps_ms)
    return table


def choice_table(choice: Choice) -> Table:
    """Predicted and measured, tree by tree; the chosen one is marked."""
    plain = choice.measurements[PLAIN]
    table = Table(
        title=f"At {choice.context:,} cached tokens (decoded at {plain.cached_tokens:,.0f} on average)",
        caption="predicted / measured; * chosen",
    )
    table.add_column("tree", no_wrap=True)
    for name in ("nodes", "depth", "tokens/step", "ms/step", "tokens/s", "vs plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in choice.shapes:
        said, did = choice.predictions[name], choice.measurements[name]
        chosen = name == choice.best
        table.add_row(
            f"{name} *" if chosen else name,
            str(said.nodes),
            str(said.depth),
            f"{said.tokens_per_step:.2f} / {did.tokens_per_step:.2f}",
            f"{said.step_ms:.1f} / {did.step_ms:.1f}",
            f"{said.tokens_per_s:.1f} / {did.tokens_per_s:.1f}",
            f"{did.tokens_per_s / plain.tokens_per_s:.2f}x",
            style="bold" if chosen else None,
        )
    return table


def profile_of(
    target: TargetModel,
    calibration: Calibration,
    growth: Growth,
    costs: StepCosts,
    choices: Sequence[Choice],
    made_by: Mapping[str, Any],
) -> dict[str, Any]:
    """The artifact's profile for this device, dtype and quantisation.

    `tree` is the choice at the first number of cached tokens, `trees` has the choice at each.
    """
    counts = calibration.counts
    return {
        "device": costs.times.device,
        "dtype": costs.times.dtype,
        "quantization": target.quantization,
        "tree": _paths(choices[0].shape),
        "trees": {str(choice.context): _paths(choice.shape) for choice in choices},
        "step_time_ms": costs.times.to_dict(),
        "drafting_ms": {str(depth): round(ms, 4) for depth, ms in costs.drafting_ms.items()},
        "overhead_ms": round(costs.overhead_ms, 4),
        "calibration": {
            "answers": calibration.answers,
            "tokens": calibration.tokens,
            "own_share": round(calibration.own_share, 5),
            "trials": counts.trials,
            "hits": counts.hits,
            "fingerprint": calibration.fingerprint,
        },
        "growth": {
            "paths": [list(path) for path in growth.paths],
            "path_hits": [counts.paths.get(path, [0, 0])[0] for path in growth.paths],
            "values": [round(value, 6) for value in growth.values],
            "tokens_per_step": [round(tokens, 4) for tokens in replay(growth, calibration.runs)],
        },
        "predicted": {str(choice.context): _figures(choice.predictions) for choice in choices},
        "measured": {
            str(choice.context): {
                **_figures(choice.measurements),
                "chosen": choice.best,
                "speedup_decode": round(choice.gain, 4),
            }
            for choice in choices
        },
        "made_by": dict(made_by),
    }


def _paths(shape: TreeShape) -> list[list[int]]:
    return [list(path) for path in shape.paths()]


def _figures(of: Mapping[str, Prediction] | Mapping[str, Measurement]) -> dict[str, Any]:
    return {name: figures.to_dict() for name, figures in of.items()}
