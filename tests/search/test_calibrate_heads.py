"""Calibration: the fast count against a slow one, and counts that survive an interruption."""

import json

import pytest
import torch

from lasd.drafters.medusa import MedusaHeads
from search.answers import Answer, answer_prompts, held_out_answers
from search.calibrate_heads import Calibration, calibrate, true_ranks
from search.rank_counts import RankCounts

FINGERPRINT = {"heads": "h"}


@pytest.fixture(scope="module")
def heads(target):
    torch.manual_seed(0)
    heads = MedusaHeads(target.hidden_size, num_heads=3)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return heads.requires_grad_(False)


@pytest.fixture(scope="module")
def answers(target, distilled_folder):
    return held_out_answers(str(distilled_folder), target, share=1.0, limit=0)


def counted_slowly(target, heads, answer, max_rank):
    """One answer, one position, one head at a time."""
    counts = RankCounts(heads.num_heads, max_rank)
    hidden_ND = target.hidden_states(torch.tensor([answer.ids]))[0]
    own = [int(target.project(hidden).argmax()) for hidden in hidden_ND]
    good = [False] + [answer.mask[t + 1] == 1 and own[t] == answer.ids[t + 1] for t in range(len(answer.ids) - 1)]
    for t in range(len(answer.ids) - 1):
        if not good[t + 1]:
            continue
        ranks = []
        for head in range(1, heads.num_heads + 1):
            if t + 1 + head >= len(good) or not good[t + 1 + head]:
                break
            guesses = heads.logits(hidden_ND[t : t + 1], target)[head - 1, 0].topk(max_rank).indices.tolist()
            true = answer.ids[t + 1 + head]
            ranks.append(guesses.index(true) if true in guesses else max_rank)
        counts.add([ranks])
    return counts


def test_the_counts_are_those_of_the_slow_way(target, heads, answers, tmp_path):
    got = calibrate(target, heads, answers[:3], 4, FINGERPRINT, tmp_path / "c.json", batch_tokens=80).counts
    slow = [counted_slowly(target, heads, answer, 4) for answer in answers[:3]]
    assert got.trials == [sum(values) for values in zip(*(one.trials for one in slow), strict=True)]
    assert got.hits == [[sum(one.hits[h][r] for one in slow) for r in range(4)] for h in range(3)]
    assert sum(map(sum, got.hits)) > 0


def test_tokens_that_the_model_would_not_choose_are_not_judged(target, heads, answers, tmp_path):
    answer = answers[0]
    place = answer.last_start + 4
    ids = list(answer.ids)
    ids[place] = (ids[place] + 1) % target.vocab_size
    got = calibrate(target, heads, [Answer(ids, answer.mask)], 4, FINGERPRINT, tmp_path / "c.json")
    assert got.own < got.tokens
    assert got.counts.to_dict() == counted_slowly(target, heads, Answer(ids, answer.mask), 4).to_dict()


def test_the_rank_is_the_place_in_the_drafters_own_order(target, heads):
    hidden_MD = torch.randn(5, target.hidden_size)
    guesses_KMR = heads.logits(hidden_MD, target).topk(6, dim=-1).indices
    true_MK = guesses_KMR[:, :, 2].T
    assert true_ranks(target, heads, hidden_MD, true_MK, 6).eq(2).all()
    assert true_ranks(target, heads, hidden_MD, true_MK, 2).eq(2).all()  # beyond what is counted: max_rank


def test_an_interrupted_count_ends_like_a_whole_one(target, heads, answers, tmp_path):
    whole = calibrate(target, heads, answers, 4, FINGERPRINT, tmp_path / "whole.json", batch_tokens=100)
    path = tmp_path / "cut.json"

    class Killed(Exception):
        pass

    def kill(done):
        Calibration.load(path, FINGERPRINT)
        if done >= len(answers) // 2:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search.calibrate_heads.SAVE_EVERY_S", -1)
        with pytest.raises(Killed):
            calibrate(target, heads, answers, 4, FINGERPRINT, path, batch_tokens=100, progress=kill)
    kept = Calibration.load(path, FINGERPRINT)
    assert kept is not None
    assert 0 < kept.answers < len(answers)
    again = calibrate(target, heads, answers, 4, FINGERPRINT, path, batch_tokens=100)
    assert again.counts.to_dict() == whole.counts.to_dict()
    assert again.runs == whole.runs


def test_counts_of_something_else_are_not_continued(target, heads, answers, tmp_path):
    calibrate(target, heads, answers[:2], 4, FINGERPRINT, tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json", {"heads": "others"}) is None


def test_a_damaged_file_of_counts_is_made_anew(target, heads, answers, tmp_path):
    (tmp_path / "c.json").write_text('{"counts": ')
    assert calibrate(target, heads, answers[:2], 4, FINGERPRINT, tmp_path / "c.json").answers == 2


def test_the_last_answer_starts_behind_the_last_prompt():
    assert Answer([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 1, 1]).last_start == 4
    assert Answer([1, 2, 3], [0, 1, 0]).last_start == 1


def test_answered_prompts_are_not_answered_again(target, tmp_path, monkeypatch):
    from lasd.evaluation.prompts import Prompt

    prompts = [Prompt(str(n), None, tuple(target.tokenizer(f"hello {n}")["input_ids"])) for n in range(3)]
    first = answer_prompts(target, prompts, 6, tmp_path / "a.json")
    assert len(json.loads((tmp_path / "a.json").read_text())["answers"]) == 3
    monkeypatch.setattr("search.answers.Decoder.generate", lambda *_: pytest.fail("answered again"))
    assert answer_prompts(target, prompts, 6, tmp_path / "a.json") == first
