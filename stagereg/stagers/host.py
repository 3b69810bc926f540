"""The base of stagers that use the kernel's copier, and have finished copying when ``stage`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stagereg.errors import RegistryError
from stagereg.kernel.copier import HostCopier
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.memory_map import map_memory


class HostStager(AsyncStager):
    """Base of the stagers that copy with the kernel. A subclass chooses the memory by choosing the copier.

    Not thread-safe.

    A forked child, such as a worker of a ``DataLoader``, may call ``stage``, which uses the child's own memory. The
    child may read copies held at the time of the fork, unless their reader has promised to release them, as a
    ``Checkpointer`` does: reading such a copy terminates the child with SIGSEGV.

    Args:
        copier: the copier. The other options are shared by subclasses and documented here for all of them.
        max_in_flight: copies that writers may hold at once before ``stage`` waits for one to be dropped.
        wait_s: maximum seconds that ``stage`` waits for a reader that releases its copies (``Checkpointer``); one
            second for other readers. After that it allocates memory beyond the bound, which is logged once.
        threads: threads that copy from host memory, including the caller's thread.
        pin: page-lock the memory; None: if an accelerator is available.
    """

    _synchronize_after_execute = False

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        if name == "_copier":
            raise RegistryError(f"{type(self).__name__}.__init__ must call super().__init__().")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory. Blocks until the bytes have arrived.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or memory cannot be allocated.
            StagerClosedError: the stager is closed.
        """
        copied: StateDict = self._copier.copy(state_dict)
        return copied

    @staticmethod
    def map_memory(
        state_dict: StateDict,
        function: Callable[[torch.Tensor], torch.Tensor],
        where: Callable[[torch.Tensor, str], bool] | None = None,
    ) -> StateDict:
        """Return ``state_dict`` with other values or dtypes in some tensors, for ``stage`` of the base class to copy.

        A stager that rounds the state of an optimizer::

            class RoundingStager(BlockingStager):
                def stage(self, state_dict):
                    rounded = self.map_memory(state_dict, lambda x: x.bfloat16().to(x.dtype),
                                              where=lambda x, path: path.startswith("optimizer."))
                    return super().stage(rounded)

        Shapes, strides, shared memory, ``DTensor``, ``ShardedTensor``, attributes and the source do not change. Only
        floating-point tensors with at least one dimension are changed, so step counts are not. Other wrappers, sparse
        and quantized tensors, and attributes of tensors are not changed.

        Args:
            state_dict: the argument of ``stage``.
            function: takes the elements of a memory range as a one-dimensional tensor, and returns a new tensor of the
                same length and any dtype. Must work elementwise: the range may include elements of other tensors.
            where: takes a tensor and its dotted name, ``"optimizer.state.0.exp_avg"``, and returns whether to change
                the tensor; ``None`` changes all. If it refuses one of several tensors over the same memory, none is
                changed.

        Raises:
            StagingError: an entry cannot be staged; or the function wrote into its argument, or returned a tensor of
                another shape.
        """
        return map_memory(state_dict, function, where)

    def expect_release(self) -> None:
        self._copier.pool.readers_release = True

    def release(self, staged: Any) -> None:
        self._copier.pool.release(staged)

    def close(self) -> None:
        """Free unused memory. Copies still held remain valid. Idempotent."""
        self._copier.close()
