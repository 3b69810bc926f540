"""The loss that ``Join.mean`` returns: its value is the mean over all ranks, its gradient this rank's share of it.

DDP and FSDP take the mean of the gradients over the ranks: with N samples on D ranks, ``loss_sum * D / N`` on each of
them makes it that of the mean over all samples. As a number to read, that share is of no use to anybody.
"""

from __future__ import annotations

from typing import Any

import torch

_MEAN = 1  # in ATen's enumeration of reductions


class MeanLoss(torch.autograd.Function):
    """Has a value, and the gradient of ``loss_sum * scale``."""

    @classmethod
    def of(cls, loss_sum: torch.Tensor, value: float, scale: float) -> torch.Tensor:
        """Return the loss; with a ``scale`` of zero its gradient is zero, also where ``loss_sum`` is NaN."""
        if not scale:
            loss_sum = loss_sum.masked_fill(torch.ones_like(loss_sum, dtype=torch.bool), 0.0)
        found: torch.Tensor = cls.apply(loss_sum, value, scale)
        return found

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, value: float, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return torch.full_like(loss_sum, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.scale, None, None


def is_mean(loss: torch.Tensor) -> bool:
    """Whether torch's graph shows that a loss is the mean of several numbers: a criterion's, or of ``Tensor.mean``."""
    made_by = loss.grad_fn
    if getattr(made_by, "_saved_reduction", None) == _MEAN:
        return True
    return type(made_by).__name__ == "MeanBackward0" and made_by._saved_self_sym_numel > 1  # type: ignore[union-attr]
