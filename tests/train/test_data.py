"""Which records are trained on, and what stands in which step."""

import random

import pytest
import torch

from lasd.errors import LasdError
from tests.train.tiny_runs import as_record
from train.data import PlannedBatches, collate, coloured, plan_steps, prepare_samples
from train.losses import IGNORE


def prepare(records, **changes):
    settings = {"num_heads": 2, "vocab_size": 100, "max_length": 50, "held_out_share": 0.0}
    return prepare_samples(records, **settings | changes)


def many(count=200, seed=0):
    rng = random.Random(seed)
    records = []
    for i in range(count):
        prompt, answer = rng.randint(1, 12), rng.randint(2, 40)
        records.append(as_record(f"r{i}", [5] * (prompt + answer), [0] * prompt + [1] * answer))
    return prepare(records, max_length=100)[0]


class TestPrepareSamples:
    def test_records_without_a_label_are_dropped_and_counted(self):
        train, _, report = prepare([as_record("a", [1, 2, 3], [0, 1, 1]), as_record("b", [1, 2, 3], [0, 0, 0])])
        assert [sample.id for sample in train] == ["a"]
        assert report.dropped == {"without a labelled token": 1}

    def test_a_single_labelled_token_is_no_target(self):
        _, _, report = prepare([as_record("a", [1, 2, 3], [0, 1, 1]), as_record("b", [1, 2, 3, 4], [0, 1, 0, 1])])
        assert report.dropped == {"without two labelled tokens in a row": 1}

    def test_the_second_record_of_one_id_is_dropped(self):
        train, _, report = prepare([as_record("a", [1, 2, 3], [0, 1, 1])] * 2)
        assert len(train) == 1
        assert report.dropped == {"with the id of another": 1}

    def test_long_records_lose_their_end(self):
        (sample,), _, report = prepare([as_record("a", range(80), [0] * 10 + [1] * 70)])
        assert sample.num_tokens == 50
        assert report.truncated == 1

    def test_labels_beyond_the_limit_do_not_count(self):
        with pytest.raises(LasdError, match="no record is left"):
            prepare([as_record("a", range(80), [0] * 60 + [1] * 20)])

    def test_all_masked_data_is_one_line(self):
        with pytest.raises(LasdError, match="2 without a labelled token") as caught:
            prepare([as_record("a", [1, 2], [0, 0]), as_record("b", [1, 2], [0, 0])])
        assert "\n" not in str(caught.value)

    def test_ids_outside_the_vocabulary_name_the_record(self):
        with pytest.raises(LasdError, match="record a holds token id 100"):
            prepare([as_record("a", [1, 100, 3], [0, 1, 1])])

    def test_held_out_records_are_not_trained_on(self):
        records = [as_record(f"r{i}", [1, 2, 3], [0, 1, 1]) for i in range(300)]
        train, held_out, _ = prepare(records, held_out_share=0.2)
        assert not {s.id for s in train} & {s.id for s in held_out}
        assert 30 < len(held_out) < 90

    def test_held_out_does_not_depend_on_the_other_records(self):
        records = [as_record(f"r{i}", [1, 2, 3], [0, 1, 1]) for i in range(100)]
        whole = {s.id for s in prepare(records, held_out_share=0.3)[1]}
        half = {s.id for s in prepare(records[::2], held_out_share=0.3)[1]}
        assert half == whole & {r.id for r in records[::2]}


class TestPlanSteps:
    @pytest.mark.parametrize("grouped", [True, False])
    def test_every_record_stands_in_every_epoch_once(self, grouped):
        samples = many()
        plan = plan_steps(samples, positions_per_batch=64, epochs=2, micro_batches=2, seed=0, group_by_length=grouped)
        counts = torch.zeros(len(samples), dtype=torch.long)
        for step in plan:
            for batch in step:
                counts[batch] += 1
        assert counts.unique().tolist() == [2]

    def test_steps_hold_about_the_asked_number_of_positions(self):
        samples = many(400)
        plan = plan_steps(samples, positions_per_batch=200, epochs=1, micro_batches=1, seed=0)
        sizes = [sum(samples[i].num_labelled for i in step[0]) for step in plan]
        assert 0.9 * 200 < sum(sizes) / len(sizes) < 1.1 * 200

    def test_a_step_holds_the_same_records_however_it_is_split(self):
        samples = many()
        plans = [
            plan_steps(samples, positions_per_batch=128, epochs=1, micro_batches=parts, seed=0) for parts in (1, 2, 4)
        ]
        together = [[sorted(i for batch in step for i in batch) for step in plan] for plan in plans]
        assert together[0] == together[1] == together[2]

    def test_the_seed_decides(self):
        samples = many()
        settings = {"positions_per_batch": 64, "epochs": 1, "micro_batches": 1}
        first = plan_steps(samples, seed=0, **settings)
        assert plan_steps(samples, seed=0, **settings) == first
        assert plan_steps(samples, seed=1, **settings) != first

    def test_epochs_differ_in_order(self):
        samples = many()
        plan = plan_steps(samples, positions_per_batch=64, epochs=2, micro_batches=1, seed=0)
        assert plan[: len(plan) // 2] != plan[len(plan) // 2 :]

    def test_half_an_epoch_is_half_the_steps(self):
        samples = many()
        settings = {"positions_per_batch": 64, "micro_batches": 1, "seed": 0}
        whole, half = plan_steps(samples, epochs=1, **settings), plan_steps(samples, epochs=0.5, **settings)
        assert half == whole[: len(half)]
        assert len(half) == pytest.approx(len(whole) / 2, abs=1)

    def test_grouping_by_length_saves_padding(self):
        samples = many(600)

        def padded(grouped):
            plan = plan_steps(
                samples, positions_per_batch=128, epochs=1, micro_batches=1, seed=0, group_by_length=grouped
            )
            return sum(max(samples[i].num_tokens for i in batch) * len(batch) for step in plan for batch in step)

        assert padded(True) < 0.85 * padded(False)

    def test_a_record_larger_than_a_step_is_a_step(self):
        samples = many(20)
        plan = plan_steps(samples, positions_per_batch=1, epochs=1, micro_batches=1, seed=0)
        assert [len(step[0]) for step in plan] == [1] * 20


def test_planned_batches_run_through_the_steps_in_order():
    samples = many(6)
    batches = PlannedBatches(samples, [[[0], [1, 2]], [[3], [4, 5]]])
    assert [[sample.id for sample in batch] for batch in (batches[i] for i in range(len(batches)))] == [
        ["r0"],
        ["r1", "r2"],
        ["r3"],
        ["r4", "r5"],
    ]


def test_padding_gives_no_target():
    samples, _, _ = prepare([as_record("a", range(1, 9), [0] + [1] * 7), as_record("b", range(1, 5), [0] + [1] * 3)])
    inputs = collate(samples, 2)
    assert inputs["counts_K"].tolist() == [6 + 2, 5 + 1]
    assert (inputs["targets_KBL"][:, 1, 4:] == IGNORE).all()


def test_a_batch_in_a_row_has_the_targets_of_its_records_alone():
    samples = many(5)
    together = collate(samples, 2)["targets_KBL"]
    for row, sample in enumerate(samples):
        alone = collate([sample], 2)["targets_KBL"][:, 0]
        assert torch.equal(together[:, row, : sample.num_tokens], alone)


def test_no_samples_make_a_batch_without_targets():
    assert collate([], 3)["counts_K"].tolist() == [0, 0, 0]


def test_the_coloured_sample_marks_exactly_the_labelled_tokens():
    class Words:
        def decode(self, ids):
            return "".join(f"<{i}>" for i in ids)

    (sample,), _, _ = prepare([as_record("a", [1, 2, 3, 4], [0, 1, 1, 0])])
    assert coloured(sample, Words()) == "\x1b[2m<1>\x1b[0m\x1b[32m<2><3>\x1b[0m\x1b[2m<4>\x1b[0m"
