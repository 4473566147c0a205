"""Fingerprints: short hashes that tell whether two models, tokenizers or chat templates are the same one.

A fingerprint answers "is this the model these heads were trained for?" before any decoding, whatever folder, Hub id or
dtype the model was loaded from.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

HEX_DIGITS = 16
SAMPLES_PER_TENSOR = 256
SMALLEST_KEPT = 2.0**-14  # smallest normal float16: below it a float16 copy of a bfloat16 weight loses bits
UNREAD = "unread"

# What the tokenizer is asked to split: words, code, digits, white space, scripts, an emoji, a special-token look-alike.
PROBE_TEXTS = (
    "The quick brown fox, it's 12,345.678 metres away!",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n\n",
    "  leading and   inner spaces ",
    "Größe, naïve, ¿qué?, Привет мир, 你好世界, こんにちは, مرحبا, 🙂👩‍🚀",
    "<s>[INST] <|im_start|>user</s>",
)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX_DIGITS]


def data_fingerprint(data: bytes | str) -> str:
    """Returns `sha256:` + 16 hex digits of the bytes (or UTF-8 text): the form of all fingerprints here."""
    return f"sha256:{_digest(data.encode() if isinstance(data, str) else data)}"


def _sample(tensor: Tensor) -> Tensor:
    """Takes up to 256 evenly spaced values of a tensor of any strides, as bfloat16 with tiny values set to zero."""
    count = tensor.numel()
    picks = min(count, SAMPLES_PER_TENSOR)
    flat_index = torch.arange(picks, dtype=torch.int64, device=tensor.device) * max(count - 1, 1) // max(picks - 1, 1)
    values = tensor.detach()[torch.unravel_index(flat_index, tensor.shape)] if tensor.dim() else tensor.detach()[None]
    values = values.to(torch.bfloat16)
    return torch.where(values.abs() < SMALLEST_KEPT, torch.zeros_like(values), values)


def _hash_tensors(tensors: list[tuple[str, Tensor]]) -> str:
    """Hashes shapes and sampled values in the order of the names; the names themselves may differ between releases."""
    ordered = [tensor for _, tensor in sorted(tensors, key=lambda item: item[0])]
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in ordered:
        samples.setdefault(tensor.device, []).append(_sample(tensor))
    # One transfer a device; the hash must not depend on which layer lies where, so the parts are put back in order.
    read = {
        device: iter(torch.cat(parts).cpu().split([part.numel() for part in parts]))
        for device, parts in samples.items()
    }
    digest = hashlib.sha256()
    for tensor in ordered:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(next(read[tensor.device]).view(torch.int16).numpy().astype("<i2").tobytes())
    return digest.hexdigest()[:HEX_DIGITS]


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yields (name, parameter, core), each once; core: embeddings, and modules of vectors only (norms)."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = list(module.named_parameters(prefix=prefix, recurse=False))
        core = isinstance(module, nn.Embedding) or all(parameter.dim() <= 1 for _, parameter in own)
        for name, parameter in own:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter, core


def weights_fingerprint(model: nn.Module) -> str:
    """Returns `sha256:CORE-REST`, the fingerprint of a model's weights.

    CORE hashes the embeddings and norms, REST every other parameter; of each tensor up to 256 evenly spaced values are
    read, so a 70B model takes seconds. Values are compared as bfloat16: the same checkpoint loaded in bf16, fp16 or
    fp32 has the same fingerprint (one exception: a checkpoint *stored* in fp32 and loaded in fp16 is rounded twice and
    may differ). Where the other weights are quantised or offloaded, they cannot be compared with the originals and REST
    is `unread`; see `same_weights`.
    """
    core: list[tuple[str, Tensor]] = []
    rest: list[tuple[str, Tensor]] = []
    readable = getattr(model, "hf_quantizer", None) is None
    for name, parameter, in_core in _parameters(model):
        if in_core and not parameter.is_meta and parameter.is_floating_point():
            core.append((name, parameter))
        else:
            readable = readable and not parameter.is_meta and parameter.is_floating_point()
            rest.append((name, parameter))
    return f"sha256:{_hash_tensors(core)}-{_hash_tensors(rest) if readable else UNREAD}"


def same_weights(left: str, right: str) -> bool:
    """Tells whether two weight fingerprints agree in all parts that both sides could read."""
    core_left, _, rest_left = left.partition("-")
    core_right, _, rest_right = right.partition("-")
    return core_left == core_right and (UNREAD in (rest_left, rest_right) or rest_left == rest_right)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns the fingerprint of what a tokenizer does: its vocabulary and how it splits a few probe texts.

    The tokenizer's files are not hashed: their layout changes between releases while the token ids stay the same.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probes = [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROBE_TEXTS]
    return data_fingerprint(json.dumps([vocabulary, probes], ensure_ascii=True))


def template_fingerprint(tokenizer: Any) -> str | None:
    """Returns the fingerprint of the tokenizer's chat template (white space at its ends ignored), None without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    text = template.strip() if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return data_fingerprint(text)
