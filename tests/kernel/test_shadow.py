"""The join wire agrees with torch's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stagereg.kernel.shadow import TorchWire
from stagereg.testing import run_ranks

CPU = torch.device("cpu")


def count_down(rank: int, world_size: int, lengths: tuple[int, ...]) -> list[int]:
    """What each rank reads from the wire: actives their work's value, joined ranks their count."""
    wire = TorchWire(dist.group.WORLD, CPU)  # type: ignore[arg-type]
    read = []
    for _ in range(lengths[rank]):
        work = wire.announce()
        work.wait()
        read.append(int(work.get_future().value()[0].item()))
    while read[-1:] != [0]:
        read.append(wire.count_active())
    return read


def test_both_ends_of_the_wire_read_the_number_of_active_ranks() -> None:
    assert run_ranks(count_down, 3, args=((1, 3, 0),), timeout_s=30) == [[2, 1, 1, 0]] * 3
