"""The contract of the stager, for pytest and, once the package is installed, ``stagereg check lean-export``."""

from __future__ import annotations

import torch
from stagereg.testing import StagerContract
from torch import Tensor

from lean_export.stager import WIDE, Bf16Stager

__all__ = ["Bf16Contract"]


class Bf16Contract(StagerContract):
    """Tests ``stager=bf16``, whose copies have another dtype."""

    def make(self) -> Bf16Stager:
        """Return a new stager."""
        return Bf16Stager()

    def expected(self, tensor: Tensor, path: str) -> Tensor:
        """Return the copy that the stager must make of a tensor."""
        return tensor.to(torch.bfloat16) if tensor.ndim and tensor.dtype in WIDE else tensor
