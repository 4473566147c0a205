"""Is this the model the artifact was made for? Every difference is named, with both values."""

import logging
from typing import TYPE_CHECKING

from lasd.artifacts.fingerprint import same_weights
from lasd.artifacts.manifest import BaseModelInfo
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.target import TargetModel

logger = logging.getLogger(__name__)

COMPARED = (
    "architecture",
    "hidden_size",
    "vocab_size",
    "num_layers",
    "weights_fingerprint",
    "tokenizer_fingerprint",
    "template_fingerprint",
)


def differences(expected: BaseModelInfo, found: BaseModelInfo) -> dict[str, tuple[object, object]]:
    """Returns field -> (expected value, found value) for each field that differs.

    `id` and `revision` are where a model came from, not what it is: they are not compared. Weights that one side could
    not read (quantised, offloaded) are not compared either.
    """
    pairs = {name: (getattr(expected, name), getattr(found, name)) for name in COMPARED}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if same_weights(expected.weights_fingerprint, found.weights_fingerprint):
        differing.pop("weights_fingerprint", None)
    return differing


def check_compatible(expected: BaseModelInfo, target: "TargetModel", what: str) -> None:
    """Raises LasdError naming each differing field, both values and the model that is needed.

    A chat template that alone differs leaves every answer right and only changes which prompts the artifact has seen:
    it is logged as a warning.
    """
    differing = differences(expected, BaseModelInfo.of(target))
    if not differing:
        return
    listed = ", ".join(f"{name} {pair[0]} against {pair[1]}" for name, pair in differing.items())
    if set(differing) == {"template_fingerprint"}:
        logger.warning(
            "%s was made with another chat template (%s): answers stay right, the speed-up may differ", what, listed
        )
        return
    revision = f" at revision {expected.revision}" if expected.revision else ""
    raise LasdError(
        f"{what} was made for {expected.id}{revision}, not for {target.name}: {listed} (artifact against model); "
        f"load {expected.id}, or make an artifact for {target.name}"
    )
