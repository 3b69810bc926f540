"""``pinned_cached``: copies into page-locked memory, which is allocated once and reused after its reader is done."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager


@register("stager", "pinned_cached")
class PinnedCachedStager(HostStager):
    """Copies into memory that is reused in later calls: up to ``max_in_flight`` blocks of the size of the state dict.

    The memory is page-locked if an accelerator is available. Otherwise it is pageable and pre-faulted (logged once).
    """

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0, threads: int = 2, pin: bool | None = None) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s, pin=pin, threads=threads), threads))
