"""The stagers that are done when ``stage`` returns: a kernel copier behind torch's protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stagereg.errors import RegistryError
from stagereg.kernel.copier import HostCopier
from stagereg.stagers.async_stager import AsyncStager, StateDict
from stagereg.stagers.memory_map import map_memory


class HostStager(AsyncStager):
    """Base of the stagers that copy with the kernel; a subclass chooses the memory by choosing the copier.

    Not for use from several threads at once.

    A forked child, such as a worker of a ``DataLoader``, may call ``stage``, which takes memory of its own.
    The child may read the copies that are held at the fork. It may not if their reader has promised to release them,
    as a ``Checkpointer`` does: reading such a copy ends the child with SIGSEGV.

    Args:
        copier: what copies. The others are options that subclasses have in common, explained here for all of them.
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds that ``stage`` waits at most for a reader that releases its copies (``Checkpointer``), and one
            second at most for any other; then it takes memory beyond the bound, which is logged once.
        threads: threads that copy from host memory, the caller's among them.
        pin: page-lock the memory; None means where an accelerator is available.
    """

    _synchronize_after_execute = False

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    def __getattr__(self, name: str) -> Any:
        if name == "_copier":
            raise RegistryError(f"{type(self).__name__}.__init__ does not call super().__init__(), which it has to.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a complete copy of ``state_dict`` in host memory; blocks until the bytes are there.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), or there is no memory for it.
            StagerClosedError: after ``close()``.
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

        Shapes, strides, shared memory, ``DTensor``, ``ShardedTensor`` and attributes stay as they are, and so does the
        source. Only tensors of floating point with a dimension are changed: a count of steps has none. Other wrappers,
        sparse and quantized tensors, and attributes of tensors are not changed.

        Args:
            state_dict: the argument of ``stage``.
            function: takes the elements of some memory as a tensor of one dimension, and returns a new tensor of as
                many elements, of any dtype. It works element by element, as there may be others between those of views.
            where: takes a tensor and its dotted name, ``"optimizer.state.0.exp_avg"``, and returns whether to change
                the tensor; ``None`` changes all. If it refuses one of several tensors over the same memory, all of them
                stay as they are.

        Raises:
            StagingError: an entry cannot be staged; or the function has written into its argument, or returned a tensor
                of another shape.
        """
        return map_memory(state_dict, function, where)

    def expect_release(self) -> None:
        self._copier.pool.readers_release = True

    def release(self, staged: Any) -> None:
        self._copier.pool.release(staged)

    def close(self) -> None:
        """Free the memory that is kept. Copies still held stay valid. Twice is harmless."""
        self._copier.close()
