"""``overlapped``: returns at once and copies while training continues, until the next write is about to happen."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.optim.optimizer import Optimizer

from stagereg.base.forks import RenewedInChild
from stagereg.base.hooks import FREES
from stagereg.kernel.copier import HostCopier, PendingCopy
from stagereg.kernel.layout import Region
from stagereg.kernel.memory import Pool
from stagereg.kernel.transfer import COPY_THREADS
from stagereg.registry import register
from stagereg.stagers.async_stager import StateDict
from stagereg.stagers.deferred_copy import CopySplit, DeferredCopy
from stagereg.stagers.guard import WriteGuard
from stagereg.stagers.host import HostStager
from stagereg.stagers.running_copies import CopyFuture, RunningCopies
from stagereg.stagers.step_observer import Place, StepObserver


@register("stager", "overlapped")
class OverlappedStager(HostStager):
    """Copies parameters and optimizer state in the background, during the next forward and backward passes.

    ``stage`` returns a future right away. A background thread copies the tensors that only a torch optimizer writes:
    its parameters that require gradients, and its state. Just before an optimizer steps, a module loads a state dict,
    or a storage is freed, resized or moved to shared memory, the thread that is about to do so copies the rest first.
    Everything else is copied before ``stage`` returns, such as buffers, averages of the weights and the state of
    unknown optimizers. An optimizer is known once it has stepped twice since this stager was made, or has been given to
    :meth:`watch`.

    Tensors that something writes between two steps are copied before ``stage`` returns too, once they are known:
    :meth:`copy_at_once` was given them, or they were written between the first steps of their optimizer, or while an
    earlier copy was under way.

    A copy is never handed out as good if the stager finds a write to its source: the future, or otherwise the next
    call, raises a :class:`.WrittenWhileStagedError` that names the entry, and the next ``stage`` copies everything at
    once. The page about checkpoints lists the writes that the stager finds. The future is done when the version
    counters have been read at a moment without an operation of the training thread: the next step of an optimizer, the
    next call of the stager on the thread that called ``stage``, or otherwise 0.5 s, or as long as the copy has taken,
    without a change.

    Tensors on accelerators are copied on a side stream; the stream of the optimizer waits for it, the host does not.
    Digests find writes to tensors of 256 KiB or more. Smaller tensors, up to 64 MiB of them, are copied on the device
    before ``stage`` returns. Tensors of an optimizer that may be in a CUDA graph (``capturable=True``, unless given to
    :meth:`watch`) are copied at once, since nothing announces a replay. SGD is captured without that option: make the
    stager before the capture.

    Args:
        threads: threads that copy what is copied at once, the caller's among them.
        verify: compare a checksum of every byte in host memory, taken in ``stage``, with the checksum of the copy.
            ``stage`` then reads the whole state: a mode to find unforeseen writes.
    """

    # Bytes; smaller regions in host memory are copied at once, which costs less than a deferred copy of them.
    _worth_deferring: int = 2**14

    def __init__(
        self,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        verify: bool = False,
    ) -> None:
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads)
        super().__init__(HostCopier(pool, threads))
        self._verify = verify
        self._copies = RunningCopies()
        self._guard = WriteGuard(self._copies.finish_before_write)
        self._stop_watching_storages = FREES.add(self._copies.finish_before_free)
        self._observer = StepObserver()
        self._renew()
        _stagers.add(self)
        self._split: tuple[object, CopySplit] | None = None  # with the values that it depends on
        self._all_at_once = False  # in the next ``stage``

    def watch(self, optimizer: Optimizer) -> None:
        """Take notice of an optimizer before its first step, so that its state need not be copied at once.

        One with ``capturable=True`` is not known without this. Not for one whose step was captured in a CUDA graph
        before this stager was made.
        """
        self._guard.watch(optimizer)

    def copy_at_once(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """Copy tensors before ``stage`` returns from now on; with ``None``, copy everything so in the next ``stage``.

        For tensors that are written without an announcement. The tensors replace those of the call before, and are
        held. Called on the training thread.
        """
        if tensors is None:
            self._all_at_once = True
        else:
            self._observer.expect(tensors)

    def confirm(self) -> None:
        """Confirm the copies that are complete; the thread that called ``stage`` runs no operation of torch now.

        On any other thread it does nothing.
        """
        self._copies.fence()

    def stage(self, state_dict: StateDict) -> CopyFuture:  # type: ignore[override]
        """Return the future of a complete copy of ``state_dict`` in host memory. Called on the training thread.

        Raises:
            StagingError: an entry cannot be staged (the message has its path), there is no memory for it, or an earlier
                copy failed and was not reported yet.
            StagerClosedError: after ``close()``.
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
        except BaseException:  # such as a Ctrl-C
            self._copies.drop(copy)
            raise
        return future

    def synchronize_staging(self) -> None:
        """Wait until every copy so far is complete. Raises: ``StagingError`` if one failed and was not reported yet."""
        self._copies.wait()
        self._copies.raise_unseen()

    def close(self) -> None:
        """Complete the copies, end the thread and free the memory that is kept. Copies still held stay valid.

        Twice is harmless.

        Raises:
            StagingError: a copy failed and was not reported yet; everything is closed nevertheless.
        """
        self._copies.wait()
        self._thread.shutdown(wait=True)
        self._guard.close()
        self._stop_watching_storages()
        self._observer.close()
        super().close()
        self._copies.raise_unseen()

    def _renew(self) -> None:
        """Give up the copies that are not complete, and the thread, which a forked child does not have."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{COPY_THREADS}-deferred")
        self._copies.give_up()

    def _begin(self, pending: PendingCopy) -> DeferredCopy:
        """Copy what cannot wait, and return the rest as work to be done."""
        split, engine = self._split_for(pending), self._copier.engine
        events = engine.fetch(pending.pairs(split.immediate_remote, pending.layout.packed))
        for device, event in events:  # whatever writes them next is queued on this stream
            torch.accelerator.current_stream(device).wait_event(event)
        engine.run(pending.address, split.immediate.pieces(engine.threads), pending).finish()
        return DeferredCopy(pending, split, events, self._verify)

    def _learn(self) -> None:
        """Have the tensors that were written while they were copied be copied at once from now on."""
        found, failed = self._copies.take_touched()
        self._all_at_once |= failed
        owned = _Places(self._guard.owned(self._observer.has_observed)) if found else None
        for place, nbytes in found:
            whole = None if owned is None else owned.around(place, nbytes)
            self._observer.find(*(whole or (place, nbytes)))

    def _split_for(self, pending: PendingCopy) -> CopySplit:
        flags = list(map(torch.Tensor.is_inference, pending.sources))  # these have no version counter
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


class _Places:
    """Runs of memory, given by their places and bytes."""

    def __init__(self, runs: Mapping[Place, int]) -> None:
        self._runs, self._starts = runs, sorted(runs)

    def around(self, place: Place, nbytes: int) -> tuple[Place, int] | None:
        """Return the run that has all of some bytes, which may be rows of a tensor; ``None`` if there is none."""
        at = bisect.bisect_right(self._starts, place) - 1
        if at < 0 or self._starts[at][0] != place[0]:
            return None
        start = self._starts[at]
        return (start, self._runs[start]) if place[1] + nbytes <= start[1] + self._runs[start] else None
