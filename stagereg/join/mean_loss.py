"""The loss that ``Join.mean`` returns. Its value is the mean over all ranks; its gradient is this rank's contribution.

DDP and FSDP average gradients over ranks. With N samples on D ranks, each rank's contribution is the gradient of
``loss_sum * D / N``, so the average is the gradient of the mean over all samples.

The gradient needs only counts, which ranks exchange on the host. So the loss of a CUDA device can stay there: its value
is summed in the order of the stream, and the host waits for neither the device nor the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from stagereg.join.session import JoinSession
from stagereg.kernel.broken import collectives_of
from stagereg.kernel.shadow import TorchWire

_MEAN = 1  # value of Reduction::Mean in ATen


class MeanLoss(torch.autograd.Function):
    """A function with a given value, whose gradient is the gradient of ``loss_sum * scale``."""

    @classmethod
    def of(cls, loss_sum: torch.Tensor, value: float | torch.Tensor, scale: float) -> torch.Tensor:
        """Return the loss. If ``scale`` is 0, its gradient is zero, even if ``loss_sum`` is NaN.

        ``value``: a number, or a tensor of one number, which is copied to the device of ``loss_sum``.
        """
        if not scale:
            loss_sum = loss_sum.masked_fill(torch.ones_like(loss_sum, dtype=torch.bool), 0.0)
        found: torch.Tensor = cls.apply(loss_sum, value, scale)
        return found

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, value: float | torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        if isinstance(value, torch.Tensor):
            return torch.empty_like(loss_sum).copy_(value)
        return torch.full_like(loss_sum, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.scale, None, None


def stays_on_device(loss_sum: torch.Tensor) -> bool:
    """Return whether the value of a loss can be computed on its device, in float64, without a wait of the host.

    False while a CUDA graph is captured: reading the loss then raises, but a replay would use old counts.
    """
    is_scalar = type(loss_sum) is torch.Tensor and loss_sum.numel() == 1
    return loss_sum.is_cuda and is_scalar and not torch.cuda.is_current_stream_capturing()


def sums_in_stream(wire: TorchWire) -> bool:
    """Return whether the group's collectives run in the order of the device's streams, while the host continues."""
    cuda, group = torch.device("cuda"), wire.group
    return wire.device.type == "cuda" and cuda in group._device_types and group._get_backend(cuda).name() == "nccl"


def share_of(loss_sum: torch.Tensor, count: float, by: float, stays: bool) -> float | torch.Tensor:
    """Return ``loss_sum / by``, or 0 if ``count`` is 0: as a float64 tensor without dimensions if it ``stays``.

    Otherwise as a number, for which the host waits for the loss.
    """
    if not stays:
        return loss_sum.detach().item() / by if count else 0.0
    if not count:
        return torch.zeros((), dtype=torch.float64, device=loss_sum.device)
    return divided(loss_sum.detach().reshape(()).to(torch.float64), by)


def divided(total: float | torch.Tensor, by: float) -> float | torch.Tensor:
    """Return ``total / by``, rounded correctly on every device.

    On CUDA devices, torch multiplies a tensor by the reciprocal of a number, which rounds twice.
    """
    return total / torch.full_like(total, by) if isinstance(total, torch.Tensor) and by != 1.0 else total / by


def sum_losses(
    session: JoinSession, loss_sum: torch.Tensor, count: float, by: float, before: int
) -> tuple[float, float, float | torch.Tensor]:
    """Return sums over all ranks: ``count``, the ranks with data, and ``loss_sum / by``. Collective.

    The last sum is a tensor if a collective of the group has summed losses on their device. All ranks must have run
    equally many collectives since ``before``, or a rank would pair this collective with a collective of its step. Ranks
    compare these numbers together with the counts. If the numbers differ, or if a rank has left the loop or has no loss
    on a device, hosts sum the losses, also in the rest of the loop.
    """
    loop, responder, wire = session.loop, session.peers.responder, session.peers.wire
    assert loop is not None
    assert responder is not None
    place = 0.0
    if loop.streams and stays_on_device(loss_sum) and sums_in_stream(wire):
        place = 1.0 + (collectives_of(wire.group) - before) % 1024
    share = share_of(loss_sum, count, by, stays=bool(place))
    has_data, own = float(not loop.membership.empty), 0.0 if place else float(share)
    samples, active, total, places, squares = responder.request(count, has_data, own, place, place**2)
    if places and places**2 == wire.group.size() * squares:  # all places are equal
        return samples, active, sum_in_stream(wire, share)
    if places:
        loop.streams = False
        total += responder.request(0.0, 0.0, float(share) if place else 0.0, 0.0, 0.0)[2]
    return samples, active, total


def sum_in_stream(wire: TorchWire, share: Any) -> torch.Tensor:
    """Return the sum of all ranks' shares, equal on all ranks, on the device of ``wire``. Collective.

    Every rank adds the gathered shares in rank order, because backends do not promise equal sums. If the collective is
    aborted, the shares of the missing ranks, and so the sum, are NaN.
    """
    gathered = torch.full((wire.group.size(),), math.nan, dtype=torch.float64, device=wire.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(gathered, share.to(wire.device).reshape(1), group=wire.group)
    return gathered.sum()


def is_mean(loss: torch.Tensor) -> bool:
    """Return whether the autograd graph shows that a loss is a mean of several numbers."""
    made_by = loss.grad_fn
    if getattr(made_by, "_saved_reduction", None) == _MEAN:
        return True
    return type(made_by).__name__ == "MeanBackward0" and made_by._saved_self_sym_numel > 1  # type: ignore[union-attr]
