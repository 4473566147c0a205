"""Drafters: one file a method. `DRAFTERS` names them; a new method is one more line here."""

from typing import TYPE_CHECKING, Any

from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.artifacts import Artifact
    from lasd.decoding.target import TargetModel
    from lasd.drafters.base import Drafter

DRAFTERS = {
    "medusa": "lasd.drafters.medusa:from_artifact",
}
"""Method -> "module:function" of (artifact or None, target, **settings) -> Drafter."""


def load_drafter(
    artifact: "Artifact | None", target: "TargetModel", method: str | None = None, **settings: Any
) -> "Drafter | None":
    """The drafter of a method, checked against the target.

    Args:
        artifact: where the method's weights or sets come from; None for methods that need none.
        method: a name in `DRAFTERS`, or "plain" for no drafter; by default the artifact's kind.
        settings: method settings that override the artifact's.

    Raises:
        LasdError: an unknown method, an artifact of another kind or for another model.
    """
    import importlib

    method = method or (artifact.manifest.kind if artifact is not None else "plain")
    if method == "plain":
        return None
    if method not in DRAFTERS:
        raise LasdError(f"method {method!r} is unknown; it must be one of plain, {', '.join(DRAFTERS)}")
    if artifact is not None:
        artifact.check_compatible(target)
    module, function = DRAFTERS[method].split(":")
    return getattr(importlib.import_module(module), function)(artifact, target, **settings)
