"""Ranks that stay: with ``keep_ranks=true`` a failure of one rank does not end the processes of the others.

A rank that nothing is wrong with saves what is left, as ever, has whatever its training thread waits for fail, lets go
of the process group, and looks whether something of the run is left (:mod:`.leftovers`). Then it tells the launcher, by
the store of the attempt, that it is ready, or why it is not and ends. The launcher waits for all a bounded time, ends
those that cannot stay, and tells the others how the next attempt begins; with it they call the program again.

Keys of an attempt: ``over``, once it has failed, with the ranks that are known to be lost; ``returned/RANK``, why that
rank cannot stay, empty if it can; ``next/RANK``, the variables of the next attempt, and whether it resumes by itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import stagereg.shutdown as shutdown
from stagereg.errors import LaunchError, PeerFailedError, name_ranks
from stagereg.launch.local_ranks import LocalRanks
from stagereg.launch.run_store import GATHER_S, RunStore, await_report

if TYPE_CHECKING:
    from stagereg.launch.leftovers import Baseline

_BACK_S, _LEFT_S = 5.0, 10.0
"""Seconds that the training thread has to come back from the program, once what it waits for has failed; and to let go
of what belongs to the attempt."""
LEAVE_S = _BACK_S + _LEFT_S
_HEARD_S = 5.0
"""Seconds in which a rank hears of the failure elsewhere that it has run into."""
_LOOK_S = 0.02
_OVER = "over"


class Leaving:
    """How one rank leaves one attempt, if that fails.

    Attributes:
        began: the attempt has failed, on this rank or another one.
        freed: what the training thread waits for is to fail.
        threads: of this package, which end with it.
    """

    def __init__(self, store: RunStore, rank: int) -> None:
        global _of_process
        _of_process = self
        self.began, self.threads = threading.Event(), list[threading.Thread]()
        self._store, self._rank = store, rank
        self.freed, self._back, self._left = threading.Event(), threading.Event(), threading.Event()
        self._breaking, self._decided = threading.Lock(), threading.Lock()
        self._groups: list[weakref.ref[Any]] = []

    def listen(self, leave: Callable[[], None]) -> None:
        """Call ``leave``, on a thread, once another rank or the launcher says that the attempt has failed."""

        def wait() -> None:
            with contextlib.suppress(RuntimeError):  # of the store, which is gone
                await_report(self._store, _OVER)
                leave()

        self.start(wait)

    def start(self, work: Callable[[], None]) -> None:
        """Do something on a thread that ends with the attempt."""
        thread = threading.Thread(target=work, name="stagereg-leaving", daemon=True)
        self.threads.append(thread)
        thread.start()

    def begin(self) -> None:
        """The attempt has failed: tell the others, and the launcher."""
        self.began.set()
        with contextlib.suppress(RuntimeError):
            self._store.set(_OVER, sorted(self._store.lost_ranks()))

    def expects(self, consequence: bool) -> bool:
        """Whether an error on this rank comes of a failure elsewhere, which may still have to be heard of."""
        return self.began.wait(_HEARD_S if consequence else 0.0)

    def free(self) -> None:
        """Have what the training thread waits for fail, and end this process if it does not come back in time."""
        self._store.give_time(LEAVE_S)
        self.freed.set()
        with self._breaking:
            if not self._back.is_set():
                _abort_groups()
        if not self._back.wait(_BACK_S):
            self._end(f"its function had not returned {_BACK_S:g} s after the failure")
        if not self._left.wait(_LEFT_S):
            self._end(f"it had not let go of the run {_LEFT_S:g} s after its function had returned")

    def come_back(self) -> None:
        """On the training thread: the program has returned, and the process group is about to be destroyed."""
        with self._breaking:
            self._back.set()
        self._groups = [weakref.ref(group) for group in _groups()]

    def let_go(self, baseline: Baseline) -> dict[str, Any]:
        """Say that this process stays, and return what the launcher says of the next attempt; else end the process."""
        self._store.leave()
        why = baseline.find_left(self._groups, self.threads)
        self._left.set()
        if why:
            self._end(why)
        if not self._decided.acquire(blocking=False):
            threading.Event().wait()  # for the end of this process
        self._store.set(f"returned/{self._rank}", "")
        ends = time.monotonic() + GATHER_S
        while (following := self._store.get(f"next/{self._rank}")) is None:
            if time.monotonic() > ends:
                shutdown.exit_now(1)
            time.sleep(_LOOK_S)
        return dict(following)

    def _end(self, why: str) -> NoReturn:
        if self._decided.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"returned/{self._rank}", why)
        self._store.leave()
        shutdown.exit_now(1)


# Global because a process is one rank, and an optimizer that is to wait knows no run.
_of_process: Leaving | None = None


def await_leave() -> NoReturn:
    """Wait until this process ends, or its rank has to leave the attempt: then this raises ``PeerFailedError``."""
    if _of_process is None:
        threading.Event().wait()
    else:
        _of_process.freed.wait()
    raise PeerFailedError("Other ranks are lost, so this one does not go on.")


class Kept:
    """On the launcher: which of its ranks stay after an attempt.

    Attributes:
        wanted: whether any are to.
        ranks: those that do, after the last one.
        again: whether some had stayed before it.
        refused: why others do not, which have not failed themselves.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.ranks: list[int] = []
        self.again = False
        self.refused: dict[int, str] = {}

    def is_over(self, run: RunStore) -> bool:
        """Whether a rank says that the attempt has failed."""
        return self.wanted and run.get(_OVER) is not None

    def settle(self, run: RunStore, local: LocalRanks, limit_s: float) -> None:
        """Wait, at most so long, until each rank has come back, has ended, or is known to be lost."""
        if not self.is_over(run):
            run.set(_OVER, [])
        lost, said = run.get(_OVER), dict[int, str]()

        def is_awaited(rank: int) -> bool:
            if rank not in said and (why := run.get(f"returned/{rank}")) is not None:
                said[rank] = why
            return rank not in said and rank not in lost

        late = local.wait_for_rest(limit_s, is_awaited)
        self.again = bool(self.ranks)
        self.ranks = sorted(rank for rank, why in said.items() if not why)
        self.refused = {rank: why for rank, why in said.items() if why}
        self.refused |= dict.fromkeys(late, f"it has not come back in {limit_s:g} s")

    def refuse_all(self) -> None:
        """Have none stay: it may be since some did that the attempt has come to nothing."""
        self.refused |= dict.fromkeys(self.ranks, "the run had got no further since ranks were kept")
        self.ranks = []

    def tell(self, run: RunStore, variables: dict[str, str], resumes: bool) -> None:
        """Have those that stay begin the next attempt, with these variables more."""
        for rank in self.ranks:
            run.set(f"next/{rank}", {"variables": variables, "resumes": resumes})

    def __str__(self) -> str:
        stay = f"; {name_ranks(self.ranks)} stay{'s' * (len(self.ranks) == 1)}" if self.ranks else ""
        return stay + "".join(f"\nrank {rank} could not be kept: {why}" for rank, why in sorted(self.refused.items()))


def keeps_ranks(cfg: Any) -> bool:
    """Whether ranks are to stay. Raises ``LaunchError`` if the config says neither yes nor no."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(cfg, "keep_ranks", default=False)
    if not isinstance(value, bool):
        raise LaunchError(f"keep_ranks={value} says neither true nor false")
    return value and bool(OmegaConf.select(cfg, "restarts", default=0))


def _abort_groups() -> None:
    from stagereg.join.broken import abort

    for group in _groups():
        abort(group)


def _groups() -> list[Any]:
    import torch.distributed as dist

    return [*dist.distributed_c10d._world.pg_map]
