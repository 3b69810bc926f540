"""The random number generators of one process: what they were, and setting them back.

Python's ``random``, torch's CPU generator, the current accelerator's if there is one, and NumPy's global one if the
program has imported NumPy. All states are stored as bytes: those of Python and NumPy are tuples that no stager needs to
understand, and torch returns a new tensor each time, for which a stager would have to make a new plan. Generators that
the program made itself are its own business: put their states into the saved state.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from typing import Any

import torch

__all__ = ["capture", "restore"]


def _accelerator() -> Any | None:
    return (
        torch.get_device_module(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None
    )


def capture() -> dict[str, bytes]:
    """Return the state of every generator of this process; drawing nothing from any of them."""
    state = {"python": pickle.dumps(random.getstate()), "torch": _bytes(torch.get_rng_state())}
    if accelerator := _accelerator():
        state["accelerator"] = _bytes(accelerator.get_rng_state())
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = pickle.dumps(numpy.random.get_state())
    return state


def restore(state: dict[str, bytes]) -> None:
    """Set the generators of this process to what :func:`capture` returned, as far as they are here."""
    random.setstate(pickle.loads(state["python"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if "accelerator" in state and (accelerator := _accelerator()):
        accelerator.set_rng_state(_tensor(state["accelerator"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(pickle.loads(state["numpy"]))


def _bytes(x: torch.Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
