"""The distribution test passes for exact sampling and fails for every way of getting the law wrong."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from lasd.decoding.decoder import Decoder
from lasd.decoding.request import GenerationResult
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from lasd.evaluation.prompts import Prompt
from lasd.evaluation.proof_report import _sampling_lines
from lasd.evaluation.sampling_proof import (
    Law,
    SamplingProof,
    SamplingSettings,
    chi_square,
    judge,
    prove_sampling,
    sample,
)
from tests.drafters_under_test import TREE, Scripted
from tests.families import tiny_model

PROMPT = [5, 9, 33, 4, 17, 8, 21]
SETTINGS = SamplingSettings(samples=1500, temperature=1.3, seed=3)
ASKED = [PROMPT] * SETTINGS.samples


@pytest.fixture(scope="module")
def llama() -> TargetModel:
    return TargetModel(tiny_model("llama"))


@pytest.fixture(scope="module")
def plain(llama: TargetModel) -> list[GenerationResult]:
    return sample(llama, None, ASKED, SETTINGS, 50)


@pytest.fixture(scope="module")
def law(llama: TargetModel) -> Law:
    return Law(llama, SETTINGS)


def drafter(llama: TargetModel) -> Scripted:
    """Drafts the greedy answer, which sampling follows now and then."""
    greedy = Decoder(llama).generate([PROMPT], SamplingParams(max_new_tokens=8, eos_token_ids=()))[0].tokens
    return Scripted({tuple(PROMPT): greedy}, llama.vocab_size, TREE, right=True)


@pytest.mark.parametrize("counts", [[5, 5, 5, 5], [9, 1, 7, 3], [0, 40, 2, 2, 1]])
def test_the_tail_is_that_of_scipy(counts: list[int]) -> None:
    assert chi_square(torch.tensor(counts)) == pytest.approx(stats.chisquare(counts).pvalue, rel=1e-9)


def test_an_exact_drafter_keeps_law_and_tokens(llama: TargetModel, plain: list[GenerationResult], law: Law) -> None:
    results = sample(llama, drafter(llama), ASKED, SETTINGS, 50)
    proof = judge("scripted", ASKED, results, plain, law)
    assert proof.verdict == "same law"
    assert proof.accepted > 100
    assert proof.identical_to_plain == 1
    assert sum(proof.counts["token 2"]) == SETTINGS.samples


def test_typical_acceptance_is_found_out(llama: TargetModel, plain: list[GenerationResult], law: Law) -> None:
    params = [replace(SETTINGS.params(i), typical=(0.3, 0.5)) for i in range(SETTINGS.samples)]
    results = Decoder(llama, drafter(llama), max_slots=50).generate(ASKED, params)
    assert judge("typical", ASKED, results, plain, law).verdict == "another law"


def test_another_temperature_is_found_out(llama: TargetModel, plain: list[GenerationResult], law: Law) -> None:
    results = sample(llama, None, ASKED, replace(SETTINGS, temperature=1.0), 50)
    assert judge("plain", ASKED, results, plain, law).verdict == "another law"


def test_a_token_without_probability_is_found_out(llama: TargetModel, plain: list[GenerationResult]) -> None:
    """Samples of the whole vocabulary under the law of top-k: none may lie outside."""
    few = replace(SETTINGS, top_k=5)
    proof = judge("plain", ASKED, plain, plain, Law(llama, few))
    assert proof.impossible > 0
    assert proof.verdict == "another law"


def test_top_k_and_top_p_are_those_of_transformers(llama: TargetModel) -> None:
    settings = replace(SETTINGS, top_k=12, top_p=0.8)
    results = sample(llama, None, ASKED, settings, 50)
    proof = judge("plain", ASKED, results, results, Law(llama, settings))
    assert (proof.impossible, proof.verdict) == (0, "same law")


def test_samples_of_another_seed_are_found_out_as_other_tokens(
    llama: TargetModel, plain: list[GenerationResult], law: Law
) -> None:
    results = sample(llama, None, ASKED, replace(SETTINGS, seed=SETTINGS.seed + 9999), 50)
    proof = judge("plain", ASKED, results, plain, law)
    assert proof.p_value > 0.001
    assert proof.verdict == "other tokens"


def test_the_law_is_that_of_the_stock_model(llama: TargetModel) -> None:
    law = Law(llama, replace(SETTINGS, tokens=2))
    law.learn([PROMPT], [(7, 12)])
    (placed,) = law._placed.values()
    with torch.no_grad():
        probs_V = (llama.model(torch.tensor([[*PROMPT, 7]])).logits[0, -1] / SETTINGS.temperature).double().softmax(-1)
    assert placed.chance[1] == pytest.approx(float(probs_V[12]), rel=1e-5)
    assert placed.above[1] == pytest.approx(float(probs_V[probs_V > probs_V[12]].sum()), rel=1e-5)
    assert placed.start[1] == pytest.approx(float(probs_V[:12].sum()), rel=1e-5)


def test_samples_without_an_accepted_draft_prove_nothing(llama: TargetModel) -> None:
    wrong = Scripted({tuple(PROMPT): [0] * 9}, llama.vocab_size, [(0,)], right=True)
    few = SamplingSettings(samples=80, temperature=0.01)
    prompts = [Prompt("a", None, tuple(PROMPT))]
    _, proof = prove_sampling(llama, {"wrong": wrong, "plain": None}, prompts, few, 40)
    assert proof.method == "wrong"
    assert proof.verdict == "nothing proven"


@pytest.mark.parametrize(
    ("change", "line"), [({"samples": 10}, "--samples is 10"), ({"temperature": 0.0}, "--temperature is 0.0")]
)
def test_settings_that_test_nothing_are_refused(change: dict[str, float], line: str) -> None:
    with pytest.raises(LasdError, match=line):
        replace(SETTINGS, **change)


def test_each_failure_has_its_line() -> None:
    proof = SamplingProof("m", 100, drafted=9, accepted=3, p_values={"token 2": 1e-6}, counts={"token 2": [100]})
    assert "do not follow the model's law" in next(iter(_sampling_lines(proof.to_dict())))
    proof = SamplingProof("m", 100, drafted=9, accepted=3, p_values={"token 2": 0.5}, border=0.2)
    assert "another token than plain sampling" in next(iter(_sampling_lines(proof.to_dict())))
