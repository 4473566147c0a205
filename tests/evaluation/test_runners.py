"""The contestants: the baseline is transformers' generate as users call it, and ours count the same tokens."""

from pathlib import Path

import pytest
import torch

from lasd.artifacts import load_artifact
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.drafters import load_drafter
from lasd.evaluation.exactness import Referee
from lasd.evaluation.metrics import Run
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.runners import DecoderRunner, GenerateRunner

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15], [40]]


def greedy_by_hand(target: TargetModel, ids: list[int], count: int) -> list[int]:
    """The slow, obvious answer: a whole forward pass of the stock model for each token."""
    text = list(ids)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(target.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.fixture
def never_ending(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    """The target with an end-of-text token that it never picks here."""
    monkeypatch.setattr(target, "eos_token_ids", (target.vocab_size - 1,))
    return target


@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate_is_greedy_decoding(prompt: list[int], never_ending: TargetModel) -> None:
    assert GenerateRunner(never_ending, 12).run([prompt]).tokens == [greedy_by_hand(never_ending, prompt, 12)]


def test_generate_in_a_left_padded_batch_gives_the_same_answers(never_ending: TargetModel) -> None:
    runner = GenerateRunner(never_ending, 12)
    assert runner.run(PROMPTS).tokens == [runner.run([prompt]).tokens[0] for prompt in PROMPTS]


def test_generate_ignores_a_repetition_penalty_of_the_checkpoint(
    never_ending: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding is compared: sampling defaults that come with a checkpoint must not change one side only."""
    runner = GenerateRunner(never_ending, 12)
    before = runner.run([PROMPTS[0]]).tokens
    monkeypatch.setattr(never_ending.model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(never_ending.model.generation_config, "do_sample", True)
    assert runner.run([PROMPTS[0]]).tokens == before


def test_generate_runs_with_the_models_own_attention_after_our_decoder_ran(never_ending: TargetModel) -> None:
    DecoderRunner("plain", never_ending, None, SamplingParams(4)).run([PROMPTS[0]])
    assert never_ending.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("batch", [PROMPTS[:1], PROMPTS])
def test_plain_decoding_gives_generates_tokens(batch: list[list[int]], never_ending: TargetModel) -> None:
    plain = DecoderRunner("plain", never_ending, None, SamplingParams(12), max_slots=3)
    assert plain.run(batch).tokens == GenerateRunner(never_ending, 12).run(batch).tokens


def test_a_plain_run_counts_a_step_for_each_token_but_the_first(never_ending: TargetModel) -> None:
    run = DecoderRunner("plain", never_ending, None, SamplingParams(12), max_slots=3).run(PROMPTS)
    assert (run.num_tokens, run.kept, run.steps, run.nodes) == (36, 33, 33, 33)


def test_the_decoders_own_times_fit_into_the_measured_time(never_ending: TargetModel) -> None:
    run = DecoderRunner("plain", never_ending, None, SamplingParams(12), max_slots=3).run(PROMPTS)
    counted = run.prefill_s + run.decode_s
    assert 0 < counted <= run.seconds


def test_answers_are_cut_behind_the_first_end_token_on_both_sides(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = greedy_by_hand(target, PROMPTS[1], 12)
    end = answer[4]
    monkeypatch.setattr(target, "eos_token_ids", (end,))
    expected = answer[: answer.index(end) + 1]
    assert GenerateRunner(target, 12).run([PROMPTS[1]]).tokens == [expected]
    assert DecoderRunner("plain", target, None, SamplingParams(12)).run([PROMPTS[1]]).tokens == [expected]


def test_medusa_drafts_accepts_and_keeps_the_tokens(never_ending: TargetModel, heads_folder: Path) -> None:
    drafter = load_drafter(load_artifact(heads_folder), never_ending, "medusa")
    run = DecoderRunner("medusa", never_ending, drafter, SamplingParams(40), max_slots=3).run(PROMPTS)
    assert run.tokens == GenerateRunner(never_ending, 40).run(PROMPTS).tokens
    assert run.nodes > run.steps
    assert sum(run.accepted_per_step) == run.kept - run.steps > 0


def test_the_top_two_gap_is_that_of_the_stock_model(target: TargetModel) -> None:
    with torch.no_grad():
        top = target.model(torch.tensor([[5, 6, 7]])).logits[0, -1].topk(2).values
    assert Referee(target).top_two_gap((5, 6, 7)) == pytest.approx(float(top[0] - top[1]), abs=1e-5)


def test_the_referee_tells_where_answers_part_and_how_near_it_was(target: TargetModel) -> None:
    prompts = [Prompt("a", None, (5, 6)), Prompt("b", None, (7,))]
    reference, other = Run([[1, 2, 3], [4]], 1.0, 2), Run([[1, 9, 3], [4]], 1.0, 2)
    referee = Referee(target)
    referee.judge(prompts, reference, other)
    assert other.identical == [False, True]
    (found,) = other.divergences
    assert (found.prompt, found.position, found.reference_token, found.token) == ("a", 1, 2, 9)
    assert found.top_two_gap == referee.top_two_gap((5, 6, 1))
