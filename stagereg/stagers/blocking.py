"""``blocking``: a new host copy per call, and torch's ``BlockingAsyncStager`` under its name."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager


@register("stager", "blocking")
class BlockingStager(HostStager):
    """Copies into newly allocated memory on every call, and does not retain the memory."""

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0, threads: int = 2) -> None:
        pool = Pool(max_in_flight, wait_s, keep=False, pin=False, threads=threads)
        super().__init__(HostCopier(pool, threads))


class BlockingAsyncStager(HostStager):
    """torch's ``BlockingAsyncStager`` in name and signature, without torn copies.

    Differences from torch 2.13, all safer: a cached copy that is still being written is never overwritten (other memory
    is used), a changed structure is planned again instead of cast or broadcast, tied weights remain tied, and caching
    works without an accelerator.

    Args:
        cache_staged_state_dict: retain memory for the next call, page-locked if an accelerator is available.
        type_check: refuse leaves that are not a tensor, number, string, bytes, ``BytesIO`` or None; otherwise such a
            leaf is deep-copied.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        pool = Pool() if cache_staged_state_dict else Pool(max_in_flight=None, keep=False, pin=False)
        super().__init__(HostCopier(pool, type_check=type_check))
