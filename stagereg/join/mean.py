"""The loss whose gradients, averaged over ranks as data parallelism does it, are the mean over all samples of a step.

DDP and FSDP take the mean of the ranks' gradients, as if every rank had as many samples. With N samples over all ranks
and D ranks to divide by, ``loss_sum * D / N`` on each rank makes that mean the exact one: 1/N of the gradient of the
sum over all samples.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

__all__ = ["Average", "weighted"]

Average = Literal["samples", "world", "active"]


def weighted(loss_sum: torch.Tensor, ranks: float, divisor: float) -> torch.Tensor:
    """Return ``loss_sum * ranks / divisor``; exactly zero, with a gradient of zero, if either is zero.

    The loss of an empty batch may be anything, such as the NaN that is the mean of nothing.
    """
    result: Any = _Weighted.apply(loss_sum, ranks / divisor if divisor else 0.0)
    return result


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return loss * factor if factor else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None
