"""Fixtures of the engine's tests."""

import pytest

from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from tests.families import tiny_model


class Alphabet:
    """A tokenizer of one character a token: id i is chr(i + 48)."""

    chat_template = None
    eos_token_id = 2

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 48) for i in ids)

    def __call__(self, text):
        return {"input_ids": [ord(c) - 48 for c in text]}


@pytest.fixture(scope="session")
def llama() -> TargetModel:
    return TargetModel(tiny_model("llama"), Alphabet())


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    return [5, 9, 33, 4, 17, 8, 21]


@pytest.fixture(scope="session")
def answer(llama, prompt) -> list[int]:
    """Forty tokens of plain greedy decoding without an end."""
    return Decoder(llama).generate([prompt], SamplingParams(max_new_tokens=40, eos_token_ids=()))[0].tokens
