"""Tiny targets for the artifact tests: random llama models with a word tokenizer, built in code."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lasd.artifacts import BaseModelInfo, Manifest

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def tiny_model(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def tiny_tokenizer(extra: str = "x", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<eos>", *"abcdefghij", "hello", "world", extra]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_target(model: torch.nn.Module | None = None, **overrides: Any) -> Any:
    """What the artifact code reads of a TargetModel."""
    model = model or tiny_model()
    fields: dict[str, Any] = {
        "model": model,
        "tokenizer": tiny_tokenizer(),
        "name": "org/tiny",
        "revision": "abc123",
        "hidden_size": model.config.hidden_size,
        "vocab_size": model.config.vocab_size,
        "num_layers": model.config.num_hidden_layers,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "quantization": None,
    }
    return SimpleNamespace(**{**fields, **overrides})


@pytest.fixture
def target() -> Any:
    return tiny_target()


@pytest.fixture
def manifest(target: Any) -> Manifest:
    return Manifest(
        kind="medusa",
        base_model=BaseModelInfo.of(target),
        settings={"num_heads": 2, "num_layers": 1, "projection": "shared", "tree": [[0], [0, 0], [1]]},
        measured={
            "mtbench": {
                "device": "a cpu",
                "methods": {
                    "generate": {"tokens_per_s": 31.25, "tokens_per_step": 1.0},
                    "medusa": {"tokens_per_s": 47.123456, "tokens_per_step": 1.81, "accept_at_pos": [0.5, 0.25]},
                },
            },
            "curve": [{"step": step, "loss": 3.5 - step / 100} for step in range(0, 200, 10)],
        },
        provenance={"command": ["train/medusa.py", "--config", "r.yaml"], "seed": 7, "license": "apache-2.0"},
    )


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"blocks.0.weight": torch.randn(2, 16, 16), "blocks.0.bias": torch.zeros(2, 16)}


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Calls a function that must raise LasdError; returns its text, checked to be one line."""
    from lasd.errors import LasdError

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
        with pytest.raises(LasdError) as caught:
            function(*args, **kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return call
