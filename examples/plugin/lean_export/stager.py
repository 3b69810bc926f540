"""``stager=bf16``: copies a state dict with its weights in bfloat16, for a small export.

A second checkpointer uses this stager, next to the checkpointer of the full state. The tensors are cast on their device
and then copied by stagereg's own stager, so an export of float32 weights needs half the host memory of a full copy.
"""

from __future__ import annotations

import torch
from stagereg.plugin import HostCopier, HostStager, Pool, StateDict

__all__ = ["WIDE", "Bf16Stager"]

WIDE = (torch.float32, torch.float64)
"""The dtypes that are cast. Casting float16 would lose digits and save no bytes."""


class Bf16Stager(HostStager):
    """Copies a state dict, with its float32 and float64 tensors cast to bfloat16.

    Otherwise it fulfills the contract of a stager, like stagereg's own: a returned copy never changes, and the
    structure, strides and tied weights are the source's. Each rank casts its shard of a DTensor or ShardedTensor.
    Tensors without dimensions, such as step counts, and tensors that ``map_memory`` does not change, are copied only.

    Each parameter is an option: users see its name, type, default and description.

    Args:
        max_in_flight: copies that writers may hold at once before ``stage`` waits for one to be dropped.
        wait_s: maximum seconds that ``stage`` waits for a reader that releases its copies; one second for other
            readers. After that it allocates more memory, which is logged once.
    """

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s)))

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory. Blocks until the bytes have arrived.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or memory cannot be allocated.
            StagerClosedError: the stager is closed.
        """
        narrow = self.map_memory(state_dict, lambda x: x.to(torch.bfloat16), where=lambda x, path: x.dtype in WIDE)
        return super().stage(narrow)
