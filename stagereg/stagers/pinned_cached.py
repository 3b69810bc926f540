"""``pinned_cached``: page-locked memory, allocated once and reused when its reader has finished."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager


@register("stager", "pinned_cached")
class PinnedCachedStager(HostStager):
    """Copies into memory that is retained between calls: up to ``max_in_flight`` blocks of the state dict's size.

    The memory is page-locked if an accelerator is available. Otherwise it is pageable and pre-faulted, and one log line
    reports this.
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
