"""Where transformers' releases differ, in both of those that `make test` and `make test-old` run with."""

import copy
import inspect
import logging

import pytest

from lasd.decoding.decoder import Decoder
from lasd.decoding.loading import load_target
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from tests.evaluation.tiny import save_model
from tests.families import tiny_model

PROMPT = [5, 9, 33, 4, 17, 8, 21]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_the_cache_is_passed_by_the_name_that_the_family_has(family):
    target = TargetModel(tiny_model(family))
    assert target._cache_name in inspect.signature(target.model.forward).parameters


def test_a_soft_cap_is_not_lost_when_a_model_is_loaded(tmp_path):
    save_model(tmp_path)  # its tokenizer stays
    tiny_model("gemma2").save_pretrained(tmp_path)
    assert load_target(str(tmp_path), device="cpu").config._attn_implementation == "eager"


def test_a_model_that_lost_its_soft_cap_is_named(caplog):
    model = copy.deepcopy(tiny_model("gemma2"))
    model.config._attn_implementation = "sdpa"
    with caplog.at_level(logging.WARNING):
        target = TargetModel(model)
    assert "leaves out its soft cap" in caplog.text
    params = SamplingParams(max_new_tokens=8, eos_token_ids=())
    capped = Decoder(TargetModel(tiny_model("gemma2"))).generate([PROMPT], params)[0].tokens
    model.config._attn_implementation = "eager"  # newer releases refuse to run sdpa with a soft cap at all
    assert Decoder(target).generate([PROMPT], params)[0].tokens == capped


def test_no_other_family_is_warned_of(caplog):
    TargetModel(tiny_model("gemma3"))
    assert "soft cap" not in caplog.text
