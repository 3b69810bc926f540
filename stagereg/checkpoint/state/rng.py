"""Records, restores and seeds the global random number generators of a process.

These are the generators of Python's ``random``, of torch's CPU and the current accelerator, and of NumPy, if the
program has imported it. For generators that the program has created, see :mod:`.generators`. The states are staged as
bytes, because torch returns a new tensor in each call, for which a stager would have to make a new plan.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stagereg.errors import CheckpointError

_JSON_BYTES = 8192  # size of a JSON state, padded with spaces; fits 625 numbers of 32 bits


def _accelerator() -> Any | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else torch.get_device_module(found)


def note() -> dict[str, Any]:
    """Return the states of the global generators of this process, without drawing numbers from them."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if accelerator := _accelerator():
        state["accelerator"] = accelerator.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


def capture(noted: dict[str, Any] | None = None) -> dict[str, bytes]:
    """Convert states from :func:`note`, by default the current states, to bytes in torch's format or JSON."""
    state = note() if noted is None else noted
    return {name: _bytes(each) if isinstance(each, torch.Tensor) else _json(each) for name, each in state.items()}


def _json(state: Any) -> bytes:
    # Pad to a fixed length: a new length would change the state's structure, and every rank would send it again.
    return json.dumps(as_lists(state)).encode().ljust(_JSON_BYTES)


def as_tensors(state: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """Convert a result of :func:`capture` to uint8 tensors, which a checkpoint can store."""
    return {name: _tensor(data) for name, data in state.items()}


def restore(state: dict[str, torch.Tensor]) -> None:
    """Set the generators to states from :func:`as_tensors`. Skips states of generators that this process lacks.

    Raises:
        CheckpointError: a state is invalid. All generators are then unchanged.
    """
    before = as_tensors(capture())
    try:
        _set(state)
    except Exception as error:
        _set(before)
        raise CheckpointError(f"its states of the random number generators are invalid: {error}") from error


def expect_valid(state: dict[str, torch.Tensor]) -> None:
    """Raise the ``CheckpointError`` that :func:`restore` would raise. Leaves the generators unchanged."""
    before = as_tensors(capture())
    restore(state)
    _set(before)


def _set(state: dict[str, torch.Tensor]) -> None:
    version, words, gauss = json.loads(_bytes(state["python"]))
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(_bytes(state["torch"])))
    if "accelerator" in state and (accelerator := _accelerator()):
        accelerator.set_rng_state(_tensor(_bytes(state["accelerator"])))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(checked(json.loads(_bytes(state["numpy"]))))


def seeds() -> dict[str, str]:
    """Return a string for the seed of each generator. Ranks with identical seeds get equal strings.

    For torch, the string is the seed. Python and NumPy do not store a seed, so it is a digest of the current state.
    """
    found = {"python": _digest(random.getstate()), "torch": str(torch.initial_seed())}
    if accelerator := _accelerator():
        found["accelerator"] = str(getattr(accelerator, "initial_seed", torch.initial_seed)())
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = _digest(numpy.random.get_state(legacy=False))
    return found


def _digest(state: Any) -> str:
    return hashlib.sha256(_json(state)).hexdigest()[:16]


def seed_from(*parts: object) -> int:
    """Derive a seed from ``parts``. Equal parts give the same seed on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def seeded(numbers: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the states of newly seeded generators, for :func:`restore`. ``numbers`` maps generator names to seeds."""
    state: dict[str, Any] = {}
    for name, seed in numbers.items():
        if name == "python":
            state[name] = random.Random(seed).getstate()
        elif name == "numpy":
            state[name] = seeded_numpy(sys.modules[name].random.mtrand._rand, seed).get_state(legacy=False)
        else:
            device = "cpu" if name == "torch" else torch.accelerator.current_accelerator()
            state[name] = torch.Generator(device).manual_seed(seed).get_state()
    return as_tensors(capture(state)) if state else {}


def seeded_numpy(like: Any, seed: int) -> Any:
    """Return a NumPy ``RandomState`` with the same algorithm as ``like``, seeded with ``seed``."""
    return type(like)(type(like._bit_generator)(seed))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_lists(state: Any) -> Any:
    """Convert the arrays in a generator state of NumPy or Python to lists."""
    if isinstance(state, dict):
        return {name: as_lists(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _bytes(x: torch.Tensor) -> bytes:
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.uint8:
        raise ValueError("they are not uint8 tensors; another version of stagereg may have written them")
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def checked(state: Any) -> Any:
    """Return a NumPy state. Raises: ``ValueError`` for a position out of range, which NumPy does not check."""
    for part in (state, state["state"]):
        for name, most in (("pos", 624), ("buffer_pos", 4)):
            if name in part and (type(part[name]) is not int or not 0 <= part[name] <= most):
                raise ValueError(f"{name} is outside the generator's buffer")
    return state
