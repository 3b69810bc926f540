"""``overlapped``: returns immediately, and copies until the next write while training continues."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.optim.optimizer import Optimizer

from stagereg.base.device_copy import BUFFER_BYTES, await_event
from stagereg.base.forks import RenewedInChild
from stagereg.base.hooks import FREES
from stagereg.errors import StagingError
from stagereg.kernel.copier import HostCopier, PendingCopy
from stagereg.kernel.layout import Region
from stagereg.kernel.memory import Pool
from stagereg.kernel.transfer import COPY_THREADS
from stagereg.registry import register
from stagereg.stagers.async_stager import StateDict
from stagereg.stagers.deferred_copy import CopySplit, DeferredCopy, Pace
from stagereg.stagers.guard import WriteGuard
from stagereg.stagers.host import HostStager
from stagereg.stagers.running_copies import CopyFuture, RunningCopies
from stagereg.stagers.step_observer import Place, StepObserver


@register("stager", "overlapped")
class OverlappedStager(HostStager):
    """Copies parameters and optimizer state in the background, during the next forward and backward passes.

    ``stage`` returns a future immediately. A background thread copies the tensors that only an optimizer writes: its
    parameters that require gradients, and its state. Operations that write or free such tensors first copy what is
    left: an optimizer step, ``load_state_dict`` of a module, and freeing, resizing or sharing a storage. All other
    tensors are copied before ``stage`` returns, such as buffers, weight averages and the state of unknown optimizers.
    An optimizer is known after it has stepped twice since this stager was created, or if it was passed to
    :meth:`watch`.

    Tensors that other code writes between two steps are also copied before ``stage`` returns, if the stager knows them:
    they were passed to :meth:`copy_at_once`, or written between the first steps of their optimizer or during an earlier
    copy.

    If the stager detects a write to the source of a copy, the copy is invalid: the future raises a
    :class:`.WrittenWhileStagedError` that names the entry. If the program does not read the future, the next call
    raises it. The next ``stage`` then copies everything before it returns. The page about checkpoints lists the writes
    that the stager detects. The future completes after the version counters were read while the training thread ran no
    operation: at the next optimizer step, or the next call of the stager on the thread that called ``stage``.
    Otherwise it completes after 0.5 s, or the duration of the copy if longer, without a change.

    Tensors on accelerators are copied on a side stream; the optimizer's stream waits for it, the host does not. Digests
    detect writes to tensors of 256 KiB or more. Smaller tensors, up to 64 MiB of them, are copied on the device before
    ``stage`` returns. Tensors of an optimizer that may be in a CUDA graph (``capturable=True``, unless passed to
    :meth:`watch`) are copied before ``stage`` returns, because replays cannot be detected. SGD is captured without that
    option: create the stager before the capture.

    Args:
        threads: threads that copy before ``stage`` returns, including the caller's thread.
        verify: whether ``stage`` computes a checksum of every byte in host memory, which is compared with the checksum
            of the copy. This reads the whole state. Use it to find unexpected writes.
        device_piece_mib: if given, copies from an accelerator are queued in pieces of about this size (32 to 64), each
            when the previous one is complete. So they delay other copies on the same link less, but take longer.
            ``None``: all at once. The effect on a GPU is not measured.
        device_rate: if given, maximum rate of these copies in GB/s (10^9 bytes). Implies pieces of 64 MiB. An optimizer
            step ends the limit, because it waits for the copies.
    """

    # Bytes. Smaller host regions are copied in ``stage``, because deferring them would cost more.
    _worth_deferring: int = 2**14

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        verify: bool = False,
        device_piece_mib: int | None = None,
        device_rate: float | None = None,
    ) -> None:
        super().__init__(HostCopier(Pool(max_in_flight, wait_s, pin=pin, threads=threads), threads))
        self._verify = verify
        self._pace = _pace(device_piece_mib, device_rate)
        self._copies = RunningCopies()
        self._guard = WriteGuard(self._copies.finish_before_write)
        self._stop_watching_storages = FREES.add(self._copies.finish_before_free)
        self._observer = StepObserver()
        self._renew()
        _stagers.add(self)
        self._split: tuple[object, CopySplit] | None = None  # (values that the split depends on, split)
        self._all_at_once = False  # whether the next ``stage`` copies everything before it returns

    def watch(self, optimizer: Optimizer) -> None:
        """Register an optimizer before its first step, so that its state can be copied after ``stage`` has returned.

        Required for optimizers with ``capturable=True``. Do not register an optimizer whose step was captured in a CUDA
        graph before this stager was created.
        """
        self._guard.watch(optimizer)

    def copy_at_once(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """From now on, copy ``tensors`` before ``stage`` returns. ``None``: all tensors, in the next ``stage`` only.

        Use it for tensors that are written by code that the stager cannot detect. ``tensors`` replaces the tensors of
        the previous call, and keeps them alive. Called on the training thread.
        """
        if tensors is None:
            self._all_at_once = True
        else:
            self._observer.expect(tensors)

    def confirm(self) -> None:
        """Confirm complete copies. Call it while the thread that called ``stage`` runs no operation of torch.

        Does nothing on any other thread.
        """
        self._copies.fence()

    def stage(self, state_dict: StateDict) -> CopyFuture:  # type: ignore[override]
        """Return the future of a complete copy of ``state_dict`` in host memory. Called on the training thread.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), memory cannot be allocated, or an
                earlier copy failed and was not reported yet.
            StagerClosedError: the stager is closed.
        """
        self._copier.pool.check_open()
        self._copies.finish_before_write()
        self._learn()
        self._copies.raise_unseen()
        pending = self._copier.prepare(state_dict)
        with torch.no_grad():
            copy = self._begin(pending)
        self._all_at_once = False
        try:
            future = self._copies.add(copy)
            self._thread.submit(self._copies.run, copy, pending, state_dict)
        except BaseException:  # such as Ctrl-C
            self._copies.drop(copy)
            copy.settle()
            raise
        return future

    def synchronize_staging(self) -> None:
        """Wait until all copies are complete. Raises: the ``StagingError`` of a failed copy, if not reported yet."""
        self._copies.wait()
        self._copies.raise_unseen()

    def close(self) -> None:
        """Complete the copies, stop the thread and free unused memory. Copies in use remain valid. Idempotent.

        Raises:
            StagingError: a copy failed and was not reported yet. Everything is closed nevertheless.
        """
        self._copies.wait()
        self._thread.shutdown(wait=True)
        self._guard.close()
        self._stop_watching_storages()
        self._observer.close()
        super().close()
        self._copies.raise_unseen()

    def _renew(self) -> None:
        """In a forked child, fail incomplete copies and create a new thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{COPY_THREADS}-deferred")
        self._copies.give_up()

    def _begin(self, pending: PendingCopy) -> DeferredCopy:
        """Copy the tensors that must not be deferred, and return a deferred copy of the other tensors."""
        split, engine = self._split_for(pending), self._copier.engine
        events: list[tuple[torch.device, torch.Event]] = []
        try:
            copies = pending.device_copies(split.immediate_remote)
            engine.fetch(copies, events)
            for device, event in events:  # so that later writes to these sources wait for the copies
                torch.accelerator.current_stream(device).wait_event(event)
            pending.copy_packed()
            engine.run(pending.address, split.immediate.pieces(engine.threads), pending).finish()
            return DeferredCopy(pending, split, events, self._verify, self._pace)
        except BaseException:  # queued copies still write to the memory, which is leased again
            for _, event in events:
                await_event(event)
            raise

    def _learn(self) -> None:
        """Record tensors that were written during their copy, so that later calls copy them in ``stage``."""
        found, failed = self._copies.take_touched()
        self._all_at_once |= failed
        owned = _Places(self._guard.owned(self._observer.has_observed)) if found else None
        for place, nbytes in found:
            whole = None if owned is None else owned.around(place, nbytes)
            self._observer.find(*(whole or (place, nbytes)))

    def _split_for(self, pending: PendingCopy) -> CopySplit:
        flags = list(map(torch.Tensor.is_inference, pending.sources))  # inference tensors have no version counter
        inference = {i for i, flag in enumerate(flags) if flag} if True in flags else set[int]()
        owned = {} if self._all_at_once else self._guard.owned(self._observer.has_observed)
        depends_on = pending.layout, owned, dict(self._observer.all_written()), inference
        if self._split is not None and self._split[0] == depends_on:
            return self._split[1]
        places, written = _Places(owned), _Places(depends_on[2])

        def may_defer(region: Region) -> bool:
            members = [pending.sources[i] for i in region.members]
            tensors = [((x.get_device(), x.data_ptr()), x.nbytes) for x in members]
            known = all(places.around(*x) and not written.around(*x) for x in tensors)
            return known and inference.isdisjoint(region.members)

        self._split = depends_on, CopySplit(pending.layout, may_defer, self._worth_deferring)
        return self._split[1]


_stagers = RenewedInChild(OverlappedStager._renew)


def _pace(piece_mib: int | None, gb_per_s: float | None) -> Pace:
    for name, value in (("device_piece_mib", piece_mib), ("device_rate", gb_per_s)):
        if value is not None and not value > 0:
            raise StagingError([], f"stager.{name} must be greater than 0, got {value}")
    if gb_per_s is not None and piece_mib is None:
        piece_mib = BUFFER_BYTES // 2**20
    return Pace(None if piece_mib is None else piece_mib * 2**20, None if gb_per_s is None else gb_per_s * 1e9)


class _Places:
    def __init__(self, runs: Mapping[Place, int]) -> None:
        self._runs, self._starts = runs, sorted(runs)

    def around(self, place: Place, nbytes: int) -> tuple[Place, int] | None:
        """Return the range that contains the ``nbytes`` bytes at ``place``, such as rows of a tensor, or ``None``."""
        at = bisect.bisect_right(self._starts, place) - 1
        if at < 0 or self._starts[at][0] != place[0]:
            return None
        start = self._starts[at]
        return (start, self._runs[start]) if place[1] + nbytes <= start[1] + self._runs[start] else None
