"""A tiny random llama with a byte tokenizer, saved to disk as a user would have it, and a scripted decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def encode(tokenizer: Any) -> Callable[[list[dict[str, str]]], list[int]]:
    def to_ids(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return to_ids


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Answer:
    tokens: list[int]
    finish_reason: str
    tokenizer: Any

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))


@dataclass
class ScriptedDecoder:
    """Answers every prompt with what `script(prompt)` says, one token a step; notes what it was asked."""

    tokenizer: Any
    script: Callable[[str], str]
    max_slots: int = 4
    live: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)
    serial: int = 0

    @property
    def free_slots(self) -> int:
        return self.max_slots - len(self.live)

    def admit(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[int]:
        assert len(prompts) <= self.free_slots
        self.groups.append([len(prompt) for prompt in prompts])
        slots = []
        for prompt, one in zip(prompts, params, strict=True):
            text = self.tokenizer.decode(list(prompt))
            self.seeds[text] = one.seed
            answer = self.tokenizer(self.script(text), add_special_tokens=False)["input_ids"]
            answer = [*answer, self.tokenizer.eos_token_id][: one.max_new_tokens]
            self.live[self.serial] = (answer, 1)
            slots.append(self.serial)
            self.serial += 1
        return slots

    def step(self) -> list[int]:
        self.busy.append(len(self.live))
        self.live = {slot: (answer, done + 1) for slot, (answer, done) in self.live.items()}
        return [slot for slot, (answer, done) in self.live.items() if done >= len(answer)]

    def release(self, slot: int) -> Answer:
        answer, _ = self.live.pop(slot)
        ended = answer[-1] == self.tokenizer.eos_token_id
        return Answer(answer, "eos" if ended else "length", self.tokenizer)
