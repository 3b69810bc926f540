"""The random number generators of one process: what they were, and setting them back.

Python's ``random``, torch's CPU generator, the current accelerator's if there is one, and NumPy's global one if the
program has imported NumPy. All states are stored as bytes: those of Python and NumPy are tuples that no stager needs to
understand, and torch returns a new tensor each time, for which a stager would have to make a new plan. Generators that
the program made itself are not covered: put their states into the saved state.

The bytes are torch's own, and JSON with what Python and NumPy return.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from typing import Any

import torch

from stagereg.errors import CheckpointError

__all__ = ["capture", "restore"]

_POSITIONS = {"pos": 624, "buffer_pos": 4}
"""The last index that NumPy's generators may have in the block they draw from. NumPy does not check it."""


def _accelerator() -> Any | None:
    return (
        torch.get_device_module(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None
    )


def capture() -> dict[str, bytes]:
    """Return the state of every generator of this process; drawing nothing from any of them."""
    state = {"python": json.dumps(random.getstate()).encode(), "torch": _bytes(torch.get_rng_state())}
    if accelerator := _accelerator():
        state["accelerator"] = _bytes(accelerator.get_rng_state())
    if numpy := sys.modules.get("numpy"):
        words = numpy.random.get_state(legacy=False)
        state["numpy"] = json.dumps(words, default=lambda array: array.tolist()).encode()
    return state


def restore(state: dict[str, bytes]) -> None:
    """Set the generators of this process to what :func:`capture` returned, as far as they are here.

    Raises:
        CheckpointError: it is not the state of generators.
    """
    try:
        python = _python_from(state["python"])
        cpu = _tensor(state["torch"])
        numpy, others = sys.modules.get("numpy"), None
        if "numpy" in state and numpy is not None:
            others = _numpy_from(state["numpy"])
        random.setstate(python)
        torch.set_rng_state(cpu)
        if "accelerator" in state and (accelerator := _accelerator()):
            accelerator.set_rng_state(_tensor(state["accelerator"]))
        if others is not None and numpy is not None:
            numpy.random.set_state(others)
    except Exception as error:
        raise CheckpointError(f"what it has of random number generators is none of their states: {error}") from error


def _bytes(x: torch.Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _python_from(data: bytes) -> Any:
    version, words, gauss = json.loads(data)
    return version, tuple(words), gauss


def _numpy_from(data: bytes) -> Any:
    state = json.loads(data)
    for part in (state, state["state"]):
        for name, most in _POSITIONS.items():
            if name in part and (type(part[name]) is not int or not 0 <= part[name] <= most):
                raise ValueError(f"{name} is out of its block")
    return state
