"""lasd: lookahead and self-speculative decoding.

Decodes a causal language model several tokens a step, in its own words.

The public names are loaded on first use, so that `import lasd` stays quick (no torch, no transformers).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lasd.artifacts import load_artifact as load_artifact
    from lasd.decoding.decoder import Decoder as Decoder
    from lasd.decoding.loading import load_target as load_target
    from lasd.decoding.sampling import SamplingParams as SamplingParams
    from lasd.drafters import load_drafter as load_drafter

__version__ = "0.1.0"
__all__ = ["Decoder", "SamplingParams", "load_artifact", "load_drafter", "load_target"]

_HOMES = {
    "Decoder": "lasd.decoding.decoder",
    "SamplingParams": "lasd.decoding.sampling",
    "load_artifact": "lasd.artifacts",
    "load_drafter": "lasd.drafters",
    "load_target": "lasd.decoding.loading",
}


def __getattr__(name: str) -> Any:
    """Imports a public name's module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
