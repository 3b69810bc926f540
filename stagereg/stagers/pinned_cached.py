"""``pinned_cached``: page-locked memory, made once and used again as soon as its reader is done."""

from __future__ import annotations

from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.bounded import copier_within
from stagereg.stagers.host import HostStager

__all__ = ["PinnedCachedStager"]


@register("stager", "pinned_cached")
class PinnedCachedStager(HostStager):
    """Copies into memory that is kept between calls: up to ``max_in_flight`` blocks of the size of the state dict.

    The memory is page-locked where an accelerator is there. Otherwise it is pageable and touched ahead of use; one log
    line says so.

    Args:
        max_in_flight: copies that may be held by writers at once before ``stage`` waits for one to be dropped.
        wait_s: seconds that ``stage`` waits at most for a reader that releases its copies (``Checkpointer``), and one
            second at most for any other; then it takes memory beyond the bound, which is logged once.
        threads: threads that copy from host memory, the caller's among them.
        pin: page-lock the memory; None means where an accelerator is available.
        reserve_gb: GiB of memory to get ready at once, in the background, so that the first ``stage`` is as quick as
            the next ones; the size of the state dict is a good choice. 0 waits until the size is known.
        host_memory_gb: GiB of host memory for all copies together; None for no bound. Of a state that needs more, the
            largest tensors are handed out as they are, on their device, and ``synchronize_staging`` waits until the
            writer has read them. A reader that does not release its copies gets memory beyond the bound instead.
        type_check: refuse leaves that are no tensor, number, string, bytes, ``BytesIO`` or None; otherwise such a leaf
            is deep-copied.
    """

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        reserve_gb: float = 0.0,
        host_memory_gb: float | None = None,
        type_check: bool = False,
    ) -> None:
        reserve = int(reserve_gb * 2**30)
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads, reserve=reserve)
        super().__init__(copier_within(host_memory_gb, pool, threads, type_check))
