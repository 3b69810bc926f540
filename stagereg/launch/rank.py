"""One rank of a run: its part in the process group, the job, and how it ends.

A rank is a process with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, whoever has
started it. All ranks of a run share one directory, one ``.hydra`` and one log, which rank 0 writes, and one clock. When
ranks fail, the cause is printed once, and errors that follow from it are not.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import stagereg.base.first_step as first_step
import stagereg.base.record as record
import stagereg.base.shutdown as shutdown
import stagereg.extensions.goodput.phases as phases
import stagereg.extensions.recovery.rank_failure as loss
from stagereg.base.address import is_one_machine, listen, loopback
from stagereg.base.command import command_to_resume, publish_run, resume_overrides
from stagereg.base.crash_report import format_error
from stagereg.base.machine import end_with, ranks_here
from stagereg.base.output import warn
from stagereg.base.overrides import quoted
from stagereg.errors import (
    ConfigError,
    InstallationError,
    LaunchError,
    Preempted,
    RegistryError,
    Stopped,
    UnevenInputsError,
    is_consequence,
)
from stagereg.extensions.recovery.heartbeat import ENDED
from stagereg.launch.agreed_values import VALUES, resolved, take
from stagereg.launch.command_line import number
from stagereg.launch.run_store import RunStore, name_attempt

log = logging.getLogger(__name__)

LAUNCHER = "STAGEREG_LAUNCHER"
"""The environment variable with the process number of the ``stagereg.main`` that has started a rank."""
ATTEMPT = "STAGEREG_ATTEMPT"  # the environment variable with how often it has started the run again
KEEPS_CODE = "STAGEREG_KEEPS_CODE"
"""The environment variable with the process number of the ``stagereg run`` that has started a rank."""
STEPPED = "stepped"  # the key that a rank sets in the store of the run when it takes its first step
NEXT_START = "next start"  # the key of what rank 0 publishes of the next start, if that skips the newest checkpoint
_LINGER_S = 3.0  # seconds a failed rank waits for the others to reach their end too, before its own end takes them down
_EXIT_S = 10.0  # likewise a rank that exits because the run was signalled: the others exit too
_TOGETHER_S = 60.0  # likewise where the error has reached all ranks on purpose: others may still be saving
_LOST_S = 5.0  # seconds in which a rank that failed since another one is gone hears of that
_MERCY_S = 2.0  # seconds between the failure of another rank and the end of a rank that has not failed yet
NOTICE_S = 10.0  # seconds in which a loss is noticed where the config does not say
_DIFFERS = (
    "comes from a resolver that gives each process another value, so all ranks use the value that was resolved first. "
    "For a value of each rank's own, read the environment variable RANK in the resolver, or write ${oc.env:RANK}."
)


@dataclass(frozen=True)
class Rank:
    """This process as one of ``world_size`` ranks, connected to the others through ``store``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool  # whether `stagereg.main` has started the rank
    store: RunStore

    @classmethod
    def current(cls) -> Rank | None:
        """This process's rank, or ``None`` if it is none. Waits for the other ranks."""
        phases.mark("imported")
        if not is_rank():
            return None
        launcher = os.environ.get(LAUNCHER)
        if launcher is not None or "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(int(launcher or os.getppid()))
            phases.mark("launched", phases.process_start(str(os.getppid())))
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = PrefixStore("stagereg", _open_store(rank, world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = ranks_here(world_size)
        attempt = name_attempt(store, rank, world_size) if launcher is None else os.environ.get(ATTEMPT, "0")
        run_store = RunStore(store, rank, world_size, attempt)
        phases.mark("connected")
        return cls(rank, world_size, local_rank, local_world_size, launcher is not None, run_store)

    def overrides(self) -> list[str]:
        """Hydra overrides that make this rank follow its run; waits for rank 0 where that decides the directory."""
        follow: list[str] = []
        if self.rank > 0 or self.store.begun():
            follow.append(f"hydra.run.dir={quoted(self.store.run()['dir'])}")
        if self.launched or self.rank > 0:  # else this process writes .hydra, and runs the callbacks
            follow += ["hydra.output_subdir=null", "hydra.callbacks=???"]
        if self.rank > 0:
            follow += ["++hydra.job_logging.root=null", "++hydra.hydra_logging.root=null"]  # rank 0 alone logs
        return follow

    def run(self, task: Callable[[Any], Any], cfg: Any) -> Any:
        """Run the job in the process group; return rank 0's value. Ends the process if the task fails."""
        self._agree_on_run(cfg)
        # Before there is a process group, of which a resolver could ask for the number of the rank.
        values = json.loads(os.environ[VALUES]) if self.launched else resolved(cfg)
        try:
            with self._watched(_checked_notice(cfg)), _process_group(self):
                self.store.set(f"in job/{self.rank}", True)
                if self.launched:  # the launcher sees that a signal has ended this rank
                    first_step.call_at_first_step(self._report_step)
                try:
                    self._agree_on_values(cfg, values)
                    attempt, failure = self.store.run()["attempt"], self.store.failure
                    value = run_recorded(task, cfg, attempt, failure.take() if self.rank == 0 else None)
                except (Preempted, Stopped) as error:
                    self._exit(error)
                except Exception as error:
                    # Before the group closes, so that a cause is known before a consequence can come of it.
                    self._report_cause(error)
                    if is_consequence(error):
                        loss.await_saved()
                    raise
                except SystemExit as error:
                    if error.code:
                        self._report_cause(LaunchError(f"left by sys.exit({error.code!r})"))
                    raise
                finally:
                    self.store.set_ended()
                # A group that one rank closes while another still connects to it, fails there.
                self.store.await_ended(math.inf)
        except Exception as error:
            self.fail(error)
        if self.rank == 0 and self.launched:
            self.store.set("result", _for_json(value))
        return value

    def fail(self, error: Exception) -> NoReturn:
        """End this rank because of an error: report it, if it is a cause, once all ranks had the time to."""
        try:
            self._report_cause(error)
            self.store.set_ended()
            self.store.await_ended(_TOGETHER_S if isinstance(error, UnevenInputsError) else _LINGER_S)
            if self.store.get("cause is known") is None:
                lost = self.store.lost(_LOST_S)  # on all ranks, since the first to exit has the others ended
                if self.store.is_first("a consequence"):
                    self._report(error, lost and f"{lost} {self.store.saved}".rstrip() + " Seen here:\n", lost)
        except Exception:  # of the store; others may have reported a cause before it went
            if self.local_world_size < self.world_size and is_consequence(error):  # the store may be on a lost machine
                host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                lost = f"{self.store.lost(_LOST_S)} {self.store.saved}".strip()
                gone = f"lost rank 0's torchrun or machine: the store of this run, on {host}, is gone"
                text = f"{gone}{lost and '; '}{lost.rstrip('.')}. If a rank there reported a cause, that is it."
                self._print(f"{text} Seen here:\n{format_error(error)}")
        self.store.leave()
        shutdown.exit_now(1)

    def _may_be_known(self, lost: str) -> bool:
        """Whether the launcher may have seen what happened: of its own processes, with the signal or the exit code."""
        ended = bool(lost) and all(how.endswith(ENDED) for how in self.store.lost_ranks().values())
        return ended and self.launched and self.local_world_size == self.world_size and not self.store.saved

    @contextlib.contextmanager
    def _watched(self, notice_s: float) -> Iterator[None]:
        """Know of lost ranks in a ``with`` block, in which what registers saves after a loss."""
        after, ending = loss.EmergencySave(self.store, self.rank, self.world_size, notice_s), threading.Lock()

        def end(lost: str) -> None:
            if ending.acquire(blocking=False):  # once; the watch goes on to listen
                # Either may hang where the store is lost, too.
                threading.Thread(target=self.store.failure.leave, args=(lost,), daemon=True).start()
                threading.Thread(target=self._end_for_loss, args=(after,), daemon=True).start()

        with self.store.watch(notice_s, end) as after.watch, loss.of_process(after):
            yield

    def _end_for_loss(self, after: loss.EmergencySave) -> None:
        """Save with others that are left, and end this rank, which may wait for ever for one that is lost."""
        after.save()
        mercy_s = min(_MERCY_S, after.notice_s / 8)
        if not self.store.ended.wait(mercy_s):
            self._report_loss(mercy_s)
            shutdown.exit_now(1)

    def _report_loss(self, limit_s: float) -> None:
        lost = f"{self.store.lost(0.0)} {self.store.saved}".rstrip()

        def report() -> None:
            try:
                if self.store.is_first("a loss"):
                    self._report(LaunchError(lost), lost=lost)
            except RuntimeError:  # of the store, which is gone
                self._print(lost)

        reporting = threading.Thread(target=report, daemon=True)  # where the store is lost too, it may hang
        reporting.start()
        reporting.join(limit_s)
        if reporting.is_alive():
            self._print(lost)

    def _exit(self, error: Preempted | Stopped) -> NoReturn:
        """End this rank because the run was signalled: with the others, so that none takes its end for a failure."""
        with contextlib.suppress(Exception):
            if self.rank == 0:
                print_exit(error)
            self.store.set_ended()
            self.store.await_ended(_EXIT_S)
        raise error from None

    def _agree_on_run(self, cfg: Any) -> None:
        """Publish the run on rank 0, and have ``${now:...}`` give the same time on all ranks."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        if self.rank == 0:
            hydra = HydraConfig.get()
            self.store.begin(hydra.runtime.output_dir, resume_overrides(hydra, cfg))
        run = self.store.run()
        publish_run(run["dir"], run["resume"])
        started = datetime.fromtimestamp(run["time"])
        # OmegaConf 2.4 warns of the long name; until 2.3 the short one was for resolvers of an older sort.
        short: Any = OmegaConf.register_resolver
        register = short if "use_cache" in inspect.signature(short).parameters else OmegaConf.register_new_resolver
        register("now", lambda pattern: started.strftime(pattern), use_cache=True, replace=True)

    def _agree_on_values(self, cfg: Any, values: Any) -> None:
        """Take the values that rank 0 has, once for all ranks; print the key of each that differs."""
        import torch.distributed as dist

        sent = [values]
        dist.broadcast_object_list(sent)
        for key in take(cfg, sent[0]):
            if self.store.is_first(f"differs: {key}"):
                warn(f"stagereg: {key} {_DIFFERS}")

    def _report_step(self) -> None:
        with contextlib.suppress(RuntimeError):  # of the store, which is gone
            self.store.set(STEPPED, True)

    def _report_cause(self, error: Exception) -> None:
        if not is_consequence(error):
            self.store.set("cause is known", True)
            if isinstance(error, (ConfigError, RegistryError, InstallationError)):
                self.store.set("comes again", True)
            if self.store.is_first(format_error(error)):
                self._report(error)

    def _report(self, error: Exception, preface: str = "", lost: str = "") -> None:
        """Report an error, or what came of ranks that are ``lost``; ``preface`` comes first."""
        text = preface + format_error(error)
        self.store.failure.leave(text)
        if self.launched:
            self.store.add_error(text, "consequences" if self._may_be_known(lost) else "errors")
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        warn(f"rank {self.rank}: {text}")


def _open_store(rank: int, world_size: int) -> Any:
    """Connect to the store of the run; rank 0 opens it, unless the launcher has, on loopback where that is enough."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    if is_one_machine() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_ADDR"] = host = loopback()
        if rank == 0:
            port = int(os.environ["MASTER_PORT"])
            with contextlib.suppress(OSError):  # torch says why, or has this process's store there
                own: Any = {"multi_tenant": True, "master_listen_fd": listen(host, port).detach()}
                return TCPStore(host, port, world_size, True, default_pg_timeout, **own)
    return next(iter(rendezvous("env://")))[0]


def is_rank() -> bool:
    """Whether this process was started as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def alone(task: Callable[[Any], Any], cfg: Any) -> Any:
    """Run the job in this process, as the only rank; a process group that is already there is used and kept."""
    import torch.distributed as dist
    from hydra.core.utils import env_override

    if dist.is_initialized():
        return task(cfg)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = RunStore(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    with env_override(variables), _process_group(Rank(0, 1, 0, 1, False, store)):
        return task(cfg)


def run_recorded(task: Callable[[Any], Any], cfg: Any, attempt: str = "", failure: dict[str, Any] | None = None) -> Any:
    """Run the job to its end, recorded in the directory of Hydra's job with the accelerator as a fact.

    ``attempt`` is as ``run`` of :func:`stagereg.base.record.recording`; ``failure`` is what rank 0 was told of the
    failure that this start follows.
    """
    import torch
    import torch.distributed as dist
    from hydra.core.hydra_config import HydraConfig

    directory = Path(HydraConfig.get().runtime.output_dir)
    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    if dist.get_rank() == 0:
        phases.begin(directory, attempt, failure)
    with record.recording(directory, dist.get_rank(), dist.get_world_size(), attempt, **device):
        try:
            value = task(cfg)
        except BaseException as error:
            shutdown.note_failure(error)
            raise
        shutdown.finish()
    return value


@contextlib.contextmanager
def _process_group(rank: Rank) -> Iterator[None]:
    """A process group for the time of the job: gloo for CPU tensors, and the accelerator's own where there is one."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # by what has started the rank
        yield
        return
    if is_one_machine() and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens at the address of the host's name
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.local_rank % torch.cuda.device_count())
        # NCCL refuses a group in which ranks share a device.
        enough = rank.local_world_size <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if enough and dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, store=rank.store.group, rank=rank.rank, world_size=rank.world_size)
    phases.mark("grouped")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def print_exit(error: Preempted | Stopped) -> None:
    """Print how a run has ended, and the command that resumes."""
    text = str(error)
    if isinstance(error, Preempted):
        command = command_to_resume(error.directory)
        if ".dir=" in command:
            text = f"preempted by {error.received.name}: step {error.step} is saved"
        text += f"; {command} resumes from there{torchrun_note()}"
    warn(text)


def torchrun_note() -> str:
    """Return what a run that has saved and exits says of ``torchrun``; empty below any other launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or KEEPS_CODE in os.environ:
        return ""
    return "; torchrun shows a traceback and ends with 1 all the same, `stagereg run` in its place with 75"


def _checked_notice(cfg: Any) -> float:
    value = number(cfg, "notice_s", NOTICE_S)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= 3600:
        raise LaunchError(f"notice_s={value} is no number of seconds from 1 to 3600, in which a lost rank is noticed")
    return float(value)


def _for_json(value: Any) -> Any:
    """The value as JSON has it, tensors of one number as that number; ``None`` if JSON cannot have it."""
    try:
        return json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        log.warning("the %s that rank 0 returned cannot be sent as JSON, so the job returns None", type(value).__name__)
        return None
