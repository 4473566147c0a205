"""Are the answers those of the reference, and if not: where do they part, and how near was the decision?

Legend: T tokens, D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch

from lasd.decoding.target import TargetModel
from lasd.evaluation.metrics import Divergence, Run, first_difference
from lasd.evaluation.prompts import Prompt


class Referee:
    """Compares a method's answers with the reference's. A gap that two methods need is computed once."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self._gaps: dict[tuple[int, ...], float] = {}

    def judge(self, prompts: Sequence[Prompt], reference: Run, run: Run) -> None:
        """Fills `run.identical` and `run.divergences`."""
        run.identical, run.divergences = [], []
        for prompt, expected, got in zip(prompts, reference.tokens, run.tokens, strict=True):
            position = first_difference(expected, got)
            run.identical.append(position is None)
            if position is not None:
                run.divergences.append(self._divergence(prompt, expected, got, position))

    def _divergence(self, prompt: Prompt, expected: list[int], got: list[int], position: int) -> Divergence:
        return Divergence(
            prompt=prompt.id,
            position=position,
            reference_token=expected[position] if position < len(expected) else None,
            token=got[position] if position < len(got) else None,
            top_two_gap=self.top_two_gap((*prompt.ids, *expected[:position])),
        )

    @torch.inference_mode()
    def top_two_gap(self, ids: tuple[int, ...]) -> float:
        """How far apart the two largest next-token logits are after `ids`, by one teacher-forced forward pass."""
        if ids not in self._gaps:
            ids_1T = torch.tensor([ids], device=self.target.device)
            hidden_1TD = self.target.hidden_states(ids_1T)
            top_2 = self.target.project(hidden_1TD[0, -1:]).float().topk(2).values[0]
            self._gaps[ids] = float(top_2[0] - top_2[1])
        return self._gaps[ids]
