"""A tiny random model with a byte tokenizer, in a folder, and untrained heads for it."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lasd.artifacts import BaseModelInfo, Manifest, save_artifact
from lasd.decoding.loading import load_target
from lasd.decoding.target import TargetModel
from lasd.drafters.medusa import MedusaHeads

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_POSITIONS = 256


def save_model(folder: Path, seed: int = 0) -> Path:
    """Saves a random llama with a vocabulary of bytes; its answers soon repeat, so that some drafts are right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(["<eos>", *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def load_tiny(folder: Path) -> TargetModel:
    return load_target(str(folder), dtype="fp32", device="cpu")


def save_heads(folder: Path, target: TargetModel) -> Path:
    """Untrained heads (each drafts the target's own next token once more), with a small tree."""
    heads = MedusaHeads(target.hidden_size, num_heads=2)
    settings = {"num_heads": 2, "num_layers": 1, "projection": "shared", "tree": [[0], [1], [0, 0]]}
    manifest = Manifest("medusa", BaseModelInfo.of(target), settings)
    save_artifact(folder, manifest, dict(heads.state_dict().items()))
    return folder


def write_prompts(path: Path) -> Path:
    """Three prompts of two categories and different lengths."""
    rows = [
        {"question_id": 1, "category": "ab", "turns": ["hello there", "and then"]},
        {"question_id": 2, "category": "ab", "turns": ["what is it, then?"]},
        {"question_id": 3, "category": "cd", "turns": ["a longer question, to pad the others"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
