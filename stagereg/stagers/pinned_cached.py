"""``pinned_cached``: page-locked memory, made once and used again as soon as its reader is done."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager


@register("stager", "pinned_cached")
class PinnedCachedStager(HostStager):
    """Copies into memory that is kept between calls: up to ``max_in_flight`` blocks of the size of the state dict.

    The memory is page-locked where an accelerator is there. Otherwise it is pageable and touched ahead of use; one log
    line says so.
    """

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
    ) -> None:
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads)
        super().__init__(HostCopier(pool, threads))
