"""The emergency save: when ranks fail, the surviving ranks save the last completed step, if they hold all of its state.

The save does not use the process groups of training, because these are broken. Each surviving rank blocks its
optimizers and reports its last step (:class:`.StepSnapshot`) in the rendezvous store. The first rank that has read all
reports decides which ranks save which step. These ranks create a process group and make a regular checkpoint. Its
manifest names the failed ranks and their missing values. The save does not replace another checkpoint.

If a network is partitioned, the ranks on each side detect a failure of the other side. Only the side that reaches the
rendezvous store saves, because the decision is made there, once. The first rank in the decision commits. This rank
needs the lock of the directory, which rank 0 holds until it terminates; the lock of a failed rank is deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import stagereg.base.rank_failures as rank_failures
import stagereg.base.record as record
import stagereg.checkpoint.state.entries as entries
import stagereg.extensions.recovery.rank_failure as rank_failure
from stagereg.base.option_text import option
from stagereg.checkpoint.extension import CheckpointExtension, Saves, Setup
from stagereg.checkpoint.format.manifest import FileDigest, new_token
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.save.committing import ExchangeCache, write_and_commit
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy, Write
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.keep import Keep
from stagereg.checkpoint.store.lock import LOCK, Owner, StoreLock
from stagereg.checkpoint.targets import ReplicaSave
from stagereg.errors import CheckpointError, is_consequence, name_ranks, reason
from stagereg.extensions.recovery.rank_failure import RankFailure
from stagereg.extensions.recovery.step_snapshot import StepSnapshot

_log = logging.getLogger(__name__)

_SETTLE_S = 1.0  # seconds to wait for an optimizer, or an accelerator, to finish its step
_POLL_INTERVAL_S = 0.05
_ALL = Keep(newest=1 << 62)  # retains every checkpoint


class _SurvivorReport(NamedTuple):
    """The report of a surviving rank: its last step, a digest of its tensors, and why it cannot save."""

    rank: int
    step: int
    kinds: str
    why: str


class _SavePlan(NamedTuple):
    """The decision for all ranks: the steps to try, newest first, with their ranks; or ``why`` no step can be saved."""

    token: str
    tries: list[tuple[int, list[int]]]
    why: str


class EmergencySaver(CheckpointExtension):
    """Records each completed step on this rank, and saves the last step when other ranks fail."""

    name = "emergency saver"

    def __init__(self) -> None:
        self._unnoted = ""
        self._state: Mapping[str, Any] = {}  # the state that the program passed last
        self._publish: Callable[[str, str], object] | None = None  # None if this rank makes no emergency save

    def start(self, setup: Setup, saves: Saves) -> None:
        self._setup, self._saves, self._whole = setup, saves, StepSnapshot(setup.names)
        if setup.stores and setup.ranks.size > 1:
            self._publish = rank_failure.expect(self.save)

    def given(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        if self._publish is None or state is None or self._unnoted:
            return
        try:
            if self._whole.note(step, state):
                self._publish(f"kinds/{self._setup.ranks.rank}", self._whole.kinds)
        except Exception as error:  # the store failed, or the state cannot be saved: the next save reports that
            _log.debug("Cannot record the state of a step.", exc_info=error)
            self._unnoted = f"cannot record the state of a step: {reason(error)}"

    def ending(self, error: BaseException | None) -> None:
        """Wait for the emergency save if a rank failure may have caused ``error``."""
        if error is not None and is_consequence(error):
            rank_failures.response().await_saved()

    def close(self, in_time: bool = True) -> None:
        """Disable the emergency save, and release the state. Idempotent. Called on the training thread."""
        rank_failure.withdraw(self.save)
        self._publish = None
        if self._whole.close():
            self._state = {}

    def save(self, told: RankFailure) -> str:
        """Save with the other surviving ranks. Return a sentence on the outcome. Called once, on a separate thread."""
        store, ranks = told.store, self._setup.ranks
        if ranks.size != told.world_size:
            return ""
        decided = self._decide(told, self._gather(told, self._post(told)))
        outcome = decided.why
        for number, (step, chosen) in enumerate(decided.tries):
            made = _Attempt(told, PrefixStore(f"try/{number}", store), step, chosen, decided.token)
            if told.rank in chosen:
                self._save(made)
            elif told.rank == 0:  # rank 0 has held the lock from the start
                self._setup.store.lock().release()
            saved, outcome = made.outcome()
            if saved is not None:
                self._saves.note_newest(saved)
                with contextlib.suppress(CheckpointError):  # an earlier save that failed is no longer needed
                    self._saves.raise_failure()
                break
        return outcome

    def _post(self, told: RankFailure) -> _SurvivorReport:
        """Block the optimizers, abort saves that wait for failed ranks, and return the report of this rank."""
        why = self._unnoted or self._whole.hold(_SETTLE_S)
        for target in self._saves.targets:
            target.ranks.end(f"{name_ranks(sorted(told.failed()))} failed")
        if not self._saves.ends_by(time.monotonic() + told.timeout_s):
            why = why or "an earlier save is still running"
        step = self._whole.step
        return _SurvivorReport(told.rank, -1 if step is None else step, self._whole.kinds, why)

    def _gather(self, told: RankFailure, own: _SurvivorReport) -> list[_SurvivorReport]:
        """Return the reports of surviving ranks, once all have arrived or the failure detection timeout has passed."""
        told.store.append("posted", json.dumps(own) + "\n")
        ends = time.monotonic() + told.timeout_s
        while True:
            posted = [_SurvivorReport(*json.loads(line)) for line in told.store.get("posted").splitlines()]
            failed = told.failed()
            missing = {*range(told.world_size)} - {each.rank for each in posted} - failed.keys()
            if not missing or time.monotonic() > ends:
                return sorted(each for each in posted if each.rank not in failed)
            time.sleep(_POLL_INTERVAL_S * (1 + told.world_size // 64))

    def _decide(self, told: RankFailure, posted: Sequence[_SurvivorReport]) -> _SavePlan:
        kinds = {each.rank: each.kinds for each in posted}
        for rank in {*range(told.world_size)} - kinds.keys():
            key = f"kinds/{rank}"
            kinds[rank] = json.loads(told.store.get(key)) if told.store.check([key]) else ""
        tries: dict[int, list[int]] = {}
        whys: dict[str, list[int]] = {}
        for each in posted:
            tries.setdefault(each.step, []) if not each.why else None
            (whys.setdefault(each.why, []) if each.why else tries[each.step]).append(each.rank)
        for step, ranks in [*tries.items()]:
            if alone := sorted(rank for rank, each in kinds.items() if each not in {kinds[of] for of in ranks}):
                del tries[step]
                whys["its tensors differ from the tensors of the ranks that hold the step"] = alone
        why = "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in whys.items())
        why = why and f"The surviving ranks have no complete step: {why}."
        own = _SavePlan(new_token(), sorted(tries.items(), reverse=True), why)
        return _SavePlan(*json.loads(told.store.compare_set("decided", "", json.dumps(own))))

    def _save(self, made: _Attempt) -> None:
        """Save with the other ranks of an attempt; the first of these ranks publishes the outcome."""
        try:
            state = self._state
            told, missing = made.told, made.missing(state)
            captured = self._whole.take(told.rank, told.world_size, told.until)
            if made.leads:
                _add_positions(captured, missing, state, made)
                made.begin(self._setup.store, tier=len(self._saves.targets) > 1)
            if made.begun():
                self._write(made, captured, missing)
        except Exception as error:
            _log.debug("An emergency save failed.", exc_info=error)
            if made.leads:
                text = reason(error).removeprefix(f"Step {made.step} was not saved: ")
                made.end(f"The surviving ranks did not save step {made.step}: {text.rstrip('.')}.")

    def _write(self, made: _Attempt, captured: dict[str, Any], missing: dict[str, list[str]]) -> None:
        target = _Target(self._setup, _Survivors(made), made, missing, self._whole)
        request = Request(made.step)
        copy = StagedCopy(request, ReplicaSave())
        copy.put(captured)
        copy.settled.set()
        write = Write(request, copy, target, until=made.told.until)
        began, nbytes = write_and_commit(write, ExchangeCache(target.repeats)) or (0.0, 0)
        record.emit("write", step=made.step, start=began, seconds=record.now() - began, bytes=nbytes, dir=target.where)
        if made.leads and target.committed is not None:
            lacks = (f"; missing from rank {rank}: {', '.join(each) or 'nothing'}" for rank, each in missing.items())
            saved = f"R{name_ranks(made.ranks)[1:]} saved step {made.step}, in {target.committed.path}"
            made.end(f"{saved}{''.join(lacks)}. {made.exact}", made.step)


class _Attempt:
    """An attempt to save one step on ``ranks``, which coordinate through ``store``."""

    def __init__(self, told: RankFailure, store: Any, step: int, ranks: list[int], token: str) -> None:
        self.told, self.store, self.step, self.ranks, self.token = told, store, step, ranks, token
        self.leads = told.rank == ranks[0]
        self.exact = ""  # a sentence on how to resume exactly
        self._lock: StoreLock | None = None

    def missing(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the names of the values that the checkpoint will lack, for each rank that does not save."""
        positions = entries.positions(state)
        marked = [name for name, x in state.items() if isinstance(x, entries.PerRank) and name not in positions]
        others = [rank for rank in range(self.told.world_size) if rank not in self.ranks]
        return {str(rank): ["random numbers", *marked] for rank in others}

    def begin(self, store: CheckpointStore, tier: bool) -> None:
        """Acquire the lock of the checkpoint directory, then signal the other ranks to begin.

        A failed rank may hold the lock, because it still saves, is suspended, or its machine failed. This rank waits
        until a disconnected rank would have terminated, then deletes the lock.
        """
        told = self.told
        while (holder := store.backend.holder()) is not None and holder.process != Owner.ourselves().process:
            left_s = told.until - time.monotonic()
            if left_s < told.timeout_s:
                break  # store.lock() then raises with the name of the holder
            if left_s < 2 * told.timeout_s and told.is_of(holder.process):
                store.backend.delete(f"{store.root}/{LOCK}")  # the holder checks the lock before it commits
            time.sleep(_POLL_INTERVAL_S)
        self._lock = store.lock()
        complete, _ = store.checkpoints()
        exact = next((f"step {each.manifest.step}" for each in complete if not each.manifest.lacks), None)
        sources = [each for each in (exact, tier and "a newer step of the tier") if each]
        instead = f"resumes from {' or '.join(sources)} instead" if sources else "has nothing to resume from"
        exact_only = option("checkpoint.restore.exact", True)
        self.exact = f"A resume from this step is not exact; with {exact_only} the run {instead}."
        if any(each.manifest.step == self.step for each in complete):
            self.end(f"Step {self.step} is saved in {store.root}.", self.step)
        self.store.set("begun", "")

    def begun(self) -> bool:
        """Wait until the attempt has begun; return whether this rank still has to write."""
        self._wait("begun", "outcome")
        return not self.store.check(["outcome"])

    def end(self, outcome: str, saved: int | None = None) -> None:
        """Publish the outcome, unless another rank has published one. Release the lock if ``saved`` is ``None``."""
        if self._lock is not None and saved is None:
            self._lock.release()
        self.store.compare_set("outcome", "", json.dumps([saved, outcome]))

    def outcome(self) -> tuple[int | None, str]:
        self._wait("outcome")
        saved, text = json.loads(self.store.get("outcome"))
        return saved, text

    def _wait(self, *keys: str) -> None:
        while not any(self.store.check([key]) for key in keys):
            if time.monotonic() > self.told.until:
                raise CheckpointError(f"{name_ranks(self.ranks[:1])} did not finish the emergency save in time")
            time.sleep(_POLL_INTERVAL_S)


class _Survivors(RankGroup):
    """The ranks of an attempt, in a new process group."""

    def __init__(self, made: _Attempt) -> None:
        self.limit = datetime.timedelta(seconds=max(1.0, made.told.until - time.monotonic()))
        self.numbers, self.rank, self.size = made.ranks, made.ranks.index(made.told.rank), len(made.ranks)
        self.group, self._store, self._why = None, made.store, ""
        if self.size > 1:
            known, everyone = dist.distributed_c10d._world.pg_map, dist.distributed_c10d._get_default_group()
            known[everyone] = (known[everyone][0], made.store)  # new_group() uses this store
            self.group = dist.new_group(made.ranks, timeout=self.limit, backend="gloo", use_local_synchronization=True)


class _Target(StoreTarget):
    """The checkpoint directory as the target of the emergency save, which does not delete other checkpoints."""

    def __init__(
        self, setup: Setup, ranks: RankGroup, made: _Attempt, missing: dict[str, list[str]], whole: StepSnapshot
    ) -> None:
        fields = {"world_size": made.told.world_size, "lost": missing}
        super().__init__(setup.store, _ALL, setup.storage, ranks, made.token, fields=[lambda step: fields])
        self._whole = whole

    def marks(self, path: str, results: Sequence[Any]) -> dict[str, FileDigest]:
        self._whole.expect_unchanged()
        return super().marks(path, results)


def _add_positions(
    saved: dict[str, Any], missing: dict[str, list[str]], state: Mapping[str, Any], made: _Attempt
) -> None:
    """Add the data loader states of the ranks that do not save, reconstructed from the state of this rank."""
    own, size = made.told.rank, made.told.world_size
    for name in entries.positions(state):
        follow: Callable[..., Any] = getattr(entries.value_of(state, name), "of_other_rank", lambda *_: None)
        for rank, lacks in missing.items():
            found = follow(saved[entries.rank_name(name, own)], own, int(rank), size)
            if found is None:
                raise CheckpointError(f"the state of rank {rank} in {name!r} cannot be reconstructed from other ranks")
            saved[entries.rank_name(name, int(rank))], sure = found
            is_exact = sure and not isinstance(state[name], entries.PerRank)  # data positions may differ between ranks
            lacks += [] if is_exact else [f"an exact position of {name}"]
