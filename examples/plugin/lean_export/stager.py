"""``stager=bf16``: a copy for a small export, its weights in bfloat16.

It stands beside the stager of the full checkpoint, in a checkpointer of its own. The tensors are cast where they are,
and copied to host memory by stagereg's own stager, so an export takes half the memory of a full copy there.
"""

from __future__ import annotations

import torch
from stagereg.plugin import HostCopier, HostStager, Pool, StateDict

__all__ = ["WIDE", "Bf16Stager"]

WIDE = (torch.float32, torch.float64)
"""What is cast. float16 has as many bytes as bfloat16 has, and would only lose digits."""


class Bf16Stager(HostStager):
    """Copies a state dict, its float32 and float64 tensors as bfloat16.

    Everything else of the contract of a stager holds as it does for stagereg's own: what is handed out never changes,
    structure, strides and tied weights stay. Of a DTensor or ShardedTensor each rank casts its part. Tensors without
    dimensions, such as counts of steps, and what ``map_memory`` leaves alone, are copied as they are.

    Each parameter is an option: its name, type, default and text are what users see.

    Args:
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds, one at most, that ``stage`` waits for that; then it takes memory beyond the bound, which is
            logged once.
    """

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s)))

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
        """
        narrow = self.map_memory(state_dict, lambda x: x.to(torch.bfloat16), where=lambda x, path: x.dtype in WIDE)
        return super().stage(narrow)
