"""Families that the tests do not cover are checked against their own forward; hopeless ones are refused by name."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from lasd.decoding import loading
from lasd.decoding import target as target_module
from lasd.decoding.conformance import LIMITS, TESTED, check_conformance
from lasd.decoding.loading import load_target
from lasd.decoding.target import TargetModel
from lasd.errors import LasdError
from tests.evaluation.tiny import save_model
from tests.families import ALL_FAMILIES, SIZES, tiny_config, tiny_model

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
OTHERS = {
    "Cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    "Starcoder2": {"sliding_window": 64},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "DeepseekV3": MLA,
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
REFUSED = {
    "Mamba": ({"state_size": 4}, "mamba .*cannot be rolled back"),
    "Mamba2": ({"head_dim": 16, "num_heads": 4, "n_groups": 1, "expand": 2, "state_size": 4}, "mamba2 .*rolled back"),
    "Qwen3Next": (LINEAR, "qwen3_next has layers of kind linear_attention; .*cannot be rolled back"),
    "Falcon": ({}, "Falcon.* does not go through transformers' attention interface"),
    "GptOss": ({"head_dim": 16}, "attention sinks"),
}


def other(name: str, **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def t5() -> transformers.PreTrainedModel:
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def test_the_tested_families_are_those_that_the_tests_cover():
    assert {tiny_config(family).model_type for family in ALL_FAMILIES} == set(TESTED)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_check_passes_for_the_tested_families(family):
    assert check_conformance(TargetModel(tiny_model(family))) < 1e-4


@pytest.mark.parametrize("name", OTHERS)
def test_the_check_passes_for_other_families_that_fit(name):
    assert check_conformance(TargetModel(other(name, **OTHERS[name]))) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_refuse(dtype):
    model = copy.deepcopy(tiny_model("qwen2")).to(dtype)
    assert check_conformance(TargetModel(model)) < LIMITS[dtype] / 2


def wrong_mask(change):
    """`step_mask`, told something else than what is true."""
    return lambda rows, *args: STEP_MASK(change(rows), *args)


STEP_MASK = target_module.step_mask


def leaking(rows):
    """Rows see all rows before them, other branches too."""
    return type(rows)(rows.tokens_BN, rows.positions_BN, rows.visible_prefix_BN, None)


def shifted(rows):
    """Rows do not see the newest cached token."""
    prefix = torch.full_like(rows.tokens_BN, 5)
    return type(rows)(rows.tokens_BN, rows.positions_BN, prefix, rows.block_mask_BNN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [leaking, shifted])
def test_a_wrong_mask_is_found_and_named(change, dtype, monkeypatch):
    target = TargetModel(copy.deepcopy(tiny_model("llama")).to(dtype))
    monkeypatch.setattr(target_module, "step_mask", wrong_mask(change))
    with pytest.raises(LasdError, match=r"llama is not among the families .* a draft tree differ .* of their spread"):
        check_conformance(target)


def test_a_window_that_is_not_the_models_own_is_found(monkeypatch):
    """The window of the config is longer than the check's text; it is shortened for the check."""
    target = TargetModel(tiny_model("mistral"))
    monkeypatch.setattr(target_module, "_attention_windows", lambda config: {"full_attention": None})
    with pytest.raises(LasdError, match="the logits of a prefill differ"):
        check_conformance(target)


def test_the_check_leaves_the_model_alone():
    model = tiny_model("mistral")
    before = model.config.to_dict()
    check_conformance(TargetModel(model))
    assert model.config.to_dict() == before


def test_a_family_that_breaks_in_the_check_is_refused_in_one_line(monkeypatch):
    def broken(*args):
        raise KeyError("chunked")

    target = TargetModel(tiny_model("llama"))
    monkeypatch.setattr(target_module, "step_mask", broken)
    with pytest.raises(LasdError, match=r"its self-check failed \(KeyError: 'chunked'\)"):
        check_conformance(target)


@pytest.mark.parametrize("name", REFUSED)
def test_hopeless_families_are_refused_by_name_with_the_reason(name):
    changes, line = REFUSED[name]
    with pytest.raises(LasdError, match=line):
        check_conformance(TargetModel(other(name, **changes)))


def test_an_encoder_decoder_is_refused():
    with pytest.raises(LasdError, match="t5 is an encoder-decoder model"):
        TargetModel(t5())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_model(tmp_path_factory.mktemp("tokenizer")))


def saved(model, tokenizer, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_loading_checks_a_family_outside_the_list(tokenizer, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(loading, "check_conformance", lambda target: checked.append(target.config.model_type))
    load_target(saved(other("Starcoder2"), tokenizer, tmp_path / "a"), device="cpu")
    load_target(saved(tiny_model("llama"), tokenizer, tmp_path / "b"), device="cpu")
    assert checked == ["starcoder2"]


@pytest.mark.parametrize(
    ("build", "line"), [(lambda: other("Mamba", state_size=4), "mamba has layers"), (t5, "t5 is an encoder-decoder")]
)
def test_loading_refuses_before_it_reads_weights(build, line, tokenizer, tmp_path):
    folder = saved(build(), tokenizer, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LasdError, match=line):
        load_target(folder, device="cpu")
