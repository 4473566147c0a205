"""A tiny model in a folder, distilled folders for it, and configurations of runs that take a second or two."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lasd.artifacts import BaseModelInfo
from train.config import MedusaConfig

VOCAB, HIDDEN = 64, 32


def make_model(folder, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="w1")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def record(name, ids, mask):
    return {"id": name, "input_ids": ids, "loss_mask": mask, "turns": 1, "category": None, "finish": ["length"]}


def write_distilled(folder, target, records, **changes):
    (folder / "data").mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in records)
    (folder / "data" / "shard-00000-00000.jsonl").write_text(lines)
    manifest = {
        "kind": "distilled",
        "schema_version": 1,
        "state": "complete",
        "base_model": BaseModelInfo.of(target).to_dict() | changes,
        "settings": {},
        "prompts": {},
        "counts": {},
    }
    (folder / "distill.json").write_text(json.dumps(manifest))
    return folder


def as_record(name, ids, mask):
    """A record as `prepare_samples` reads it."""
    return SimpleNamespace(id=name, input_ids=list(ids), loss_mask=list(mask))


def config_of(model_dir, distilled_dir, output, **changes):
    """A configuration for runs of a second or two."""
    settings = {
        "model": str(model_dir),
        "data": str(distilled_dir),
        "output": str(output),
        "device": "cpu",
        "dtype": "fp32",
        "num_heads": 3,
        "positions_per_batch": 96,
        "epochs": 2.0,
        "held_out_share": 0.2,
        "warmup": 2.0,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_prompts": 2,
        "eval_new_tokens": 16,
        "heads_dtype": "fp32",
    }
    config = MedusaConfig(**settings | changes)
    config.check()
    return config


def repository() -> Path:
    return Path(__file__).resolve().parents[2]
