"""Tiny random models, one a family: the smallest configs that keep what is special about each family's attention."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 12
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def _gpt2(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 192,
        "initializer_range": 0.35,
    } | changes


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        SIZES
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "query_pre_attn_scalar": 16,
            "attn_implementation": "eager",  # transformers 5.17 would take sdpa, which leaves the soft cap out
        },
    ),
    "gemma3": (
        "Gemma3",
        SIZES
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("Phi3", SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 192}),
    "gpt_neox": ("GPTNeoX", SIZES),
    "gpt2": ("GPT2", _gpt2(bos_token_id=1, eos_token_id=2, pad_token_id=0)),
    "opt": ("OPT", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "granite": (
        "Granite",
        SIZES
        | {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.8, "embedding_multiplier": 2.0},
    ),
    "smollm3": ("SmolLM3", SIZES),
    "olmo2": ("Olmo2", SIZES),
}
CLASS_NAMES = {"gpt2": "GPT2LMHeadModel"}
ALL_FAMILIES = tuple(CONFIGS)


def tiny_config(family: str, **changes: Any) -> Any:
    """The family's tiny config."""
    name, sizes = CONFIGS[family]
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    return getattr(transformers, config_name)(**(sizes | changes))


@lru_cache(maxsize=64)
def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random fp32 model of the family; the same object for the same arguments."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model_class: Callable = getattr(transformers, CLASS_NAMES.get(family, f"{CONFIGS[family][0]}ForCausalLM"))
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
    model.tie_weights()
    return model
