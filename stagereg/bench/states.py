"""The state dicts of the benchmarks, with random values.

====== ======================================================== ==========================================
large  1 GiB in 24 tensors                                      memory speed alone
gpt    a GPT of 295 MiB with its Adam state: 886 MiB, 592       a typical checkpoint
small  20,000 tensors of 1 to 4 KiB: 49 MiB                     the cost per tensor
====== ======================================================== ==========================================

``scale`` multiplies the number of bytes: it changes the width of gpt, the length of large's tensors, and the number of
small's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Fill = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class State:
    """A state dict of a benchmark."""

    tree: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tensors(self.tree))

    def change(self) -> None:
        """Change every value in place, like an optimizer step."""
        for x in tensors(self.tree):
            x.add_(1.0)


def make(name: str, scale: float = 1.0, device: str = "cpu") -> State:
    """Build the state dict ``name`` of :data:`STATES` on ``device``, with about ``scale`` times its bytes."""
    generator = torch.Generator().manual_seed(0)
    return STATES[name](scale, lambda *shape: torch.randn(*shape, generator=generator).to(device))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dicts and lists, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _large(scale: float, fill: _Fill) -> State:
    count = 24
    length = max(1, round(scale * 2**30 / 4 / count))
    return State({f"block.{i}": fill(length) for i in range(count)})


def _gpt(scale: float, fill: _Fill) -> State:
    """Build GPT-2 with 12 layers, width 704 and a vocabulary of 7,424, with its Adam state."""
    width, vocabulary, context = (shrunk(size, scale) for size in (704, 7424, 1024))
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    biases = [(width,), (width,), *((shape[-1],) for shape in matrices), (width,), (width,)]  # with layer norms
    shapes = {f"h.{i}.{n}": shape for i in range(12) for n, shape in enumerate([*matrices, *biases])}
    shapes |= {"wte": (vocabulary, width), "wpe": (context, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    model = {name: fill(*shape) for name, shape in shapes.items()}
    sizes = [x.shape for x in model.values()]
    state = {i: {"step": torch.tensor(1.0), "exp_avg": fill(*s), "exp_avg_sq": fill(*s)} for i, s in enumerate(sizes)}
    return State({"model": model, "optimizer": {"state": state}})


def _small(scale: float, fill: _Fill) -> State:
    count = max(1, round(20_000 * scale))
    return State({f"cell.{i}": fill(256 + i * 389 % 769) for i in range(count)})


def shrunk(size: int, scale: float) -> int:
    """Return the side of a square matrix with ``scale`` times as many elements as a matrix with the side ``size``."""
    return max(1, round(size * math.sqrt(scale)))


STATES: dict[str, Callable[[float, _Fill], State]] = {"large": _large, "gpt": _gpt, "small": _small}
"""The functions that build the state dicts, by name."""
