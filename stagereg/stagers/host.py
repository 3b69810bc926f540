"""The base of stagers that copy into host memory and have finished copying when ``stage`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stagereg.errors import RegistryError
from stagereg.kernel.copier import HostCopier
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.memory_map import map_memory


class HostStager(AsyncStager):
    """Base of the stagers that copy into host memory. The copier that a subclass passes determines the memory.

    Not thread-safe.

    A forked child, such as a worker of a ``DataLoader``, may call ``stage``, which uses the child's own memory. The
    child may also read copies that existed at the time of the fork. Exception: if the reader of the copies releases
    them explicitly, as a ``Checkpointer`` does, reading such a copy terminates the child with SIGSEGV.

    Args:
        copier: the copier. The other options are those of subclasses, documented here for all subclasses.
        max_in_flight: number of copies that writers may hold; with more, ``stage`` waits until a copy is dropped.
        wait_s: maximum seconds that ``stage`` waits, if the reader releases its copies as ``Checkpointer`` does;
            otherwise one second. After that, ``stage`` allocates more memory, which is logged once.
        threads: number of threads that copy from host memory, including the caller's thread.
        pin: whether to page-lock the memory; None: if an accelerator is available.
    """

    _synchronize_after_execute = False

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        if name == "_copier":
            raise RegistryError(f"{type(self).__name__}.__init__ must call super().__init__().")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory. Blocks until the copy is complete.

        Raises:
            StagingError: an entry cannot be staged (the message contains its path), or memory cannot be allocated.
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
        """Return ``state_dict`` with changed values or dtypes in some tensors; pass the result to ``super().stage``.

        A stager that rounds the state of an optimizer::

            class RoundingStager(BlockingStager):
                def stage(self, state_dict):
                    rounded = self.map_memory(state_dict, lambda x: x.bfloat16().to(x.dtype),
                                              where=lambda x, path: path.startswith("optimizer."))
                    return super().stage(rounded)

        Shapes, strides, shared memory, ``DTensor``, ``ShardedTensor``, attributes and the source do not change. Only
        floating-point tensors with at least one dimension change, so step counts do not. Other wrappers, sparse and
        quantized tensors, and attributes of tensors do not change.

        Args:
            state_dict: the argument of ``stage``.
            function: a function of a one-dimensional tensor, the elements of a memory range. Returns a new tensor of
                the same length and any dtype. Must work elementwise, because the range may include elements of other
                tensors.
            where: a function of a tensor and its dotted name, such as ``"optimizer.state.0.exp_avg"``, which returns
                whether to change the tensor. ``None`` changes all tensors. If it returns False for one of several
                tensors that share memory, none of them changes.

        Raises:
            StagingError: an entry cannot be staged, or the function wrote into its argument or changed the shape.
        """
        return map_memory(state_dict, function, where)

    def expect_release(self) -> None:
        self._copier.pool.readers_release = True

    def expect_stage(self) -> None:
        self._copier.pool.prepare()

    def release(self, staged: Any) -> None:
        self._copier.pool.release(staged)

    def close(self) -> None:
        """Free unused memory. Copies in use remain valid. Idempotent."""
        self._copier.close()
