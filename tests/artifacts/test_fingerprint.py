"""Fingerprints: equal for one model however it is loaded, different for another one."""

import copy

import pytest
import torch

from lasd.artifacts import same_weights, template_fingerprint, tokenizer_fingerprint, weights_fingerprint

from .conftest import TEMPLATE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_dtype_a_bf16_checkpoint_is_loaded_in_does_not_matter(dtype: torch.dtype) -> None:
    stored = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        stored.lm_head.weight[0, 0] = 3e-6  # a float16 copy of it loses bits
    assert weights_fingerprint(copy.deepcopy(stored).to(dtype)) == weights_fingerprint(stored)


def test_saving_and_loading_keeps_the_fingerprint(tmp_path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert weights_fingerprint(type(model).from_pretrained(tmp_path)) == weights_fingerprint(model)


def test_another_model_of_the_same_shape_differs() -> None:
    assert not same_weights(weights_fingerprint(tiny_model(seed=0)), weights_fingerprint(tiny_model(seed=1)))


def test_one_changed_linear_layer_differs() -> None:
    model = tiny_model()
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.01
    assert not same_weights(before, weights_fingerprint(model))


def test_reading_leaves_the_model_as_it_was() -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights_fingerprint(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_that_cannot_be_read_are_left_out_of_the_comparison() -> None:
    whole = weights_fingerprint(tiny_model())
    quantised = tiny_model()
    for layer in quantised.model.layers:
        packed = torch.zeros_like(layer.mlp.up_proj.weight, dtype=torch.uint8)
        layer.mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert weights_fingerprint(quantised).endswith("-unread")
    assert same_weights(whole, weights_fingerprint(quantised))


def test_unread_weights_do_not_hide_other_embeddings() -> None:
    other = tiny_model(seed=1)
    other.hf_quantizer = object()
    assert not same_weights(weights_fingerprint(tiny_model(seed=0)), weights_fingerprint(other))


def test_strided_scalar_and_empty_parameters_can_be_read() -> None:
    model = torch.nn.Linear(3, 5)
    model.weight = torch.nn.Parameter(torch.randn(3, 5).T)
    model.scale = torch.nn.Parameter(torch.tensor(2.0))
    model.none = torch.nn.Parameter(torch.empty(0, 4))
    flat = copy.deepcopy(model)
    flat.weight = torch.nn.Parameter(model.weight.detach().contiguous())
    assert weights_fingerprint(model) == weights_fingerprint(flat)


def test_a_tokenizer_with_another_word_differs() -> None:
    assert tokenizer_fingerprint(tiny_tokenizer("x")) != tokenizer_fingerprint(tiny_tokenizer("y"))


def test_a_tokenizer_keeps_its_fingerprint_through_padding_and_saving(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.pad_token = "<eos>"
    tokenizer(["a", "a b"], padding=True)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(type(tokenizer).from_pretrained(tmp_path)) == before


def test_a_template_is_told_from_another_and_from_none() -> None:
    found = {template_fingerprint(tiny_tokenizer(template=text)) for text in (TEMPLATE, TEMPLATE + "!", None)}
    assert len(found) == 3
    assert None in found


def test_white_space_around_a_template_does_not_matter() -> None:
    assert template_fingerprint(tiny_tokenizer(template=TEMPLATE + "\n")) == template_fingerprint(tiny_tokenizer())
