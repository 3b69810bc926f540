"""Runs a stagereg program under Ray Train: ``TorchTrainer(on_ranks(train, cfg), run_config=run_config())``.

Ray starts the workers, connects them, and restarts all workers if one fails. :func:`on_ranks` adds the other features
of :func:`stagereg.main` to each worker: Hydra's config and directory, the run record, the response of all ranks to a
rank failure or a signal, and one error message per failure. Ray calls the training function on a thread of the worker.

* Signals arrive on the worker's main thread, so a method call on Ray's actor installs the handlers there.
* The program runs on another new thread, and Ray's thread waits for it. If a rank fails and the program hangs in a
  collective, Ray's thread can therefore raise the error.

Checkpoints stay in their directory: :func:`report` passes their paths to Ray, which does not copy or delete them.
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
_ENDED_S = 30.0  # seconds to wait for Ray to stop a worker whose error was caused by another rank's error
_HELD_S = 60.0  # maximum seconds for which an emergency save keeps the main thread of a worker busy
_ENDS_S = 5.0  # seconds to wait for the program to end after another rank has failed


def on_ranks(train: Callable[[Any], Any], cfg: Any) -> Callable[[], Any]:
    """Return the training function for a ``TorchTrainer``. On each worker, it runs ``train(cfg)`` as a stagereg rank.

    Call ``on_ranks`` on the driver, in a function decorated with ``hydra.main``. ``train`` may be decorated with
    :func:`stagereg.main`. Its result on rank 0 becomes ``Result.return_value``. Relative paths are relative to the
    driver's working directory.

    Raises:
        ConfigError: ``on_ranks`` was called outside a function that is decorated with ``hydra.main``.
        InstallationError: this version of Ray, or Train V1 (``RAY_TRAIN_V2_ENABLED=0``), is not supported.
    """
    _expect_hydra("on_ranks(train, cfg)")
    expect_known("ray", _WRITTEN_FOR, ray.train, {"report": _REPORT})
    return functools.partial(_run, train, cfg, Singleton.get_state(), os.getcwd(), _newest(cfg))


def run_config(**options: Any) -> RunConfig:
    """Return a ``RunConfig`` whose directory is Hydra's output directory, the default location of checkpoints.

    Call ``run_config`` on the driver, in a function that is decorated with ``hydra.main``. ``options``: other options
    of ``RunConfig``.

    Raises:
        ConfigError: ``num_to_keep`` is set (use ``checkpoint.keep`` instead), or Hydra is not initialized.
    """
    _expect_hydra("run_config()")
    directory = Path(HydraConfig.get().runtime.output_dir)
    config = RunConfig(**{"storage_path": str(directory.parent), "name": directory.name, **options})
    if config.checkpoint_config.num_to_keep is not None:
        raise ConfigError(
            "CheckpointConfig(num_to_keep=...) would make Ray delete checkpoints, which stagereg already does. Remove "
            "num_to_keep and set checkpoint.keep."
        )
    if "://" not in str(config.storage_path):
        _forget_deleted(Path(config.storage_path, config.name))
    return config


def report(metrics: dict[str, Any], checkpointer: Checkpointer) -> None:
    """Call ``ray.train.report`` with ``metrics``, and with the newest committed checkpoint if Ray does not know it yet.

    Call ``report`` the same number of times on all ranks, at most once per step. If a checkpoint is committed after the
    last call, it is reported with the same metrics at the end of the program.

    Raises:
        ConfigError: ``checkpoint.dir`` is not inside Ray's directory of the run. Raised on rank 0.
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
        """Return the path of the newest checkpoint, without a URL scheme, or ``None`` if Ray already knows it."""
        checkpointer = self._checkpointer()
        if checkpointer is None or not self._newer:
            return None
        self._newer = False
        before, latest = self._reported, checkpointer.latest
        self._reported = None if latest is None else str(latest).split("://")[-1]
        return None if self._reported == before else self._reported


# These are global, because ``report`` is a plain function like Ray's, and each process is only one rank.
_reports: weakref.WeakKeyDictionary[Checkpointer, _Reports] = weakref.WeakKeyDictionary()
_last: dict[str, Any] = {}
_saved = threading.Event()  # set after the emergency save (the save that surviving ranks make after a rank failure)


def _checkpoint(place: str) -> Any:
    """Return a Ray ``Checkpoint`` for the path ``place``. Raises ``ConfigError`` if it is outside Ray's directory."""
    storage: Any = ray.train.get_context().get_storage()
    root = storage.experiment_fs_path
    inside = [os.path.realpath(each) if each.startswith("/") else each for each in (place, root)]
    if not Path(inside[0]).is_relative_to(inside[1]):
        raise ConfigError(
            f"Cannot report the checkpoint {place} to Ray, because it is outside Ray's directory of this run, {root}. "
            "Pass run_config=stagereg.integrations.ray.run_config() to the trainer, or move checkpoint.dir into it."
        )
    return ray.train.Checkpoint(place, filesystem=storage.storage_filesystem)


@dataclass(frozen=True)
class _RayRank(Rank):
    """A rank whose process Ray manages. After an error, it raises the error instead of exiting the process."""

    outcome: Future[Any] = field(default_factory=Future)
    worker: Any = None

    def fail(self, error: Exception) -> NoReturn:
        """On one rank, raise the error of the rank that failed first. The other ranks wait for Ray to stop them."""
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
        """Run the emergency save, and keep the main thread busy, so that Ray waits up to 5 s before it stops it."""
        self.worker.execute.remote(_hold)
        save()
        _saved.set()
        if not self.store.ended.wait(_ENDS_S) and self._speaks():
            with contextlib.suppress(InvalidStateError):
                self.outcome.set_exception(LaunchError(f"rank {self.rank}: {cause().text}"))

    def _report(self, error: Exception | None, cause: Cause | None = None) -> None:
        """Print nothing, because Ray prints the error and the rank."""


def _newest(cfg: Any) -> str | None:
    """Return the key of the newest checkpoint in ``checkpoint.dir`` (not in tiers), or ``None`` if none exists."""
    where = OmegaConf.select(cfg, "checkpoint.dir")
    found = None if where is None else open_store(where).latest()
    return None if found is None else found.key


def _go_on(cfg: Any, before: str | None) -> None:
    """Set ``resume=auto`` if a checkpoint was committed since the driver started: then Ray has restarted the run."""
    if _newest(cfg) != before:
        OmegaConf.update(cfg, "checkpoint.resume", "auto", force_add=True)


def _run(train: Callable[[Any], Any], cfg: Any, hydra: Any, folder: str, before: str | None) -> Any:
    """Run the program on a new thread, and wait for it. ``before``: the newest checkpoint when the driver started."""
    setup_globals()
    Singleton.set_state(hydra)
    if os.path.isdir(folder):
        os.chdir(folder)
    _go_on(cfg, before)
    worker = ray.get_runtime_context().current_actor
    ray.get(worker.execute.remote(_take_signals))
    rank = _this_rank(worker)

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # a rank failure has already set the outcome
            try:
                value = rank.run(functools.partial(_train, train), cfg)
            except BaseException as error:
                # Convert Preempted and Stopped: Ray cannot pickle them, and a SystemExit would end only this thread.
                reported = LaunchError(str(error)) if isinstance(error, (Preempted, Stopped)) else error
                rank.outcome.set_exception(reported)
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
    _saved.wait(_HELD_S)


def _take_signals() -> None:
    """Install handlers for SIGTERM and SIGUSR1 instead of Ray's handlers. Called on the main thread of a worker."""
    if has("preemption"):
        from stagereg.extensions.preemption.signals import install_signal_handlers

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        install_signal_handlers()


def _expect_hydra(what: str) -> None:
    if not HydraConfig.initialized():
        text = f"{what} uses the config and directory of Hydra's job. Call it in a function decorated with hydra.main."
        raise ConfigError(text)


def _forget_deleted(directory: Path) -> None:
    """Remove deleted checkpoints from Ray's list. Ray does not restart a run if a checkpoint in the list is missing."""
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
