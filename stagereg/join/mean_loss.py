"""The loss that ``Join.mean`` returns. Its value is the mean over all ranks; its gradient is this rank's contribution.

DDP and FSDP average gradients over ranks. With N samples on D ranks, each rank's contribution is the gradient of
``loss_sum * D / N``, so the average is the gradient of the mean over all samples.
"""

from __future__ import annotations

from typing import Any

import torch

_MEAN = 1  # value of Reduction::Mean in ATen


class MeanLoss(torch.autograd.Function):
    """A function with a given value, whose gradient is the gradient of ``loss_sum * scale``."""

    @classmethod
    def of(cls, loss_sum: torch.Tensor, value: float, scale: float) -> torch.Tensor:
        """Return the loss. If ``scale`` is 0, its gradient is zero, even if ``loss_sum`` is NaN."""
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
    """Return whether the autograd graph shows that a loss is a mean of several numbers."""
    made_by = loss.grad_fn
    if getattr(made_by, "_saved_reduction", None) == _MEAN:
        return True
    return type(made_by).__name__ == "MeanBackward0" and made_by._saved_self_sym_numel > 1  # type: ignore[union-attr]
