"""Makes all ranks save and exit at the same step after a signal to any rank (:class:`PreemptionConsensus`).

About once a second, the training threads exchange their signals. A call of ``due`` begins an all-reduce, and the next
call reads its result, so no rank waits while the ranks train in lockstep. The exchange includes the slowest rank's time
per step, which determines the number of calls until the next exchange. Therefore all ranks begin and read an exchange
in the same calls, and agree on a signal at the same step. The exchange also includes each rank's computing time per
step, so that rank 0 can report slow ranks (:mod:`.stragglers`). A rank without data in a join takes part through
:class:`.OperationLog`. If a rank does not take part, the other ranks wait for a bounded time and stop exchanging.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import signal
import weakref
from collections.abc import Callable, Sequence

import stagereg.base.rank_failures as rank_failures
import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
from stagereg.base.option_text import option
from stagereg.base.signals import SIGNALS
from stagereg.checkpoint.extension import CheckpointExtension, Due, Saves, Setup
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog
from stagereg.errors import RESUME_CODE, CheckpointError, Preempted, Stopped, reason
from stagereg.extensions.preemption.signals import PreemptionHandler
from stagereg.extensions.preemption.stragglers import BusyClock, Stragglers
from stagereg.kernel.broken import is_lost_connection
from stagereg.launch.exits import torchrun_note

_log = logging.getLogger(__name__)

_EVERY_S = 1.0  # seconds between exchanges
_MOST_CALLS = 64  # maximum calls of due() between exchanges, because steps may become slower than measured
_PATIENCE_S = 60.0  # seconds to wait for ranks that have not begun an exchange


class PreemptionConsensus(CheckpointExtension):
    """Decides when the ranks save and exit. Used on the training thread. Handles signals from ``start`` to ``close``.

    ``grace_period``: time from a signal until the process must exit.
    """

    name = "preemption"
    _handler: PreemptionHandler
    _ranks: RankGroup  # has a separate process group, which runs no other collectives
    _requests: OperationLog

    def __init__(self, grace_period: datetime.timedelta) -> None:
        self.agreed: signal.Signals | None = None  # the signal after which all ranks exit; set at the same step
        self.started = False
        self._grace_s = grace_period.total_seconds()
        self._exchanging = True
        self._asked: int | None = None
        self._calls = 0  # calls since the last exchange began
        self._next = 1
        self._pending: Callable[[float], list[float]] | None = None

    def start(self, setup: Setup, saves: Saves) -> None:
        self._dir, self._ranks = str(setup.dir), RankGroup(setup.process_group)
        self._requests = OperationLog(setup.training, f"checkpoint/{setup.token}/signals")
        # A bound method would keep a deleted checkpointer's saves alive.
        self._handler = PreemptionHandler(self._grace_s, lambda: saves.describe_newest())
        self._handler.listen()
        weakref.finalize(self, self._handler.close)
        self._since, self._busy, self._stragglers = record.now(), BusyClock(), Stragglers(self._ranks.machine_of)
        self.started = True

    def urges(self) -> bool:
        return self.started and any(self.signal_flags())

    def signal_flags(self) -> list[float]:
        """Return this rank's flags: for each of ``SIGNALS``, 1 if this rank has received it, otherwise 0."""
        return [float(self._handler.received == each) for each in SIGNALS]

    def _update(self, flags: Sequence[float]) -> None:
        """Apply the flags of all ranks (sums or maxima), which are identical on all ranks at the same step."""
        for number, signalled in zip(SIGNALS, flags, strict=True):
            if signalled > 0 and self.agreed is None:
                self.agreed = number
                self._handler.reports = self._ranks.rank == 0
                self._handler.start_grace(number)
                if self._handler.reports:
                    _log.info("stagereg: received %s: all ranks save this step and exit.", number.name)

    def due(self, step: int) -> Due:
        """Return whether the ranks exit after ``step``. Never raises. Waits for a bounded time. Collective."""
        self._asked = step
        if self.agreed is None and self._exchanging:
            if self._ranks.size == 1:
                self._update(self.signal_flags())
            else:
                self._exchange()
        return Due.NO if self.agreed is None else Due.LEAVE

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        """Exit together with the other ranks, after waiting for them within the grace period. Collective.

        Raises: ``Preempted`` if ``step`` is saved, otherwise ``Stopped``. Returns if no signal has arrived.
        """
        if self.agreed is None:
            return
        if failure is None:
            self._handler.set_saved()
        if self._ranks.size > 1:
            # A peer that exits seconds later would treat the exit of this rank as a failure.
            with contextlib.suppress(CheckpointError, RuntimeError):
                # The same size as an exchange: gloo aborts a process if collectives of different sizes meet.
                self._ranks.max_async(self._sent())()
        if failure is None:
            exception: SystemExit = Preempted(step, self._dir, self.agreed)
        else:
            exception = Stopped(self.agreed, reason(failure))
        shutdown.set_exit_code(128 + self.agreed if failure is not None else RESUME_CODE)
        if self._ranks.rank == 0 and not record.is_recording():  # otherwise stagereg.main prints how to resume
            other = failure is None and resume not in (None, "auto", "latest")  # repeating the command would not resume
            how = f" To resume, start the run with {option('checkpoint.resume', 'auto')}." * other
            how += torchrun_note() if failure is None else ""
            _log.warning("stagereg: %s.%s", str(exception).rstrip("."), how)
        raise exception from failure

    def follow(self, over: bool) -> None:
        if self.agreed is None and self._exchanging:
            try:
                self._read_exchange()
                while self._requests.take_next() is not None:
                    self._begin_exchange()
                    self._read_exchange()
            except (CheckpointError, RuntimeError) as error:
                self._give_up(error)
        if over:  # only ranks in the loop have made calls, so all ranks count again from 0
            self._calls, self._since = 0, record.now()

    def idle(self) -> None:
        if self._requests.take_missed() is not None:
            self._begin_exchange()

    def close(self, in_time: bool = True) -> None:
        """Stop exchanging and handling signals on this rank. Idempotent."""
        self._exchanging = False
        if self.started:
            self._handler.close()

    def _exchange(self) -> None:
        self._calls += 1
        try:
            self._read_exchange()
            if self.agreed is None and self._calls >= self._next:
                self._requests.post()
                self._begin_exchange()
        except (CheckpointError, RuntimeError) as error:
            self._give_up(error)

    def _begin_exchange(self) -> None:
        now = record.now()
        busy_s, calls = self._busy.lap(), self._calls
        sent = self._sent((now - self._since) / calls, busy_s / calls) if calls else self._sent()
        self._since, self._calls = now, 0
        self._pending = self._ranks.max_async(sent)

    def _sent(self, step_s: float = 0.0, busy_s: float = 0.0) -> list[float]:
        """Return the values that this rank sends: its flags, its time per step, and its computing time per step."""
        own = [0.0] * self._ranks.size
        own[self._ranks.rank] = busy_s
        return [*self.signal_flags(), step_s, *own]

    def _read_exchange(self) -> None:
        if self._pending is not None:
            found = self._pending(_PATIENCE_S)
            signalled, (step_s, *busy_s) = found[: len(SIGNALS)], found[len(SIGNALS) :]
            self._pending = None
            self._update(signalled)
            if self._ranks.rank == 0:
                with self._ranks.naming():
                    self._stragglers.add(self._asked or 0, record.now(), step_s, busy_s)
            self._next = max(1, min(_MOST_CALLS, round(_EVERY_S / step_s))) if step_s > 0 else 1

    def _give_up(self, error: Exception) -> None:
        if rank_failures.response().is_expected() and is_lost_connection(error):
            self._exchanging = False  # keep the handler: a launcher's SIGTERM must not interrupt the emergency save
            return
        self.close()
        _log.warning(
            "stagereg: The ranks could not exchange signals: %s. From now on, SIGTERM and SIGUSR1 terminate a rank "
            "without a save. Call maybe_save or should_save on all ranks in each step.",
            str(error).partition("\n")[0],
        )
