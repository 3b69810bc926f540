"""``blocking``: a new copy in host memory per call, and torch's ``BlockingAsyncStager`` with the same name."""

from __future__ import annotations

from stagereg.kernel.copier import HostCopier
from stagereg.kernel.memory import Pool
from stagereg.registry import register
from stagereg.stagers.host import HostStager


@register("stager", "blocking")
class BlockingStager(HostStager):
    """Copies into newly allocated memory on every call. The memory is not reused."""

    def __init__(self, max_in_flight: int = 2, wait_s: float = 60.0, threads: int = 2) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s, keep=False, pin=False, threads=threads), threads))


class BlockingAsyncStager(HostStager):
    """Has the name and signature of torch's ``BlockingAsyncStager``, but makes no torn copies.

    Differences from torch 2.13: a cached copy that is still being written is never overwritten (new memory is used), a
    changed structure gets a new layout instead of being cast or broadcast, tied weights remain tied, and caching works
    without an accelerator.

    Args:
        cache_staged_state_dict: reuse the memory in the next call, page-locked if an accelerator is available.
        type_check: raise for values that are not a tensor, number, string, bytes, ``BytesIO`` or None. False: deep-copy
            such values.
    """

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        pool = Pool() if cache_staged_state_dict else Pool(max_in_flight=None, keep=False, pin=False)
        super().__init__(HostCopier(pool, type_check=type_check))
