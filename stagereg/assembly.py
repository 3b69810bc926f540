"""Builds ``stagereg.Checkpointer`` from the core and the installed extensions.

Only this module refers to extensions for a checkpointer. Extensions that are not installed are left out. If an option
requires a missing extension, the constructor raises an error that contains the name of the missing package.
"""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

import stagereg.checkpoint.checkpointer as core
import stagereg.checkpoint.options as options
from stagereg.base.option_text import choice, constructed, option
from stagereg.base.providers import has, needs
from stagereg.base.spec import suggests_arguments
from stagereg.checkpoint.options import Failure, Restore, expect_duration, expect_flag
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.keep import Keep, KeepRule
from stagereg.checkpoint.store.open_store import path_or_url
from stagereg.checkpoint.targets import Schedule
from stagereg.config.no_tier import NoTier
from stagereg.errors import ConfigError, at_least
from stagereg.registry import register
from stagereg.stagers.async_stager import AsyncStager

if TYPE_CHECKING:
    from stagereg.extensions.preemption.consensus import PreemptionConsensus
if TYPE_CHECKING or has("tiers"):
    from stagereg.extensions.tiers.tier import Tier
else:
    Tier = Any


@dataclass(frozen=True)
class Replicas:
    """How ranks save replicated parameters and optimizer state.

    Args:
        share: whether each rank writes one shard of the replicated tensors, and stages only this shard after the first
            save is complete. With False, all ranks stage all tensors, and the lowest rank writes them.
        verify_every: N: compare checksums of the replicas in every N-th save, and fail the save if they differ. These
            saves stage all tensors. 0: compare only in the first save.

    Raises:
        ConfigError: a value is invalid.
    """

    share: bool = True
    verify_every: int = 0

    def __post_init__(self) -> None:
        expect_flag("replicas.share", self.share)
        at_least(0, option("checkpoint.replicas.verify_every"), self.verify_every)


@dataclass(frozen=True)
class Preemption:
    """How a run reacts to SIGTERM and SIGUSR1.

    Args:
        grace_period: the time in which the ranks agree on a step, save it and exit after SIGTERM or SIGUSR1. With
            ``None``, the run does not handle these signals.

    Raises:
        ConfigError: a value is invalid.
    """

    grace_period: datetime.timedelta | None = datetime.timedelta(seconds=25)

    def __post_init__(self) -> None:
        if self.grace_period is not None:
            expect_duration("preemption.grace_period", self.grace_period)


@dataclass(frozen=True)
class Prove:
    """The record of steps with which ``stagereg prove`` checks whether a resumed run continues like this run.

    Args:
        steps: for this number of steps after each save, record digests of the batches, random numbers, gradients,
            parameters, buffers, optimizer state and schedules of each rank. 0: record nothing.

    Raises:
        ConfigError: a value is invalid.
    """

    steps: int = 0

    def __post_init__(self) -> None:
        at_least(0, option("checkpoint.prove.steps"), self.steps)


@register("checkpoint", "default")
class Checkpointer(core.Checkpointer):
    """Saves the state of a training run without stopping it, and restores the run.

    Every rank constructs a checkpointer and calls the same methods with the same steps and names. Without an
    initialised ``torch.distributed``, a process is a run of one rank. A checkpoint is complete or absent: a crash at
    any time leaves earlier checkpoints unchanged. Only one run at a time can save in a directory. The first call of
    :meth:`maybe_save`, :meth:`should_save` or :meth:`save` locks the directory. :meth:`restore` also locks it if a run
    with this run's command line saved the newest checkpoint. A program that calls none of these methods only reads, and
    may run during training.

    A state is a dict of names to objects with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers),
    lists and dicts of such objects, or plain values (numbers, text, tensors, nested dicts and lists). The modules of an
    optimizer must be in the same state. :func:`stagereg.per_rank` marks a value that differs between ranks. The step
    and each rank's random number generators are added. docs/guarantees.md has the rules for several ranks.

    Args:
        dir: the checkpoint directory, a path or a URL; created if it does not exist. All machines must see the same
            directory. ``None`` if ``tier`` alone keeps checkpoints.
        every: ``maybe_save`` saves at multiples of this number of steps, at least 1. ``"auto"`` chooses the number that
            loses the least time to checkpoints and failures, from the measured cost of saves and ``failure.mtbf``.
        keep: the number of newest checkpoints to retain, at least 1, or a rule: :class:`stagereg.Keep` or a component
            of the kind ``keep``. The disk needs space for one more checkpoint, because an old checkpoint is deleted
            only after the new one is complete.
        resume: the checkpoint that ``restore`` loads. ``"auto"``: the newest valid checkpoint, if one exists;
            ``"never"``: no checkpoint; ``"latest"``: the newest checkpoint, which must exist; or the path of a
            checkpoint, which plain torch may have written. A bare name is looked up in ``dir``, then ``.``.
        stager: the stager that copies the state: an object or its name, ``None`` for ``overlapped``. :meth:`close`
            closes it too.
        storage: the storage that writes and reads the files: an object or its name, ``None`` for ``dcp``.
        process_group: the ranks that save together, ``None`` for all ranks. The constructor is collective.
        restore: how :meth:`restore` chooses and reads a checkpoint: :class:`stagereg.Restore`.
        failure: timeouts, and the reaction to failed saves: :class:`stagereg.Failure`.
        replicas: how replicated tensors are saved: :class:`stagereg.Replicas`.
        preemption: the reaction to SIGTERM and SIGUSR1: :class:`stagereg.Preemption`.
        prove: the record of steps for ``stagereg prove``: :class:`stagereg.Prove`.
        tier: a local tier, which keeps copies on the machines that train, in memory or on disk, and is saved to more
            often: a component of the kind ``tier`` or its name; ``None``: no tier. docs/tiers.md lists the failures
            that its copies survive.
        save_last: whether a ``with`` block that ends without an exception saves the last step that :meth:`maybe_save`
            or :meth:`should_save` was called with, unless that step is already saved.
        enable: with False, all methods do nothing: the run neither saves nor restores.
        on_commit: called on rank 0 in the background for each complete checkpoint: components of the kind ``on_commit``
            or functions of one argument, a :class:`.CommittedCheckpoint`; a list, or a mapping by name. If a call fails
            or takes longer than ``failure.timeout``, this is logged and counted in ``stats``, but the save does not
            fail. :meth:`close` waits for calls for at most ``failure.timeout``.

    Attributes:
        preemption: whether the ranks must exit; ``None`` without ``preemption.grace_period``.
        restored: the directory, or URL, of the checkpoint that :meth:`restore` loaded last; otherwise ``None``.
        stats: the cost of all checkpoints so far on this rank. Each save updates it.

    Raises:
        ConfigError: an option is invalid or differs between ranks, or ``dir`` is not the same folder on all machines.
        CheckpointError: raised on all ranks if another job of the sweep has used ``dir``; with a tier, see also
            :meth:`lock`.

    Example::

        with Checkpointer("runs/gpt", every=100) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train_one_step()
                checkpointer.maybe_save(step, state)
    """

    @staticmethod
    def check_options(given: Mapping[str, Any]) -> None:
        """Check options by name before anything is constructed. Options that are not known yet may be missing."""
        options.check_all(given, {"replicas": Replicas, "preemption": Preemption, "prove": Prove})

    @suggests_arguments
    def __init__(
        self,
        dir: str | None,
        every: int | Literal["auto"] = 100,
        keep: int | Keep | KeepRule = Keep(),  # noqa: B008  # immutable
        resume: str = "auto",
        stager: AsyncStager | str | None = None,
        storage: Storage | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore: Restore = Restore(),  # noqa: B008  # immutable
        failure: Failure = Failure(),  # noqa: B008
        replicas: Replicas = Replicas(),
        preemption: Preemption = Preemption(),
        prove: Prove = Prove(),
        save_last: bool = True,
        enable: bool = True,
        on_commit: Any = None,
        tier: Tier | str | None = None,
    ) -> None:
        constructed("checkpoint")
        observer = self.observer = _observer(prove)
        self._reads_only = observer is not None and observer.reads_only
        if self._reads_only:  # `stagereg prove` has started this program
            dir, resume = observer.replaced(dir, resume)
            save_last, enable, on_commit, tier, preemption = False, True, None, None, Preemption(None)
        chosen = _tier(tier)
        notes = _notes(chosen) if dir is None else None
        place = dir if dir is not None else chosen.dir
        groups = {"restore": restore, "failure": failure, "replicas": replicas, "preemption": preemption}
        alone = {"dir": notes or place, "every": every, "keep": keep, "resume": resume, "save_last": save_last}
        self.check_options({**alone, **groups, "prove": prove})
        copier: AsyncStager = options.component("stager", stager, "overlapped")
        if on_commit is not None:
            _needs("callbacks", option("checkpoint.on_commit"))
        self._calls = _made("callbacks", "calls.CommitCalls", on_commit)
        grace = preemption.grace_period
        self._preemption = None if grace is None else _made("preemption", "consensus.PreemptionConsensus", grace)
        self._tiering = tiering = None if chosen is None else _tiering(chosen, failure)
        self._quarantine = _made(
            *("recovery", "quarantine.Quarantine", restore.max_crashes, tiering is not None),
            lambda: tiering is not None and tiering.leads(),
        )
        extensions = [
            _made("goodput", "starts.StartPhases"),
            _made("diagnostics", "checks.Diagnostics", restore.cast, copier),
            _made("retention", "logged_metrics.LoggedMetrics"),
            None if self._reads_only else _made("recovery", "emergency_saver.EmergencySaver"),
            *(self._calls, self._preemption, tiering, self._quarantine, observer),
            _made("retention", "weights_after.WeightsAfter", keep.weights_after if isinstance(keep, Keep) else None),
        ]
        sharding = _made("replicas", "shares.ReplicaShards", replicas.verify_every, replicas.share)
        schedule = _schedule("checkpoint.every", every, failure, in_tier=False)
        super().__init__(
            *(place, schedule, keep, resume, copier, storage, process_group, restore, failure),
            *(save_last, enable, [each for each in extensions if each is not None], sharding, notes),
            compared={"replicas": replicas, "preemption": preemption, "prove": prove},
        )

    def save(self, step: int, state: MutableMapping[str, Any], everywhere: bool = False) -> None:
        if not self._reads_only:
            super().save(step, state, everywhere)

    @property
    def latest(self) -> Path | str | None:
        """The newest committed checkpoint, or ``None``; in a proof, the checkpoint that the proof restores."""
        if self._reads_only:
            return None if self.observer.checkpoint == "never" else path_or_url(self.observer.checkpoint)
        return super().latest

    @property
    def preemption(self) -> PreemptionConsensus | None:
        """Whether the ranks must exit; ``None`` without ``preemption.grace_period``."""
        return self._preemption if self._preemption is not None and self._preemption.started else None


def _needs(extension: str, what: str) -> None:
    if not has(extension):
        raise ConfigError(f"{what} {needs(extension)}")


def _made(extension: str, name: str, *arguments: Any) -> Any:
    if not has(extension):
        return None
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(f"stagereg.extensions.{extension}.{module}"), kind)(*arguments)


def _observer(prove: Any) -> Any:
    steps = getattr(prove, "steps", 0)  # the constructor checks the type later
    if steps:
        _needs("prove", option("checkpoint.prove.steps", steps))
    return _made("prove", "recording.observer", steps)


def _tiering(tier: Any, failure: Failure) -> Any:
    return _made("tiers", "tiering.Tiering", tier, _schedule("tier.every", tier.every, failure, in_tier=True))


def _tier(tier: Any) -> Any:
    if tier is None or tier == "none" or isinstance(tier, NoTier):
        return None
    _needs("tiers", choice("tier", tier if isinstance(tier, str) else "..."))
    chosen = options.component("tier", tier, "none")
    return None if isinstance(chosen, NoTier) else chosen


def _notes(chosen: Any) -> str:
    """Return the directory for the records of a run that has no checkpoint directory."""
    if chosen is None:
        raise ConfigError(
            f"{option('checkpoint.dir')} must be the path or URL of a directory, unless a tier keeps the checkpoints: "
            f"{choice('tier', 'disk', dir='PATH')}, or {choice('tier', 'memory')}."
        )
    notes: str = _made("tiers", "tiering.notes_of", chosen)
    return notes


def _schedule(name: str, every: int | str, failure: Failure, in_tier: bool) -> Schedule:
    if isinstance(every, int):
        return Schedule(every)
    _needs("planning", option(name, every))
    expected_s = failure.mtbf.total_seconds()
    by_record = partial(_made, "goodput", "phases.mtbf_s", expected_s, in_tier)
    mtbf_s = by_record if has("goodput") else partial(float, expected_s)
    automatic: Schedule = _made("planning", "automatic.Automatic", mtbf_s, "the tier " if in_tier else "")
    return automatic
