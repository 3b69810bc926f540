"""Assembles ``stagereg.Checkpointer`` from the core and from the extensions that are installed.

This is the only place that names extensions for a checkpointer. Without an option that needs it, an extension whose
folder is not there is left out; with one, the constructor says what is missing.
"""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
    """How ranks save the parameters and the optimizer state that several of them hold alike.

    Args:
        share: each of these ranks writes a share of them, and stages no more than that from the second save on; False
            has all of them stage it, and the lowest write it.
        verify_every: compare these in every that many saves, by checksums of the bytes, and fail the save if they have
            drifted apart; such a save is staged as a whole. 0 for the first save only.

    Raises:
        ConfigError: a value is of no use.
    """

    share: bool = True
    verify_every: int = 0

    def __post_init__(self) -> None:
        expect_flag("replicas.share", self.share)
        at_least(0, option("checkpoint.replicas.verify_every"), self.verify_every)


@dataclass(frozen=True)
class Preemption:
    """What a run does on SIGTERM or SIGUSR1.

    Args:
        grace_period: how long after SIGTERM or SIGUSR1 the ranks have to agree on a step, save the step and exit.
            ``None`` leaves the two signals alone.

    Raises:
        ConfigError: a value is invalid.
    """

    grace_period: datetime.timedelta | None = datetime.timedelta(seconds=25)

    def __post_init__(self) -> None:
        if self.grace_period is not None:
            expect_duration("preemption.grace_period", self.grace_period)


@register("checkpoint", "default")
class Checkpointer(core.Checkpointer):
    """Saves the state of a training run without stopping it, and brings the run back to where it was.

    Every rank constructs one, calls the same methods with the same steps, and gives the same names; a process without
    an initialised ``torch.distributed`` works alone. Checkpoints are complete or absent: a crash at any moment leaves
    the earlier ones untouched. One run at a time saves in a directory: the first :meth:`maybe_save`,
    :meth:`should_save` or :meth:`save` locks it, or :meth:`restore` if the same command has saved there. A program
    that calls none of these is a reader: it locks nothing, leaves nothing, and may run next to training.

    A state is a dict of names to objects with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers),
    lists and dicts of such objects, or plain values (numbers, text, tensors, nested dicts and lists). The modules of an
    optimizer must be in the same state. :func:`stagereg.per_rank` marks what each rank has for itself. The step and
    each rank's random number generators are added. docs/guarantees.md has the rules for several ranks.

    Args:
        dir: where the checkpoints go; created if it is not there. It has to be the same directory on all machines.
            ``None`` where ``tier`` alone keeps them.
        every: ``maybe_save`` saves at the steps that are multiples of this, at least 1. ``"auto"`` saves as often as
            loses least time to checkpoints and failures, by what saves turn out to cost and ``failure.mtbf``.
        keep: how many of the newest checkpoints stay, at least 1, or which of all: :class:`stagereg.Keep` or a
            component of the kind ``keep``. The disk needs space for one more: an old one goes when a new one is there.
        resume: what ``restore`` loads: ``"auto"`` the newest undamaged checkpoint, if there is one; ``"never"``
            nothing; ``"latest"`` the newest, which must be there; or the path of a checkpoint, also of plain torch. A
            bare name, ``step-00000300``, is one in ``dir``, or else in the working folder.
        stager: copies the state, or its name, ``None`` for ``overlapped``; the checkpointer closes it.
        storage: writes the files, or its name, ``None`` for ``dcp``. A checkpoint is read by the one that wrote it.
        process_group: the ranks that save together, ``None`` for all of them. Constructing is collective.
        restore: how :meth:`restore` chooses and reads a checkpoint: :class:`stagereg.Restore`.
        failure: what may fail, and what then: :class:`stagereg.Failure`.
        replicas: how what several ranks hold alike is saved: :class:`stagereg.Replicas`.
        preemption: what the run does on SIGTERM or SIGUSR1: :class:`stagereg.Preemption`.
        tier: keeps copies nearer than ``dir``, in memory or on disks of the machines, and saves more often: a component
            of the kind ``tier``, or its name, ``None`` for ``none``. docs/tiers.md has what it survives.
        save_last: whether the end of a ``with`` block, where nothing was raised, saves the last step that
            :meth:`maybe_save` or :meth:`should_save` was called with, unless it is saved.
        enable: False makes all methods do nothing: nothing is saved, and nothing is restored.
        on_commit: what rank 0 calls in the background for each complete checkpoint: components of the kind
            ``on_commit`` or functions of one argument, a :class:`.CommittedCheckpoint`; a list, or a mapping by name.
            One that fails, or takes longer than ``failure.timeout``, is logged and counted in ``stats``, and fails
            nothing. :meth:`close` waits as long.

    Attributes:
        preemption: whether the ranks are to leave; ``None`` without ``preemption.grace_period``.
        restored: the directory of the checkpoint that :meth:`restore` loaded last, a URL if it is one; else ``None``.
        stats: what the checkpoints have cost so far, on this rank; goes on counting.

    Raises:
        ConfigError: an option is of no use, the ranks differ in one, or ``dir`` is another directory on some machine.
        CheckpointError: on all ranks: another job of the sweep has had ``dir``; with a tier, see :meth:`lock`.

    Example::

        with Checkpointer("runs/gpt", every=100) as checkpointer:
            start = checkpointer.restore(state) or 0
            for step in range(start + 1, steps + 1):
                train_one_step()
                checkpointer.maybe_save(step, state)
    """

    @staticmethod
    def check_options(given: Mapping[str, Any]) -> None:
        """Check options by name, before anything is made; some of them, if the others are not known yet."""
        options.check_all(given, {"replicas": Replicas, "preemption": Preemption})

    @suggests_arguments
    def __init__(
        self,
        dir: str | None,
        every: int | Literal["auto"] = 100,
        keep: int | Keep | KeepRule = Keep(),  # noqa: B008  # it cannot change
        resume: str = "auto",
        stager: AsyncStager | str | None = None,
        storage: Storage | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        restore: Restore = Restore(),  # noqa: B008  # it cannot change, nor can those below
        failure: Failure = Failure(),  # noqa: B008
        replicas: Replicas = Replicas(),
        preemption: Preemption = Preemption(),
        save_last: bool = True,
        enable: bool = True,
        on_commit: Any = None,
        tier: Tier | str | None = None,
    ) -> None:
        constructed("checkpoint")
        chosen = _tier(tier)
        notes = _notes(chosen) if dir is None else None
        place = dir if dir is not None else chosen.dir
        groups = {"restore": restore, "failure": failure, "replicas": replicas, "preemption": preemption}
        alone = {"dir": notes or place, "every": every, "keep": keep, "resume": resume, "save_last": save_last}
        self.check_options({**alone, **groups})
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
            _made("recovery", "emergency_saver.EmergencySaver"),
            *(self._calls, self._preemption, tiering, self._quarantine),
        ]
        sharding = _made("replicas", "shares.ReplicaShards", replicas.verify_every, replicas.share)
        schedule = _schedule("checkpoint.every", every, failure, in_tier=False)
        super().__init__(
            *(place, schedule, keep, resume, copier, storage, process_group, restore, failure),
            *(save_last, enable, [each for each in extensions if each is not None], sharding, notes),
            compared={"replicas": replicas, "preemption": preemption},
        )

    @property
    def preemption(self) -> PreemptionConsensus | None:
        """Whether the ranks are to leave; ``None`` without ``preemption.grace_period``."""
        return self._preemption if self._preemption is not None and self._preemption.started else None


def _needs(extension: str, what: str) -> None:
    """Raise ``ConfigError`` if an option names an extension that is not installed."""
    if not has(extension):
        raise ConfigError(f"{what} {needs(extension)}")


def _made(extension: str, name: str, *arguments: Any) -> Any:
    """Call a class or function ``name`` of an extension; return ``None`` if the extension is not installed."""
    if not has(extension):
        return None
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(f"stagereg.extensions.{extension}.{module}"), kind)(*arguments)


def _tiering(tier: Any, failure: Failure) -> Any:
    return _made("tiers", "tiering.Tiering", tier, _schedule("tier.every", tier.every, failure, in_tier=True))


def _tier(tier: Any) -> Any:
    """Return the tier that was chosen, ``None`` for none."""
    if tier is None or tier == "none" or isinstance(tier, NoTier):
        return None
    _needs("tiers", choice("tier", tier if isinstance(tier, str) else "..."))
    chosen = options.component("tier", tier, "none")
    return None if isinstance(chosen, NoTier) else chosen


def _notes(chosen: Any) -> str:
    """Return where a run without a checkpoint directory notes what it has to."""
    if chosen is None:
        raise ConfigError(
            f"{option('checkpoint.dir')} must be the path or URL of a directory, unless a tier keeps the steps: choose "
            f"{choice('tier', 'disk', dir='PATH')}, or {choice('tier', 'memory')}."
        )
    notes: str = _made("tiers", "tiering.notes_of", chosen)
    return notes


def _schedule(name: str, every: int | str, failure: Failure, in_tier: bool) -> Schedule:
    """Return the schedule of an option ``every``, by the failures that are expected, and that the run has seen."""
    if isinstance(every, int):
        return Schedule(every)
    _needs("planning", option(name, every))
    expected_s = failure.mtbf.total_seconds()
    by_record = partial(_made, "goodput", "phases.mtbf_s", expected_s, in_tier)
    mtbf_s = by_record if has("goodput") else partial(float, expected_s)
    automatic: Schedule = _made("planning", "automatic.Automatic", mtbf_s, "the tier " if in_tier else "")
    return automatic
