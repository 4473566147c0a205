"""The tiny model, and its own greedy answers to random prompts."""

import pytest
import torch

from lasd.decoding.decoder import Decoder
from lasd.decoding.loading import load_target
from lasd.decoding.sampling import SamplingParams
from tests.train.tiny_runs import VOCAB, make_model, record, write_distilled


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def target(model_dir):
    return load_target(str(model_dir), dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def distilled_dir(target, tmp_path_factory):
    """40 prompts of 3 to 9 tokens with greedy answers of up to 24."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(2, VOCAB - 1, (int(torch.randint(3, 10, (), generator=generator)),), generator=generator).tolist()
        for _ in range(40)
    ]
    results = Decoder(target, max_slots=8).generate(prompts, SamplingParams(max_new_tokens=24))
    records = [
        record(f"r{i}", prompt + result.tokens, [0] * len(prompt) + [1] * len(result.tokens))
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    ]
    return write_distilled(tmp_path_factory.mktemp("distilled"), target, records)
