"""The decoder: slots that requests are admitted to, steps that draft and verify for all of them, and `generate` as a
loop over it.

Legend: B live sequences, N tree nodes, V vocabulary, D hidden size.

Live sequences always are cache rows 0 ... B - 1: one that ends is overwritten by the last one, so a step's batch is
never padded with dead rows, and newcomers stand side by side for their prefill.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lasd.decoding.cache import CacheFull, KVCache
from lasd.decoding.custom_generate import decode_for_transformers
from lasd.decoding.prefill import prefill
from lasd.decoding.request import GenerationResult, OnTokens, Request
from lasd.decoding.rows import verify_rows
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.shaping import refuse_whole_batch
from lasd.decoding.stats import StepClock
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.decoding.verdict import decide
from lasd.devices import on_device
from lasd.drafters.base import Budget, DraftContext, Drafter, StepOutcome
from lasd.errors import LasdError


class Decoder:
    """Decodes with a target and, optionally, a drafter. Without one each step commits one token: plain decoding.

    Args:
        target: the model that decides every token.
        drafter: what proposes; its state lives as long as the decoder.
        max_slots: most sequences that decode together.
        max_context: most tokens of one sequence, prompt and answer; by default as many as the requests at hand need.
            The cache takes `max_slots x (max_context + the drafter's rows)` slots of `bytes_per_token` each.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter | None = None, *, max_slots: int = 1, max_context: int | None = None
    ):
        if max_slots < 1:
            raise LasdError(f"max_slots is {max_slots}; it must be at least 1")
        self.target, self.drafter = target, drafter
        self.max_slots, self.max_context = max_slots, max_context
        self._draft_rows = drafter.max_nodes if drafter else 1
        self._cache: KVCache | None = None
        self._live: list[Request] = []
        self._ended: dict[int, GenerationResult] = {}
        self._unreported: list[int] = []
        self._next_slot = 0
        self._clock = StepClock(target.device)

    @property
    def free_slots(self) -> int:
        """Sequences that can be admitted now."""
        return self.max_slots - len(self._live)

    @property
    def live_slots(self) -> list[int]:
        """Slots that still decode."""
        return [request.context.slot for request in self._live]

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """Takes prompts in: prefills them as one padded batch and commits the first token of each.

        Returns:
            Their slots. A slot names a request until `release`.

        Raises:
            CacheFull: not enough free slots, or a request is longer than the cache's slots.
            LasdError: an empty prompt, or one that leaves the model no position for an answer.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise LasdError(
                f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one for all, or one each"
            )
        if len(prompts) > self.free_slots:
            raise CacheFull(
                f"{len(prompts)} prompts came, {self.free_slots} of {self.max_slots} slots are free; release or "
                "wait for some"
            )
        limits = [self._max_tokens(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        self._make_room(max(limits, default=0))
        requests = [
            self._request(prompt, one, limit, on_tokens)
            for prompt, one, limit in zip(prompts, each, limits, strict=True)
        ]
        if requests:
            self._prefill(requests)
        return [request.context.slot for request in requests]

    def step(self) -> list[int]:
        """Drafts, verifies and commits for every live sequence, with one call of the target.

        Returns:
            The slots that ended since the last step (in it, or when they were admitted).
        """
        if self._live:
            self._step()
        ended, self._unreported = self._unreported, []
        return ended

    def release(self, slot: int) -> GenerationResult:
        """Gives a slot's answer and forgets the slot. A sequence that still decodes is taken back as it is."""
        if slot in self._ended:
            return self._ended.pop(slot)
        for request in self._live:
            if request.context.slot == slot:
                self._end(request)
                self._unreported.remove(slot)
                return self._ended.pop(slot)
        raise LasdError(f"slot {slot} is not in use; live slots are {self.live_slots}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_tokens: OnTokens | None = None,
    ) -> list[GenerationResult]:
        """Answers all prompts, as many at a time as there are slots; a slot that ends takes the next prompt.

        Args:
            on_tokens: called with (index of the prompt, newly committed tokens).
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if self.max_context is None and not self._live:
            self._make_room(
                max((self._max_tokens(prompt, one) for prompt, one in zip(prompts, each, strict=True)), default=0)
            )
        results: dict[int, GenerationResult] = {}
        place_of: dict[int, int] = {}
        base, waiting = self._next_slot, 0
        forward = (lambda slot, tokens: on_tokens(slot - base, tokens)) if on_tokens else None
        try:
            while len(results) < len(prompts):
                count = min(self.free_slots, len(prompts) - waiting)
                if count:
                    places = range(waiting, waiting + count)
                    slots = self.admit([prompts[i] for i in places], [each[i] for i in places], forward)
                    place_of.update(zip(slots, places, strict=True))
                    waiting += count
                for slot in self.step():
                    if slot in place_of:
                        results[place_of.pop(slot)] = self.release(slot)
        finally:
            for slot in place_of:
                self.release(slot)
        return [results[i] for i in range(len(prompts))]

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        token_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls for `model.generate(..., custom_generate=decoder)`; see `decode_for_transformers`."""
        mask = model_kwargs.get("attention_mask")
        return decode_for_transformers(
            self, model, input_ids, logits_processor, stopping_criteria, generation_config, mask, token_streamer
        )

    # Admission

    def _max_tokens(self, prompt: Sequence[int], params: SamplingParams) -> int:
        if len(prompt) == 0:
            raise LasdError("a prompt has no tokens; give at least one (a chat template or a beginning-of-text token)")
        if len(prompt) >= self.target.max_positions:
            raise LasdError(
                f"a prompt has {len(prompt)} tokens, the model has {self.target.max_positions} positions; shorten "
                "the prompt, "
                "so that at least one token can follow"
            )
        return min(len(prompt) + params.max_new_tokens, self.target.max_positions)

    def _make_room(self, max_tokens: int) -> None:
        """Has a cache whose slots hold `max_tokens` tokens and the rows of one step."""
        if self.max_context is not None and max_tokens > self.max_context:
            raise CacheFull(
                f"a request needs {max_tokens} tokens (prompt and answer), max_context is {self.max_context}; raise "
                "it or ask for less"
            )
        needed = (self.max_context or max_tokens) + self._draft_rows
        if self._cache is not None and self._cache.capacity >= needed:
            return
        if self._live:
            raise CacheFull(
                f"a request needs slots of {needed} tokens while others decode in slots of "
                f"{self._cache.capacity if self._cache else 0}; "
                "set max_context when the decoder is made"
            )
        self._cache = None
        self._cache = self.target.new_cache(self.max_slots, -(-needed // 64) * 64)

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, limit: int, on_tokens: OnTokens | None
    ) -> Request:
        refuse_whole_batch(params.processors)
        context = DraftContext(self._next_slot, list(prompt), len(prompt), torch.empty(0))
        self._next_slot += 1
        eos = self.target.eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
        uniforms = None if params.greedy else params.uniforms(extra=1).to(self.target.device)
        return Request(context, params, eos, limit, self.target.tokenizer, uniforms, on_tokens)

    @torch.inference_mode()
    def _prefill(self, requests: list[Request]) -> None:
        """Caches the prompts behind the live rows; their last positions' logits decide the first tokens."""
        assert self._cache is not None
        self._clock.restart()
        first = len(self._live)
        self._live += requests
        try:
            prompts = [request.context.tokens for request in requests]
            logits_BV, hidden_BD = prefill(self.target, self._cache, first, prompts)
            verdict = decide(logits_BV.unsqueeze(1), requests, batch_trees(self._roots(requests), self.target.device))
            read = torch.cat([verdict.finite_B.unsqueeze(1).long(), verdict.picks_BN], 1).tolist()
            self._check_finite(requests, [finite for finite, _ in read])
        except BaseException:
            del self._live[first:]
            raise
        seconds = self._clock.spans()[-1] / len(requests)
        for b, request in enumerate(requests):
            request.context.row = first + b
            request.context.hidden_D = hidden_BD[b]
            request.stats.prefill_s += seconds
            request.take([read[b][1]])
            if self.drafter and request.finish_reason is None:
                self.drafter.start(request.context)
        self._end_finished(requests)

    # One step

    @torch.inference_mode()
    def _step(self) -> None:
        cache = self._cache
        assert cache is not None
        self._clock.restart()
        requests = list(self._live)
        trees = self._draft(requests)
        self._clock.mark()
        batch = batch_trees(trees, self.target.device)
        nodes = batch.tokens_BN.shape[1]
        rows = verify_rows(batch, trees, cache.lengths[: len(requests)])
        logits_BWV, hidden_BWD = self.target.forward(rows, cache, "all")
        verdict = decide(logits_BWV, requests, batch)
        hidden_BD = hidden_BWD[torch.arange(len(requests), device=hidden_BWD.device), verdict.best_B]
        head_B2 = torch.stack([verdict.finite_B.long(), verdict.best_B], 1)
        read_BC = torch.cat([head_B2, batch.tokens_BN, verdict.picks_BN], 1)
        self._clock.mark()
        read = read_BC.tolist()  # the step's one read: the host waits for the device here, and nowhere else
        self._check_finite(requests, [row[0] for row in read])
        self._commit(requests, trees, [row[1:] for row in read], nodes, hidden_BD)
        draft_s, verify_s, overhead_s = (span / len(requests) for span in self._clock.spans())
        for request in requests:
            request.stats.draft_s += draft_s
            request.stats.verify_s += verify_s
            request.stats.overhead_s += overhead_s
        self._end_finished(requests)

    def _draft(self, requests: list[Request]) -> list[DraftTree]:
        assert self._cache is not None
        if self.drafter is None:
            return self._roots(requests)
        budgets = []
        for request in requests:
            room = self._cache.capacity - self._cache.lengths[request.context.row]
            budgets.append(Budget(min(self._draft_rows, room), max(0, request.remaining - 1)))
        return self.drafter.propose([request.context for request in requests], budgets)

    def _roots(self, requests: list[Request]) -> list[DraftTree]:
        """Trees that draft nothing."""
        roots_B = on_device([request.context.root for request in requests], self.target.device)
        return [DraftTree(TreeShape.root(), root) for root in roots_B.split(1)]

    def _commit(
        self, requests: list[Request], trees: list[DraftTree], read: list[list[int]], nodes: int, hidden_BD: Tensor
    ) -> None:
        """Takes the accepted tokens, moves their cache rows behind the prefix, and tells the drafter.

        Args:
            read: for each sequence its last accepted node, its `nodes` tree tokens, and the pick after each row of the
                pass.
        """
        assert self._cache is not None
        outcomes = []
        for b, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            best, tokens, picks = read[b][0], read[b][1 : 1 + nodes], read[b][1 + nodes :]
            path = tree.shape.ancestry(best)
            kept = request.take([*(tokens[node] for node in path[1:]), picks[best]])
            request.context.hidden_D = hidden_BD[b]
            request.stats.steps += 1
            request.stats.nodes += tree.shape.num_nodes
            request.stats.scratch_rows += tree.num_rows - tree.shape.num_nodes
            request.stats.accepted_per_step.append(len(kept) - 1)
            outcomes.append(
                StepOutcome(request.context, tree, path[: len(kept)], kept, picks, request.finish_reason is not None)
            )
        self._cache.commit(0, [outcome.path for outcome in outcomes])
        if self.drafter:
            self.drafter.observe(outcomes)

    def _check_finite(self, requests: list[Request], finite: list[int]) -> None:
        bad = [request.context.slot for request, fine in zip(requests, finite, strict=True) if not fine]
        if bad:
            raise LasdError(
                f"the model's logits are not finite for slot {bad[0]} (NaN weights, an overflow in "
                f"{str(self.target.dtype)[6:]}, or every token "
                "forbidden); check the checkpoint, or use bf16 or fp32"
            )

    # Ends

    def _end_finished(self, requests: list[Request]) -> None:
        for request in requests:
            if request.finish_reason is not None:
                self._end(request)

    def _end(self, request: Request) -> None:
        """Stores the answer and fills the request's row with the last live one."""
        assert self._cache is not None
        row, last = request.context.row, self._live.pop()
        if last is not request:
            self._cache.move_row(last.context.row, row)
            self._live[row] = last
            last.context.row = row
        self._ended[request.context.slot] = request.result()
        self._unreported.append(request.context.slot)
