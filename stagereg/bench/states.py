"""The state dicts that are staged: three shapes of what training has, made from shapes, without training.

====== ======================================================== ==========================================
large  1 GiB in 24 tensors                                      the memory's speed and nothing else
gpt    a GPT of 295 MiB with its Adam state: 886 MiB, 592       what a checkpoint mostly is
small  20,000 tensors of 1 to 4 KiB: 49 MiB                     what a tensor costs, whatever its size
====== ======================================================== ==========================================

``scale`` shrinks the bytes by that factor: gpt becomes narrower, the tensors of large shorter, those of small fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Fill = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class State:
    """A state dict to be measured."""

    tree: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tensors(self.tree))

    def change(self) -> None:
        """Do to it what an optimizer step does: every value is another one afterwards."""
        for x in tensors(self.tree):
            x.add_(1.0)


def make(name: str, scale: float = 1.0, device: str = "cpu") -> State:
    """Make the state dict called ``name``, of :data:`STATES`, with about ``scale`` times its bytes on ``device``."""
    generator = torch.Generator().manual_seed(0)
    return STATES[name](scale, lambda *shape: torch.randn(*shape, generator=generator).to(device))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested dicts and lists, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _large(scale: float, fill: _Fill) -> State:
    count = 24
    length = max(1, round(scale * 2**30 / 4 / count))
    return State({f"block.{i}": fill(length) for i in range(count)})


def _gpt(scale: float, fill: _Fill) -> State:
    """GPT-2's shapes with 12 layers, 704 wide and a vocabulary of 7,424."""
    width, vocabulary, context = (shrunk(size, scale) for size in (704, 7424, 1024))
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    biases = [(width,), (width,), *((shape[-1],) for shape in matrices), (width,), (width,)]  # and the layer norms'
    shapes = {f"h.{i}.{n}": shape for i in range(12) for n, shape in enumerate([*matrices, *biases])}
    shapes |= {"wte": (vocabulary, width), "wpe": (context, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    model = {name: fill(*shape) for name, shape in shapes.items()}
    return State({"model": model, "optimizer": _adam(list(model.values()), fill)})


def _small(scale: float, fill: _Fill) -> State:
    count = max(1, round(20_000 * scale))
    return State({f"cell.{i}": fill(256 + i * 389 % 769) for i in range(count)})


def _adam(parameters: Sequence[torch.Tensor], fill: _Fill) -> dict[str, Any]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for i, x in enumerate(parameters):
        state[i] = {"step": torch.tensor(1.0), "exp_avg": fill(*x.shape), "exp_avg_sq": fill(*x.shape)}
    return {"state": state}


def shrunk(size: int, scale: float) -> int:
    """Return the length of a matrix's side, of which ``scale`` times the bytes are to be left."""
    return max(1, round(size * math.sqrt(scale)))


STATES: dict[str, Callable[[float, _Fill], State]] = {"large": _large, "gpt": _gpt, "small": _small}
"""Every state by its name."""
