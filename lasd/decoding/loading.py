"""From a name to a TargetModel: the one place in `lasd/` that loads a model with transformers."""

import logging
from typing import Any

import torch

from lasd.decoding.conformance import TESTED, check_conformance
from lasd.decoding.target import TargetModel, refuse_config
from lasd.errors import LasdError

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTIZATIONS = ("nf4", "int8")

LOAD_ERRORS = (
    (
        ("GatedRepo", "gated repo"),
        "is gated: accept its licence on the Hub, log in with `hf auth login`, and run the same command again",
    ),
    (
        ("RepositoryNotFound", "is not a local folder and is not a valid model identifier"),
        "is neither a folder here nor a model on the Hub that you can read; check it, or log in with `hf auth login`",
    ),
    (
        ("couldn't connect", "offline", "ConnectionError", "Connection error", "ConnectError", "MaxRetry"),
        "is not in the local cache and the Hub cannot be reached; connect once, or give a local folder",
    ),
    (
        ("SafetensorError", "incomplete metadata", "HeaderTooLarge", "InvalidHeader"),
        "has a weights file that is damaged or cut off; download it again",
    ),
    (
        ("OutOfMemoryError",),
        "does not fit into this device's memory; use --dtype bf16, quantisation, or a smaller model",
    ),
    (
        ("no file named",),
        "has no safetensors weights, and lasd loads no pickled ones; convert the checkpoint with save_pretrained first",
    ),
)
"""(words in the error, what it means and what to do)."""


def load_target(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
    device_map: Any = None,
) -> TargetModel:
    """Loads a model to decode with.

    Args:
        model: a short name (`lasd.zoo`), a folder, or a Hub id.
        dtype: "bf16", "fp16", "fp32", or "auto" for the checkpoint's own.
        device: "cpu", "cuda", "cuda:1" ..., or "auto": a GPU if there is one.
        quantization: None, "nf4" or "int8" (bitsandbytes). int8 multiplies columns with outliers unquantised, and which
            columns these are depends on all rows of a pass: answers are close to one-row decoding's, not always equal.
        trust_remote_code: whether code that the repository ships may run.
        adapter: folder or Hub id of peft weights to load over the model.
        device_map: as transformers takes it, to place layers on several devices; `device` is then ignored.

    Raises:
        LasdError: one line that says what came, what was expected and what to do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lasd import zoo

    if dtype not in DTYPES and dtype != "auto":
        raise LasdError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)} or auto")
    resolved = zoo.resolve(model, revision=revision)
    place = _device(device)
    kwargs: dict[str, Any] = {
        "revision": resolved.revision,
        "trust_remote_code": trust_remote_code,
        "use_safetensors": True,
    }
    if quantization is not None:
        kwargs["quantization_config"] = _quantization_config(quantization, DTYPES.get(dtype, torch.bfloat16))
    if device_map is not None or quantization is not None or place.type != "cpu":
        kwargs["device_map"] = device_map if device_map is not None else {"": place}
    try:
        config = AutoConfig.from_pretrained(
            resolved.source, revision=resolved.revision, trust_remote_code=trust_remote_code
        )
        refuse_config(config)
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            kwargs["attn_implementation"] = "eager"  # some releases choose sdpa, which leaves the soft cap out
        loaded = AutoModelForCausalLM.from_pretrained(resolved.source, dtype=DTYPES.get(dtype, "auto"), **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(
            resolved.source, revision=resolved.revision, trust_remote_code=trust_remote_code
        )
    except LasdError:
        raise
    except Exception as error:
        raise LasdError(explain_load_error(model, resolved.source, error)) from error
    if adapter is not None:
        loaded = _with_adapter(loaded, adapter)
    target = TargetModel(
        loaded, tokenizer, name=model, source=resolved.source, revision=resolved.revision, quantization=quantization
    )
    if config.model_type not in TESTED:
        check_conformance(target)
    return target


def explain_load_error(name: str, source: str, error: Exception) -> str:
    """One line for what went wrong while a model was loaded."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    what = f"{name} ({source})"
    for words, meaning in LOAD_ERRORS:
        if any(word in text for word in words):
            return f"{what} {meaning}"
    return f"{what} cannot be loaded: {text[:300]}"


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise LasdError(f"device is {device!r}; it must be cpu, cuda, cuda:N or auto") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise LasdError(f"device is {device!r}, but torch sees no CUDA GPU here; use --device cpu")
    return place


def _quantization_config(quantization: str, compute: torch.dtype) -> Any:
    if quantization not in QUANTIZATIONS:
        raise LasdError(f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    import importlib.util

    if importlib.util.find_spec("bitsandbytes") is None:
        raise LasdError(
            f"quantization {quantization!r} needs bitsandbytes; install it with `pip install 'lasd[train]'`"
        )
    from transformers import BitsAndBytesConfig

    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def _with_adapter(model: Any, adapter: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise LasdError("an adapter needs peft; install it with `pip install 'lasd[train]'`") from error
    try:
        return PeftModel.from_pretrained(model, adapter)
    except Exception as error:
        raise LasdError(explain_load_error(adapter, adapter, error)) from error
