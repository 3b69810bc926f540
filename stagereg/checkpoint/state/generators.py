"""Adds ``state_dict`` and ``load_state_dict`` to random number generators in the state of the program.

``torch.Generator``, ``random.Random``, NumPy's ``Generator`` and ``RandomState`` have a state, but not these methods.
The state is saved as bytes or a string. If the ranks have different states, the checkpoint has one state per rank.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

import torch

import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.pickled import is_generator
from stagereg.errors import CheckpointError

_KIND, _STATE = "generator", "state"


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
        return {_KIND: self._kind, _STATE: json.dumps(rng.as_lists(state))}

    @property
    def seed(self) -> str:
        """A string that is equal on ranks that seeded the generator identically; see :func:`.rng.seeds`."""
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
            generator.set_state(rng.seeded_numpy(generator, seed).get_state(legacy=False))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state. Raises: ``CheckpointError`` if the state is invalid, or from another kind of generator."""
        self.expect_loadable(saved)
        _set(self._generator, saved[_STATE])

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
            _set(copy.deepcopy(self._generator), saved[_STATE])
        except Exception as error:
            raise CheckpointError(f"the generator does not accept the state: {error}") from error


def generator_state(value: Any) -> GeneratorState | None:
    return GeneratorState(value) if is_generator(value) else None


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor([*state], dtype=torch.uint8, device="cpu"))
    elif isinstance(generator, random.Random):
        version, words, gauss = json.loads(state)
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = rng.checked(json.loads(state))
    else:
        generator.set_state(rng.checked(json.loads(state)))
