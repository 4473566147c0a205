"""Metrics: each formula on numbers small enough to check by hand."""

import numpy as np
import pytest

from lasd.evaluation.metrics import Divergence, Run, bootstrap_weights, cut_at_eos, first_difference, summarise


def run(lengths: list[int], seconds: float, accepted: list[int] | None = None, nodes_a_step: int = 4) -> Run:
    """A drafted run whose answers have these lengths; half of the seconds is verification, a tenth prefill."""
    accepted = accepted if accepted is not None else [0] * (sum(lengths) - len(lengths))
    return Run(
        tokens=[list(range(1, length + 1)) for length in lengths],
        seconds=seconds,
        steps=len(accepted),
        accepted_per_step=accepted,
        nodes=nodes_a_step * len(accepted),
        prefill_s=seconds / 10,
        verify_s=seconds / 2,
        draft_s=seconds / 5,
        overhead_s=seconds / 10,
        identical=[True] * len(lengths),
    )


@pytest.fixture
def runs() -> dict[str, list[Run]]:
    return {
        "generate": [run([9], 2.0), run([3], 1.0)],
        "plain": [run([9], 1.5), run([3], 0.5)],
        # 9 tokens: 1 from prefill, 3 + 3 + 2 from steps; 3 tokens: 1 from prefill, 2 from a step
        "medusa": [run([9], 1.0, [2, 2, 1]), run([3], 0.5, [1])],
    }


@pytest.fixture
def medusa(runs: dict[str, list[Run]]) -> dict[str, float | list[float] | dict[str, float]]:
    return summarise(runs)["medusa"]


def test_tokens_per_step_is_kept_tokens_over_steps(medusa: dict[str, float]) -> None:
    assert medusa["tokens_per_step"] == pytest.approx((8 + 2) / 4)


def test_tokens_per_step_is_one_plus_all_accept_at_pos(medusa: dict[str, list[float]]) -> None:
    assert medusa["tokens_per_step"] == pytest.approx(1 + sum(medusa["accept_at_pos"]))


def test_accept_at_pos_is_a_share_of_all_steps(medusa: dict[str, list[float]]) -> None:
    assert medusa["accept_at_pos"] == [1.0, 0.5]


def test_cond_accept_at_pos_is_a_share_of_those_that_came_so_far() -> None:
    result = summarise({"medusa": [run([8], 1.0, [2, 1, 1, 0])]})["medusa"]
    assert result["cond_accept_at_pos"] == [0.75, pytest.approx(1 / 3)]


def test_draft_acceptance_counts_drafted_nodes_without_roots(medusa: dict[str, float]) -> None:
    assert medusa["draft_acceptance"] == pytest.approx(6 / (4 * 3))


def test_nodes_per_step(medusa: dict[str, float]) -> None:
    assert medusa["nodes_per_step"] == 4


def test_speedups_are_ratios_of_totals(medusa: dict[str, float]) -> None:
    assert medusa["speedup_vs_generate"] == pytest.approx((12 / 1.5) / (12 / 3))
    assert medusa["speedup_e2e"] == pytest.approx((12 / 1.5) / (12 / 2))


def test_speedup_decode_leaves_prefill_and_its_token_out(medusa: dict[str, float]) -> None:
    assert medusa["speedup_decode"] == pytest.approx((10 / (0.8 * 1.5)) / (10 / (0.8 * 2)))


def test_speedup_specbench_is_a_ratio_of_means_over_prompts(medusa: dict[str, float]) -> None:
    assert medusa["speedup_specbench"] == pytest.approx((9 / 1 + 3 / 0.5) / (9 / 2 + 3 / 1))


def test_time_shares_sum_to_one_with_what_the_decoder_did_not_count(medusa: dict[str, dict[str, float]]) -> None:
    time = medusa["time"]
    assert time["verify_share"] == pytest.approx(0.5)
    assert sum(value for name, value in time.items() if name.endswith("_share")) == pytest.approx(1)


def test_a_method_that_never_stepped_has_no_ratio() -> None:
    result = summarise({"generate": [run([1], 1.0, [])], "plain": [run([1], 1.0, [])]})
    assert result["plain"]["tokens_per_step"] is None
    assert result["plain"]["speedup_decode"] is None


def test_divergences_and_share_identical_come_from_the_judged_runs(runs: dict[str, list[Run]]) -> None:
    runs["medusa"][1].identical = [False]
    runs["medusa"][1].divergences = [Divergence("2", 1, 5, 6, 0.01)]
    result = summarise(runs)["medusa"]
    assert result["share_identical"] == 0.5
    assert result["first_divergences"][0]["top_two_gap"] == 0.01


def test_intervals_hold_the_point_and_shrink_to_it_when_all_prompts_are_alike() -> None:
    alike = {"generate": [run([5], 2.0)] * 9, "plain": [run([5], 1.5)] * 9, "medusa": [run([5], 1.0, [1, 1])] * 9}
    assert summarise(alike)["medusa"]["interval95"]["speedup_vs_generate"] == pytest.approx([2.0, 2.0])


def test_the_interval_of_a_ratio_is_paired(runs: dict[str, list[Run]]) -> None:
    """Both sides of a ratio take the same prompts: a method that is twice as fast on each has no spread."""
    seconds = [1.0, 5.0, 0.2, 3.0, 9.0]
    paired = {
        "generate": [run([9], one) for one in seconds],
        "plain": [run([9], one) for one in seconds],
        "medusa": [run([9], one / 2, [3, 3]) for one in seconds],
    }
    low, high = summarise(paired)["medusa"]["interval95"]["speedup_vs_generate"]
    assert (low, high) == pytest.approx((2, 2))


def test_the_interval_covers_what_resampling_by_hand_covers() -> None:
    generator = np.random.default_rng(1)
    base, fast = generator.uniform(1, 2, 30), generator.uniform(0.4, 1.2, 30)
    runs = {"generate": [run([5], s) for s in base], "plain": [run([5], s) for s in base]}
    runs["medusa"] = [run([5], s, [1, 1]) for s in fast]
    ratios = []
    for _ in range(3000):
        picked = generator.integers(0, 30, 30)
        ratios.append(base[picked].sum() / fast[picked].sum())
    interval = summarise(runs)["medusa"]["interval95"]["speedup_vs_generate"]
    assert interval == pytest.approx(list(np.percentile(ratios, [2.5, 97.5])), abs=0.05)


def test_bootstrap_draws_as_many_units_as_there_are_and_begins_with_the_sample() -> None:
    weights = bootstrap_weights(7, 50, seed=3)
    assert (weights[0] == 1).all()
    assert (weights.sum(axis=1) == 7).all()


def test_a_run_survives_json() -> None:
    one = run([3], 1.0, [1])
    one.divergences = [Divergence("a", 1, 2, None, 0.5)]
    assert Run.from_dict(one.to_dict()) == one


@pytest.mark.parametrize(
    ("tokens", "cut"), [([5, 0, 0, 7], [5, 0]), ([5, 6], [5, 6]), ([0], [0]), ([], []), ([5, 9, 0], [5, 9])]
)
def test_cut_at_the_first_of_several_end_tokens_inclusive(tokens: list[int], cut: list[int]) -> None:
    assert cut_at_eos(tokens, (0, 9)) == cut


@pytest.mark.parametrize(
    ("left", "right", "position"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_first_difference(left: list[int], right: list[int], position: int | None) -> None:
    assert first_difference(left, right) == position
