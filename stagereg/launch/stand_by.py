"""The stand-by store: where those who are left meet when the store of their run is gone with its machine.

Rank 0 opens one if the store is not on its machine, the last rank if it is not on that one: so each run on several
machines has one, on another machine than the store. All ranks are connected to it from the start, and what they report
they report there too.

Whoever is there may be cut off from others. So they go on only if they are at least half of all ranks: the smaller
side of a network that is cut never does. Of two equal sides, and where others have the store of the run, both may: who
may write is then decided by the lock of what they write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import timedelta
from typing import Any

from stagereg.address import is_here, own_address
from stagereg.errors import LaunchError

_GATHER = timedelta(seconds=600)
_ANSWER = timedelta(seconds=10)
_LOOK_S = 0.02


class StandBy:
    """That of one run, for one rank; constructing it waits for the first rank and the last one.

    Attributes:
        store: torch's, connected; ``None`` where the run has one machine, or it cannot be reached.
    """

    def __init__(self, run: Any, rank: int, world_size: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.store: Any = None
        self._least, self._server = (world_size + 1) // 2, None
        keys = ["stand-by/0", f"stand-by/{world_size - 1}"]
        if (own := f"stand-by/{rank}") in keys:
            at = None
            with contextlib.suppress(RuntimeError):
                if not is_here(os.environ.get("MASTER_ADDR", "localhost")):
                    host = own_address()
                    self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_ANSWER)
                    at = host, self._server.port
            run.set(own, json.dumps(at))
        run.wait(keys, _GATHER)
        if at := next(filter(None, (json.loads(run.get(key)) for key in keys)), None):
            with contextlib.suppress(RuntimeError):
                self.store = TCPStore(at[0], at[1], is_master=False, wait_for_workers=False, timeout=_ANSWER)

    def set(self, key: str, value: str) -> None:
        """Report ``value`` there too, if that can be done."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(key, value)

    def meet(self, limit_s: float, why: str) -> Any:
        """Return the store once half of all ranks have come; each calls this once, since ``why``.

        Raises ``LaunchError`` if they have not in so many seconds; ``RuntimeError`` if this store is gone too.
        """
        until, there = time.monotonic() + limit_s, self.store.add("here", 1)
        while there < self._least:
            if time.monotonic() > until:
                raise LaunchError(f"{why}, and fewer than half of the ranks have come to the stand-by one.")
            time.sleep(_LOOK_S)
            there = self.store.add("here", 0)
        return self.store
