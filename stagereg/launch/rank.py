"""The rank's side of a run: its place in the group, the run it belongs to, the job, and how it ends.

A rank is a process with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, whoever
started it: ``stagereg.main`` or ``torchrun``. All ranks of a run share one directory, one ``.hydra`` and one log, which
belong to rank 0, and one clock; in that directory each rank records its job (:mod:`stagereg.record`). When ranks fail,
the cause is told once, and errors that merely follow from it are not.

``torchrun --max-restarts`` starts ranks over and over on one store. So each start of all ranks is an *attempt* with
keys of its own (:mod:`stagereg.launch.restart`), and attempts after the first go on in the directory of the first.

Starting ranks is left to ``launch``, Hydra to ``main``.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import stagereg.launch.heartbeat as heartbeat
import stagereg.launch.preempted_exit as preempted_exit
import stagereg.launch.restart as restart
import stagereg.record as record
import stagereg.shutdown as shutdown
from stagereg.errors import LaunchError, Preempted, StageregError, Stopped, UnevenInputsError
from stagereg.launch.command_line import quoted, without_callbacks
from stagereg.launch.launcher_channel import LauncherChannel

__all__ = ["Rank", "alone", "environment", "format_error", "is_rank", "leave"]

log = logging.getLogger(__name__)

_LINGER_S = 3.0
"""Seconds a failed rank waits for the others to reach their end too, before its own end takes them down."""
_SILENT_S = 5.0
"""Seconds without a word after which a rank of another machine is called lost, where something has failed already."""
_PATIENCE_S = 60.0
"""Likewise where nothing has, and this rank only waits for the others to end."""
_NAMED = 8
"""Ranks that a message names at most."""
_LEAVING_S = 10.0
"""Seconds a rank that leaves because it was told to waits for the others, which do the same."""
_TOGETHER_S = 60.0
"""Likewise where the error has reached all ranks on purpose: others may still be saving what there is."""
_LOST_PEER = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "remote process exited",
)
"""How gloo, NCCL and torch's store say that another rank is gone, in lower case."""


@dataclass(frozen=True)
class Rank:
    """This process as one of ``world_size`` ranks, connected to the others through ``store``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    handover: LauncherChannel | None
    store: Any
    runs: Any = None
    """Of this run in all its attempts; ``store`` is of this attempt."""

    @classmethod
    def current(cls) -> Rank | None:
        """This process's place, or ``None`` when nobody has made it a rank. Waits for the other ranks to be there.

        Raises:
            LaunchError: they were not there in time.
        """
        if not is_rank():
            return None
        handover = LauncherChannel.received()
        if handover is not None:
            _end_with(handover.pid)
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            _end_with(os.getppid())
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        store, rank, world_size = next(iter(rendezvous("env://")))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        runs = PrefixStore("stagereg", store)
        this_attempt = PrefixStore(restart.named(runs, rank, world_size) if handover is None else "0", runs)
        return cls(rank, world_size, local_rank, local_world_size, handover, this_attempt, runs)

    @property
    def leads(self) -> bool:
        """Whether the run's directory, ``.hydra``, log and callbacks are this process's."""
        return self.rank == 0 and self.handover is None

    @property
    def far(self) -> bool:
        """Whether some of the ranks are on other machines, or below other agents at least."""
        return self.local_world_size < self.world_size

    def overrides(self) -> list[str]:
        """Hydra overrides that make this rank follow its run; waits for rank 0 where that decides the directory."""
        follow: list[str] = []
        if self.handover is None and self.rank > 0:
            restart.await_key(self.store, "run", "rank 0 did not begin")
            run = json.loads(self.store.get("run"))
            follow += [f"hydra.run.dir={quoted(run['dir'])}", *run["without_callbacks"]]
        if self.leads and (begun := self._begun()):
            follow.append(f"hydra.run.dir={quoted(begun['dir'])}")
        if not self.leads:
            follow.append("hydra.output_subdir=null")
        if self.rank > 0:
            follow += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        return follow

    def run(self, task: Callable[[Any], Any], cfg: Any) -> Any:
        """Run the job in the process group; return rank 0's value. Does not come back when the task failed."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._agree_on_run(cfg)
        beating = heartbeat.Heartbeat(self.store, self.rank) if self.far else contextlib.nullcontext()
        listening = preempted_exit.announced(None if self.handover is None else self.handover.listening(self.rank))
        try:
            with beating, _process_group(PrefixStore("group", self.store), self):
                if self.handover is not None:
                    self.handover.ready(self.rank).touch()
                try:
                    with listening, record.recording(_run_directory(), self.rank, self.world_size, **_device()):
                        value = task(cfg)
                        shutdown.finish()
                except (Preempted, Stopped) as left:
                    self._leave(left)
                except Exception as error:
                    # Before the group closes, so that a cause is known before anybody can suffer from it.
                    self._tell_cause(error)
                    raise
                except SystemExit as left:
                    if left.code:
                        self._tell_cause(LaunchError(f"left by sys.exit({left.code!r})"))
                    raise
                finally:
                    self._say_ended()
                # A group that one rank closes while another still connects to it, fails there.
                self._await_others(math.inf)
        except Exception as error:
            self.fail(error)
        if self.rank == 0 and self.handover is not None:
            self.handover.result.write_text(_as_json(value))
        return value

    def _leave(self, left: preempted_exit.Left) -> NoReturn:
        """End this rank because all were told to leave: together, so that nobody takes the end of one for a failure."""
        from hydra.core.hydra_config import HydraConfig

        preempted_exit.deaf()
        if self.handover is not None:
            preempted_exit.note(self.handover.left(self.rank), left)
        elif self.rank == 0:
            preempted_exit.say(left, HydraConfig.get())
        with contextlib.suppress(Exception):
            self._say_ended()
            self._await_others(_LEAVING_S)
        if self.handover is None:
            raise left from None
        shutdown.set_exit_code(0)
        raise SystemExit(0) from None

    def _begun(self) -> dict[str, Any] | None:
        """Directory and time of this run's first attempt, if this is not the first."""
        begun: dict[str, Any] | None = json.loads(self.runs.get("begun")) if self.runs.check(["begun"]) else None
        return begun

    def _agree_on_run(self, cfg: Any) -> None:
        """Tell the other ranks of the run, where it is ours, and give ``${now:...}`` the same answer on all of them."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        if self.rank == 0:
            hydra = HydraConfig.get()
            now_s = self.handover.started_at if self.handover is not None else time.time()
            begun = self._begun() or {"dir": hydra.runtime.output_dir, "time": now_s}
            self.runs.set("begun", json.dumps(begun))
            self.store.set("run", json.dumps(begun | {"without_callbacks": without_callbacks(hydra)}))
        restart.await_key(self.store, "run", "rank 0 did not begin")
        at = json.loads(self.store.get("run"))["time"]
        started = datetime.fromtimestamp(at)

        def now(pattern: str) -> str:
            return started.strftime(pattern)

        # OmegaConf 2.4 warns of the long name; until 2.3 the short one was for resolvers of an older sort.
        short: Any = OmegaConf.register_resolver
        register = short if "use_cache" in inspect.signature(short).parameters else OmegaConf.register_new_resolver
        register("now", now, use_cache=True, replace=True)

    def fail(self, error: Exception) -> NoReturn:
        """End this rank because of an error: tell it, if it is a cause, once all ranks had the chance to."""
        try:
            self._tell_cause(error)
            self._say_ended()
            self._await_others(_TOGETHER_S if isinstance(error, UnevenInputsError) else _LINGER_S)
            if self.store.check(["cause"]):
                self._pass_on(*json.loads(self.store.get("cause")))
            else:
                lost = self._names(self._lost(_SILENT_S))
                self._tell(error, lost and f"{lost} Seen here:\n")
        except Exception:  # of the store; others may have told a cause before it went
            if self.far and _is_consequence(error):
                host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                gone = f"lost rank 0's torchrun or machine: the store of this run, on {host}, is gone."
                self._print(error, f"{gone} If a rank there told a cause, that is it. Seen here:\n")
        leave(1)

    def _tell_cause(self, error: Exception) -> None:
        if not _is_consequence(error):
            self.store.set("cause", json.dumps([self.rank, format_error(error)]))
            self._tell(error)

    def _pass_on(self, rank: int, text: str) -> None:
        """Hand a cause to this machine's parent, which hears nothing of other machines."""
        if self.handover is not None and self.far:
            self.handover.error(rank).write_text(text)

    def _tell(self, error: Exception, preface: str = "") -> None:
        """Tell an error, unless the same was told before, here or by another rank; consequences are all the same."""
        text = "" if _is_consequence(error) else format_error(error)
        if self.store.add(f"told/{text}", 1) == 1:
            self._print(error, preface)

    def _print(self, error: Exception, preface: str = "") -> None:
        text = preface + format_error(error)
        if self.handover is not None:
            self.handover.error(self.rank).write_text(text)
        else:
            print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _lost(self, for_s: float) -> tuple[int, ...]:
        """The ranks on several machines that have not come to their end, and say nothing for so many seconds."""
        if not self.far:
            return ()  # whoever has started the ranks sees how they end
        left = [rank for rank in range(self.world_size) if not self.store.check([f"ended/{rank}"])]
        return tuple(heartbeat.silent(self.store, left, for_s))

    def _names(self, ranks: tuple[int, ...]) -> str:
        """Who these ranks are, as a message begins; empty if there is none."""
        if not ranks:
            return ""
        named = ", ".join(f"rank {rank} ({heartbeat.place(self.store, rank)})" for rank in ranks[:_NAMED])
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return f"lost {named}{more}: not a word for seconds; killed, or the machine is gone."

    def _say_ended(self) -> None:
        self.store.set(f"ended/{self.rank}", "")

    def _await_others(self, limit_s: float) -> None:
        """Wait until all ranks have come to the end of the job, well or not."""
        deadline = time.monotonic() + limit_s
        look = time.monotonic() + _PATIENCE_S
        ended = [f"ended/{rank}" for rank in range(self.world_size)]
        while not self.store.check(ended) and time.monotonic() < deadline:
            if time.monotonic() > look:
                if lost := self._lost(_PATIENCE_S):
                    raise LaunchError(self._names(lost))
                look = time.monotonic() + _PATIENCE_S
            time.sleep(0.02)


def is_rank() -> bool:
    """Whether somebody has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def alone(task: Callable[[Any], Any], cfg: Any, recorded: bool = False) -> Any:
    """Run the job in this process, as the only rank; a process group that is already there is used and kept.

    Args:
        task: the job.
        cfg: its config.
        recorded: whether to record it in the directory of Hydra's job, which has to be there.
    """
    import torch.distributed as dist

    with contextlib.ExitStack() as job:
        if not (dist.is_available() and dist.is_initialized()):
            place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            job.enter_context(environment(place))
            me = Rank(0, 1, 0, 1, None, None)
            job.enter_context(_process_group(dist.HashStore(), me))  # type: ignore[attr-defined]
        if recorded:
            job.enter_context(record.recording(_run_directory(), dist.get_rank(), dist.get_world_size(), **_device()))
        value = task(cfg)
        if recorded:
            shutdown.finish()
        return value


def _run_directory() -> Path:
    from hydra.core.hydra_config import HydraConfig

    return Path(HydraConfig.get().runtime.output_dir)


def _device() -> dict[str, str]:
    """The accelerator of this rank, as a fact of its recording."""
    import torch

    return {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def format_error(error: BaseException) -> str:
    """An error as the user sees it: the message of the project's own errors, the traceback of all others."""
    if isinstance(error, StageregError) and os.environ.get("HYDRA_FULL_ERROR") != "1":
        return str(error)
    tb = error.__traceback__
    while tb is not None and Path(tb.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb)).rstrip()


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Have the environment variables, ``None`` for absent, for the time of a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def leave(code: int) -> NoReturn:
    """End this rank now: a thread that waits for a lost peer must not keep it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def _process_group(store: Any, me: Rank) -> Iterator[None]:
    """A process group for the time of the job: gloo for CPU tensors, and the accelerator's own where there is one.

    Ranks that have to share a device talk through gloo throughout, because NCCL refuses such groups.
    """
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(me.local_rank % torch.cuda.device_count())
        enough = me.local_world_size <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world_size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_consequence(error: BaseException) -> bool:
    """Whether the error only says that something went wrong on another rank."""
    if isinstance(error, UnevenInputsError):
        return error.rank is None
    if error.__cause__ is not None and _is_consequence(error.__cause__):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(sign in str(error).lower() for sign in _LOST_PEER)


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=lambda scalar: scalar.item())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        log.warning("rank 0 returned a %s, which is no plain number, text, list or dict: it is dropped", type(value))
        return "null"


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the one that started it is gone, however it went (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != parent:
        leave(1)
