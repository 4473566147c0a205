"""Check of the whole chain: heads that learn one answer by heart must have nearly all their drafts accepted.

Whatever breaks between training and decoding (a wrong shift, other hidden states, a wrong cast, a wrong tree) shows
here within a minute, long before a real run has ended.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import TrainerCallback

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import TreeShape
from lasd.drafters.medusa import MedusaDrafter, MedusaHeads
from lasd.errors import LasdError
from train import held_out
from train.config import MedusaConfig
from train.data import PlannedBatches, Sample
from train.losses import head_weights
from train.reporting import ProgressReport
from train.trainer import MedusaTrainer, assert_only_heads_train

logger = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 64
MAX_STEPS = 2000
STEPS_PER_CHECK = 20
SHARE_ACCEPTED = 0.95


class Memorised:
    """The evaluator of the check: decodes the prompt with a chain of K, and trains on the text that came out.

    In bf16 the decoder's text can differ from the recorded answer where two tokens are nearly equal; the heads can only
    be held to the text that the decoder really gives, so that text replaces the training sample.
    """

    def __init__(self, target: TargetModel, prompt: list[int], num_heads: int, answer_tokens: int):
        self.target, self.prompt, self.num_heads = target, prompt, num_heads
        # The first token comes from prefill, and then whole steps: a cut last step would hide accepted tokens.
        self.new_tokens = 1 + (answer_tokens - 1) // (num_heads + 1) * (num_heads + 1)
        self.samples: list[Sample] = []
        self.accepted = 0.0

    def __call__(self, heads: MedusaHeads) -> dict[str, float]:
        """Accepted tokens a step, and the goal."""
        frozen = held_out.copy_for_decoding(heads, self.target)
        drafter = MedusaDrafter(frozen, TreeShape.chain(self.num_heads), self.target)
        # The text must go on to the last token, so that the end of the answer does not cut a step.
        params = SamplingParams(max_new_tokens=self.new_tokens, eos_token_ids=())
        (result,) = Decoder(self.target, drafter).generate([self.prompt], params)
        self.accepted = sum(result.stats.accepted_per_step) / max(1, result.stats.steps)
        self.samples[:] = [answer_sample(self.prompt, result.tokens)]
        return {"accepted_per_step": self.accepted, "accepted_goal": SHARE_ACCEPTED * self.num_heads}

    @property
    def reached(self) -> bool:
        """Whether nearly all drafts are accepted."""
        return self.accepted >= SHARE_ACCEPTED * self.num_heads


def answer_sample(prompt: list[int], answer: list[int]) -> Sample:
    """A record of one prompt and its answer."""
    ids_L = torch.tensor(prompt + answer, dtype=torch.int32)
    return Sample("overfit", ids_L, torch.arange(len(ids_L)) >= len(prompt))


def overfit(config: MedusaConfig, target: TargetModel, heads: MedusaHeads, sample: Sample) -> float:
    """Trains on one answer of at most 64 tokens until the decoder accepts 0.95 K drafted tokens a step.

    Args:
        config: settings; the learning rate is kept constant, nothing is saved.
        target: the model.
        heads: untrained heads.
        sample: the record whose prompt is used.

    Returns:
        Accepted tokens a step.

    Raises:
        LasdError: the goal was not reached in `MAX_STEPS` steps.
    """
    from train.run import training_arguments

    turn = held_out.first_turn(sample)
    memorised = Memorised(target, turn.prompt, heads.num_heads, MAX_ANSWER_TOKENS)
    memorised(heads)
    logger.info("%s", assert_only_heads_train(heads, target))
    args = training_arguments(
        config,
        steps=MAX_STEPS,
        eval_steps=STEPS_PER_CHECK,
        save_steps=MAX_STEPS,
        save_strategy="no",
        lr_scheduler_type="constant",
        warmup_steps=0,
        gradient_accumulation_steps=1,
        logging_steps=STEPS_PER_CHECK,
    )
    trainer = MedusaTrainer(
        heads,
        target,
        args,
        PlannedBatches(memorised.samples, [[[0]]] * MAX_STEPS),
        head_weights(heads.num_heads, 1.0),
        memorised,
        callbacks=[ProgressReport(), _StopWhenReached(memorised)],
    )
    trainer.train()
    goal = SHARE_ACCEPTED * heads.num_heads
    line = (
        f"{memorised.accepted:.2f} of {heads.num_heads} drafted tokens accepted a step on {memorised.new_tokens} "
        f"answer tokens after {trainer.state.global_step} optimizer steps (goal {goal:.2f})"
    )
    if not memorised.reached:
        raise LasdError(
            f"overfit check failed: {line}; expected heads to learn one answer by heart: something between training "
            "and decoding differs; look at dtype, num_heads and learning_rate"
        )
    logger.info("overfit check passed: %s", line)
    print(f"overfit check passed: {line}")
    return memorised.accepted


class _StopWhenReached(TrainerCallback):
    def __init__(self, memorised: Memorised):
        self.memorised = memorised

    def on_evaluate(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        control.should_training_stop = self.memorised.reached
