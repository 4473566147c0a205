"""Trains Medusa heads on a frozen language model.

    accelerate launch train/medusa.py --config recipes/smollm2-135m/medusa1.yaml
    python train/medusa.py --model demo --data runs/demo/distilled --output runs/demo/heads

Each setting is taken from its flag, else from the --config YAML file, else from its default; unknown names are errors.
The same command resumes a run that was stopped, at its newest whole checkpoint, and on a CPU ends with the same bits.
The output folder becomes an artifact (lasd.json, heads.safetensors, README.md) when training ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import os

# Waiting threads sleep instead of spinning: nothing lost on a quiet machine, many times faster on a shared one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lasd.errors import LasdError, entry


def main() -> None:
    """Reads the command line and trains."""
    from train.config import read_config

    config = read_config(sys.argv[1:])
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise LasdError(
            f"training needs packages that are not here ({error}): install them with `pip install 'lasd[train]'`"
        ) from error
    from train.reporting import set_up_logging
    from train.run import train_heads

    set_up_logging(int(os.environ.get("RANK", "0")))
    train_heads(config, sys.argv)


if __name__ == "__main__":
    entry(main)
