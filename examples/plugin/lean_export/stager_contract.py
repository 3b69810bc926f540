"""How the stager is checked: by pytest, or by ``stagereg check lean-export`` once the package is installed."""

from __future__ import annotations

import torch
from stagereg.testing import StagerContract
from torch import Tensor

from lean_export.stager import WIDE, Bf16Stager

__all__ = ["Bf16Contract"]


class Bf16Contract(StagerContract):
    """``stager=bf16`` keeps every promise of a stager, but that its copies have another dtype."""

    def make(self) -> Bf16Stager:
        """Return a fresh stager."""
        return Bf16Stager()

    def expected(self, tensor: Tensor, path: str) -> Tensor:
        """Return what it makes of a tensor."""
        return tensor.to(torch.bfloat16) if tensor.ndim and tensor.dtype in WIDE else tensor
