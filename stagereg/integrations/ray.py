"""Ray Train runs the ranks: ``TorchTrainer(on_ranks(train, cfg), run_config=run_config())``.

Ray starts the workers, connects them, and starts all of them again when one fails. What :func:`stagereg.main` does
besides is done in them by :func:`on_ranks`: Hydra's config and directory, the record, what a lost rank or a signal has
the others do, one message for a failure. Ray runs a training function on a thread of a worker, so

* signals are handled by the worker's main thread, which is asked for that by a call of its actor;
* the program has a thread of its own here, and Ray's thread waits for it: where a rank is lost and the program hangs in
  a collective, Ray's thread raises.

Checkpoints stay where they are committed: :func:`report` names them to Ray, which copies none and deletes none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import ray
import ray.train
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf
from ray.train import CheckpointUploadMode, RunConfig

from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.base.small_files import read_small, replace_small
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import ConfigError, LaunchError, Preempted, Stopped, is_consequence
from stagereg.integrations.agreed import expect_known
from stagereg.launch.extension import Cause
from stagereg.launch.rank import Rank
from stagereg.launch.run_store import RunStore

__all__ = ["on_ranks", "report", "run_config"]

_WRITTEN_FOR = ">=2.60"
_REPORT = ["metrics", "checkpoint", "checkpoint_dir_name", "checkpoint_upload_mode"]
_REPORT += ["delete_local_checkpoint_after_upload", "checkpoint_upload_fn", "validation"]
_SNAPSHOT, _SNAPSHOT_BYTES = "checkpoint_manager_snapshot.json", 1 << 28
_ENDED_S = 30.0  # seconds in which Ray ends a worker whose error is a consequence of another error
_HELD_S = 60.0  # seconds, at most, for which a worker lets Ray wait that saves after a loss
_ENDS_S = 5.0  # seconds that the program has to end after another rank has failed


def on_ranks(train: Callable[[Any], Any], cfg: Any) -> Callable[[], Any]:
    """Return what a ``TorchTrainer`` calls in its workers: ``train(cfg)`` as a rank of stagereg.

    ``train`` may be decorated with :func:`stagereg.main`. On the driver, within a function of ``hydra.main``. What rank
    0 returns is ``Result.return_value``. Relative paths are those of the driver's working folder.

    Raises:
        ConfigError: not called within a function of ``hydra.main``.
        InstallationError: this version of Ray, or Train V1 (``RAY_TRAIN_V2_ENABLED=0``), has another ``report``.
    """
    _expect_hydra("on_ranks(train, cfg)")
    expect_known("ray", _WRITTEN_FOR, ray.train, {"report": _REPORT})
    return functools.partial(_run, train, cfg, Singleton.get_state(), os.getcwd(), _newest(cfg))


def run_config(**options: Any) -> RunConfig:
    """Return a ``RunConfig`` whose directory is the one of Hydra's job, where checkpoints are by default.

    ``options`` are those of ``RunConfig``. On the driver, within a function of ``hydra.main``.

    Raises:
        ConfigError: Ray is to delete checkpoints (``num_to_keep``), which ``checkpoint.keep`` does.
    """
    _expect_hydra("run_config()")
    directory = Path(HydraConfig.get().runtime.output_dir)
    config = RunConfig(**{"storage_path": str(directory.parent), "name": directory.name, **options})
    if config.checkpoint_config.num_to_keep is not None:
        raise ConfigError(
            "CheckpointConfig(num_to_keep=...) has Ray delete checkpoints, and checkpoint.keep of the config does "
            "already: leave num_to_keep out, and set checkpoint.keep"
        )
    if "://" not in str(config.storage_path):
        _forget_deleted(Path(config.storage_path, config.name))
    return config


def report(metrics: dict[str, Any], checkpointer: Checkpointer) -> None:
    """``ray.train.report``, with the newest checkpoint that is committed and was not reported yet, where it is.

    On all ranks, equally often: at each step, or at some. A checkpoint that is committed after the last call is
    reported with the same metrics when the program has ended.

    Raises:
        ConfigError: on rank 0: ``checkpoint.dir`` is not inside Ray's directory of the run.
    """
    place = None
    if ray.train.get_context().get_world_rank() == 0:
        if checkpointer not in _reports:
            _reports[checkpointer] = _Reports(checkpointer)
        place = _reports[checkpointer].take()
    _last.update({"metrics": metrics, "checkpointer": checkpointer})
    checkpoint = None if place is None else _checkpoint(place)
    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


class _Reports:
    def __init__(self, checkpointer: Checkpointer) -> None:
        known = ray.train.get_checkpoint()
        self._checkpointer = weakref.ref(checkpointer)
        self._reported = None if known is None else known.path
        self._newer = True
        checkpointer.listen(self._note)

    def _note(self, step: int) -> None:
        self._newer = True

    def take(self) -> str | None:
        """Return where the newest one is, without the scheme of a URL; ``None`` if that is reported."""
        checkpointer = self._checkpointer()
        if checkpointer is None or not self._newer:
            return None
        self._newer = False
        before, latest = self._reported, checkpointer.latest
        self._reported = None if latest is None else str(latest).split("://")[-1]
        return None if self._reported == before else self._reported


# Global because a process is one rank, and Ray's own report is a function.
_reports: weakref.WeakKeyDictionary[Checkpointer, _Reports] = weakref.WeakKeyDictionary()
_last: dict[str, Any] = {}
_busy = threading.Event()  # is set when there is nothing more to save


def _checkpoint(place: str) -> Any:
    """What Ray takes for a checkpoint that is in its storage already. Raises: ``ConfigError`` if it is not."""
    storage: Any = ray.train.get_context().get_storage()
    root = storage.experiment_fs_path
    inside = [os.path.realpath(each) if each.startswith("/") else each for each in (place, root)]
    if not Path(inside[0]).is_relative_to(inside[1]):
        raise ConfigError(
            f"the checkpoint {place} is not in Ray's directory of this run, {root}, so Ray cannot be told of it: give "
            "the trainer run_config=stagereg.integrations.ray.run_config(), or checkpoint.dir a folder in there"
        )
    return ray.train.Checkpoint(place, filesystem=storage.storage_filesystem)


@dataclass(frozen=True)
class _RayRank(Rank):
    """A rank whose end is Ray's business: it raises where others end the process."""

    outcome: Future[Any] = field(default_factory=Future)
    worker: Any = None

    def fail(self, error: Exception) -> NoReturn:
        """Raise the cause, or that others are lost; wait for Ray where another rank raises that."""
        if not is_consequence(error):
            raise error
        cause = self.cause()
        if cause.text and self._speaks():
            raise LaunchError(f"rank {self.rank}: {cause.text}") from error
        time.sleep(_ENDED_S)
        raise error

    def _speaks(self) -> bool:
        return self.rank == min(set(range(self.world_size)) - self.failed_ranks(), default=self.rank)

    def end_after_failure(self, save: Callable[[], object], cause: Callable[[], Cause], mercy_s: float) -> None:
        """Save while the main thread is busy: Ray gives that 5 s before it ends a worker."""
        self.worker.execute.remote(_hold)
        save()
        _busy.set()
        if not self.store.ended.wait(_ENDS_S) and self._speaks():
            with contextlib.suppress(InvalidStateError):
                self.outcome.set_exception(LaunchError(f"rank {self.rank}: {cause().text}"))

    def _report(self, error: Exception | None, cause: Cause | None = None) -> None:
        """Ray prints it, with its rank."""


def _newest(cfg: Any) -> str | None:
    """What the newest checkpoint in ``checkpoint.dir`` alone is known by, ``None`` if there is none."""
    where = OmegaConf.select(cfg, "checkpoint.dir")
    found = None if where is None else open_store(where).latest()
    return None if found is None else found.key


def _go_on(cfg: Any, before: str | None) -> None:
    """Where Ray has started a run again that has a checkpoint of its own, go on from that in place of ``resume``."""
    if _newest(cfg) != before:
        OmegaConf.update(cfg, "checkpoint.resume", "auto", force_add=True)


def _run(train: Callable[[Any], Any], cfg: Any, hydra: Any, folder: str, before: str | None) -> Any:
    """What a worker runs, on Ray's thread; ``before`` is the newest checkpoint when the driver began."""
    setup_globals()
    Singleton.set_state(hydra)
    if os.path.isdir(folder):
        os.chdir(folder)
    _go_on(cfg, before)
    worker = ray.get_runtime_context().current_actor
    ray.get(worker.execute.remote(_take_signals))
    rank = _this_rank(worker)

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # a loss has ended it
            try:
                value = rank.run(functools.partial(_train, train), cfg)
            except BaseException as error:
                # An exit has arguments that Ray's pickle does not know, and ends no process on this thread.
                told = LaunchError(str(error)) if isinstance(error, (Preempted, Stopped)) else error
                rank.outcome.set_exception(told)
            else:
                rank.outcome.set_result(value)

    threading.Thread(target=run, name="stagereg-train", daemon=True).start()
    return rank.outcome.result()


def _train(train: Callable[[Any], Any], cfg: Any) -> Any:
    value = train(cfg)
    if _last:
        report(**_last)
    return value


def _this_rank(worker: Any) -> _RayRank:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _get_default_store

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    assert dist.is_initialized()
    store = RunStore(PrefixStore("stagereg", _get_default_store()), rank, world_size)
    local = context.get_local_rank(), context.get_local_world_size()
    return _RayRank(rank, world_size, *local, False, store, worker=worker)


def _hold() -> None:
    _busy.wait(_HELD_S)


def _take_signals() -> None:
    """On the main thread of a worker: let a checkpointer have SIGTERM and SIGUSR1, in place of Ray's exit."""
    if has("preemption"):
        from stagereg.extensions.preemption.signals import install_signal_handlers

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        install_signal_handlers()


def _expect_hydra(what: str) -> None:
    if not HydraConfig.initialized():
        raise ConfigError(
            f"call {what} in a function decorated with hydra.main: its config and directory are the run's"
        )


def _forget_deleted(directory: Path) -> None:
    """Take from Ray's list what stagereg has deleted since: Ray begins no run again whose checkpoints are not there."""
    snapshot = directory / _SNAPSHOT
    if not snapshot.exists():
        return
    known = json.loads(read_small(snapshot, _SNAPSHOT_BYTES))
    listed = known["checkpoint_results"]
    there = [at for at, each in enumerate(listed) if (directory / each["checkpoint_dir_name"]).is_dir()]
    if len(there) < len(listed):
        for name in ("checkpoint_results", "checkpoint_report_indices"):
            known[name] = [known[name][at] for at in there]
        known["latest_checkpoint_result"] = known["checkpoint_results"][-1] if there else None
        replace_small(snapshot, json.dumps(known).encode())
