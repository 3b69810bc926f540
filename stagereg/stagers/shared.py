"""``shared``: memory that a writer in another process reads where it lies."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager
from stagereg.stagers.shared_memory import SharedBlock, register_reducers


@register("stager", "shared")
class SharedStager(HostStager):
    """Copies into shared memory that is kept between calls: up to ``max_in_flight`` blocks of the state dict's size.

    A block is one file in memory, so a copy costs one file descriptor however many tensors it has. Copies go through
    ``multiprocessing`` and torch's checkpoint process (``AsyncCheckpointerType.PROCESS``) without their bytes being
    copied, and a block is not used again while a process reads it; a reader that died is not waited for. Readers are
    processes of the same user on the same machine; a ``Checkpointer`` reads them in its own. Linux only.

    A process forked from this one sees the blocks themselves: it may use copies made before only as long as this
    process holds them.

    The first one registers reducers with ``multiprocessing``, see :func:`.shared_memory.register_reducers`.
    """

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        reserve_gb: float = 0.0,
        type_check: bool = False,
    ) -> None:
        register_reducers()
        reserve = int(reserve_gb * 2**30)
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads, reserve=reserve, make=SharedBlock)
        super().__init__(HostCopier(pool, threads, type_check))
