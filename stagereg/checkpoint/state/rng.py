"""Records, restores and seeds random number generators: the global generators of a process, and those of the program.

The global generators are those of Python's ``random``, of torch's CPU and the current accelerator, and of NumPy, if the
program has imported it. Their states are staged as bytes, because torch returns a new tensor in each call, for which a
stager would have to make a new plan.

A generator in the state of the program (``torch.Generator``, ``random.Random``, NumPy's ``Generator`` and
``RandomState``) gets ``state_dict`` and ``load_state_dict``. Its state is saved as bytes or a string. If the ranks have
different states, the checkpoint has one state per rank.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stagereg.checkpoint.format.pickled import is_generator
from stagereg.errors import CheckpointError

_KIND, _STATE = "generator", "state"
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
    return json.dumps(_as_lists(state)).encode().ljust(_JSON_BYTES)


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
        _set_all(state)
    except Exception as error:
        _set_all(before)
        raise CheckpointError(f"its states of the random number generators are invalid: {error}") from error


def expect_valid(state: dict[str, torch.Tensor]) -> None:
    """Raise the ``CheckpointError`` that :func:`restore` would raise. Leaves the generators unchanged."""
    before = as_tensors(capture())
    restore(state)
    _set_all(before)


def _set_all(state: dict[str, torch.Tensor]) -> None:
    version, words, gauss = json.loads(_bytes(state["python"]))
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(_bytes(state["torch"])))
    if "accelerator" in state and (accelerator := _accelerator()):
        accelerator.set_rng_state(_tensor(_bytes(state["accelerator"])))
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(_checked(json.loads(_bytes(state["numpy"]))))


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
            state[name] = _seeded_numpy(sys.modules[name].random.mtrand._rand, seed).get_state(legacy=False)
        else:
            device = "cpu" if name == "torch" else torch.accelerator.current_accelerator()
            state[name] = torch.Generator(device).manual_seed(seed).get_state()
    return as_tensors(capture(state)) if state else {}


def _seeded_numpy(like: Any, seed: int) -> Any:
    """Return a NumPy ``RandomState`` with the same algorithm as ``like``, seeded with ``seed``."""
    return type(like)(type(like._bit_generator)(seed))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_lists(state: Any) -> Any:
    """Convert the arrays in a generator state of NumPy or Python to lists."""
    if isinstance(state, dict):
        return {name: _as_lists(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _bytes(x: torch.Tensor) -> bytes:
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.uint8:
        raise ValueError("they are not uint8 tensors; another version of stagereg may have written them")
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def _checked(state: Any) -> Any:
    """Return a NumPy state. Raises: ``ValueError`` for a position out of range, which NumPy does not check."""
    for part in (state, state["state"]):
        for name, most in (("pos", 624), ("buffer_pos", 4)):
            if name in part and (type(part[name]) is not int or not 0 <= part[name] <= most):
                raise ValueError(f"{name} is outside the generator's buffer")
    return state


# -- generators in the state of the program


class GeneratorState:
    """Wraps a random number generator of the program, to give it ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @property
    def _kind(self) -> str:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return f"torch {generator.device.type}"
        if isinstance(generator, random.Random):
            return "random"
        return f"numpy {type(getattr(generator, 'bit_generator', generator)).__name__}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator, without drawing numbers from it."""
        generator, state = self._generator, None
        if isinstance(generator, torch.Generator):
            return {_KIND: self._kind, _STATE: bytes(generator.get_state().tolist())}
        if isinstance(generator, random.Random):
            state = generator.getstate()
        elif hasattr(generator, "bit_generator"):
            state = generator.bit_generator.state
        else:
            state = generator.get_state(legacy=False)
        return {_KIND: self._kind, _STATE: json.dumps(_as_lists(state))}

    @property
    def seed(self) -> str:
        """A string that is equal on ranks that seeded the generator identically; see :func:`seeds`."""
        generator = self._generator
        return str(generator.initial_seed() if isinstance(generator, torch.Generator) else self.state_dict()[_STATE])

    def reseed(self, seed: int) -> None:
        """Seed the generator."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.set_state(_seeded_numpy(generator, seed).get_state(legacy=False))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state. Raises: ``CheckpointError`` if the state is invalid, or from another kind of generator."""
        self.expect_loadable(saved)
        _set_state(self._generator, saved[_STATE])

    def expect_loadable(self, saved: Any) -> None:
        """Raise the ``CheckpointError`` that :meth:`load_state_dict` would raise. Does not change the generator."""
        kind = saved.get(_KIND) if isinstance(saved, Mapping) else None
        if kind is None:
            raise CheckpointError("the saved value is not the state of a random number generator")
        if kind != self._kind:
            raise CheckpointError(
                f"the saved state is of another kind of generator: expected {self._kind!r}, got {kind!r:.100}. Make a "
                "generator of that kind, or remove this one from the state"
            )
        try:
            _set_state(copy.deepcopy(self._generator), saved[_STATE])
        except Exception as error:
            raise CheckpointError(f"the generator does not accept the state: {error}") from error


def generator_state(value: Any) -> GeneratorState | None:
    return GeneratorState(value) if is_generator(value) else None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor([*state], dtype=torch.uint8, device="cpu"))
    elif isinstance(generator, random.Random):
        version, words, gauss = json.loads(state)
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _checked(json.loads(state))
    else:
        generator.set_state(_checked(json.loads(state)))
