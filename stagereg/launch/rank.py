"""One rank of a run: it joins the process group, runs the job, and reports why it exits.

A rank is a process with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in its environment, under any
launcher. All ranks of a run share one directory, with one ``.hydra`` folder and one log, which rank 0 writes. They also
share one value of ``${now:...}``. If ranks fail, only the first error is printed, without the errors that it causes.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import stagereg.base.shutdown as shutdown
import stagereg.errors as errors
from stagereg.base.command import publish_run, resume_overrides
from stagereg.base.crash_report import format_error
from stagereg.base.deadline import answer_within
from stagereg.base.machine import end_with, ranks_here
from stagereg.base.output import warn
from stagereg.base.overrides import quoted
from stagereg.errors import ConfigError, LaunchError, Preempted, Stopped, UnevenInputsError, is_consequence
from stagereg.launch.agreed_values import VALUES, resolved, take
from stagereg.launch.exits import print_exit
from stagereg.launch.extension import Cause, answers, first, mark, rank_extensions
from stagereg.launch.job import for_json, name_attempt, open_store, process_group, run_recorded
from stagereg.launch.run_store import RunStore

LAUNCHER = "STAGEREG_LAUNCHER"
"""Environment variable with the process ID of the ``stagereg.main`` that started a rank."""
ATTEMPT = "STAGEREG_ATTEMPT"  # environment variable with the number of restarts of the run
SECRET = "STAGEREG_SECRET"
"""Environment variable with the secret of a run: set to the same text on all ranks, or on no rank."""
_LINGER_S = 3.0  # seconds that a failed rank waits for other ranks to finish, because its exit terminates them
_EXIT_S = 10.0  # seconds that a rank waits for other ranks before it exits after a signal to the run
_TOGETHER_S = 60.0  # seconds that a rank waits after a join raised an error on all ranks: other ranks may be saving
_DIFFERS = (
    "is set by a resolver that returns a different value in each process, so all ranks use the first resolved value. "
    "For a value per rank, read the environment variable RANK in the resolver, or write ${oc.env:RANK}."
)


@dataclass(frozen=True)
class Rank:
    """The rank that runs in this process. The ranks communicate through the rendezvous store ``store``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool  # whether `stagereg.main` started the rank
    store: RunStore

    @classmethod
    def current(cls) -> Rank | None:
        """Connect this process to the other ranks, and return its rank; ``None`` if this process is not a rank."""
        mark("imported")
        if not is_rank():
            return None
        launcher = os.environ.get(LAUNCHER)
        if launcher is not None or "TORCHELASTIC_RUN_ID" in os.environ:
            end_with(int(launcher or os.getppid()))
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = PrefixStore("stagereg", open_store(rank, world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = ranks_here(world_size)
        attempt = name_attempt(store, rank, world_size) if launcher is None else os.environ.get(ATTEMPT, "0")
        run_store = RunStore(store, rank, world_size, attempt)
        mark("connected")
        return cls(rank, world_size, local_rank, local_world_size, launcher is not None, run_store)

    def overrides(self) -> list[str]:
        """Return the overrides that this rank needs to share the run's directory. May wait for rank 0's choice."""
        follow: list[str] = []
        if self.rank > 0 or self.store.begun():
            follow.append(f"hydra.run.dir={quoted(self.store.run()['dir'])}")
        if self.launched or self.rank > 0:  # otherwise this process writes .hydra and runs the callbacks
            follow += ["hydra.output_subdir=null", "hydra.callbacks=???"]
        if self.rank > 0:
            follow += ["++hydra.job_logging.root=null", "++hydra.hydra_logging.root=null"]  # only rank 0 logs
        return follow

    def run(self, task: Callable[[Any], Any], cfg: Any) -> Any:
        """Run the job in the process group, and return the value of the task. If the task fails, exit the process."""
        self._agree_on_run(cfg)
        # Resolved before the process group exists, so that no resolver can read the rank from the group.
        values = json.loads(os.environ[VALUES]) if self.launched else resolved(cfg)
        try:
            with contextlib.ExitStack() as around:
                for each in rank_extensions():
                    around.enter_context(each.around(self, cfg))
                place = self.rank, self.world_size, self.local_rank, self.local_world_size
                around.enter_context(process_group(self.store.group, *place))
                self.store.set(f"in job/{self.rank}", True)
                try:
                    self._agree_on_values(cfg, values)
                    value = run_recorded(task, cfg, self.store.run()["attempt"])
                except (Preempted, Stopped) as error:
                    self._exit(error)
                except Exception as error:
                    # Reported before the group closes, since closing causes errors on other ranks.
                    self._report_cause(error)
                    if is_consequence(error):
                        answers(rank_extensions(), lambda each, error=error: each.ending(error))  # type: ignore[misc]
                    raise
                except SystemExit as error:
                    if error.code:
                        self._report_cause(LaunchError(f"called sys.exit({error.code!r})"))
                    raise
                finally:
                    self.store.set_ended()
                # If one rank closes the group while another rank still connects, the other rank fails.
                self.store.await_ended(math.inf, self._expect_no_failure)
        except Exception as error:
            self.fail(error)
        if self.rank == 0 and self.launched:
            self.store.set("result", for_json(value))
        return value

    def fail(self, error: Exception) -> NoReturn:
        """Exit this rank after an error. Reports the error only if no other rank has caused the error."""
        try:
            self._report_cause(error)
            self.store.set_ended()
            limit_s = _TOGETHER_S if isinstance(error, UnevenInputsError) else _LINGER_S
            self.store.await_ended(limit_s, self.failed_ranks)
            if self.store.get("cause is known") is None:
                cause = self.cause()  # called on all ranks, since the first exit terminates the others
                if self.store.is_first("a consequence"):
                    self._report(error, cause)
        except Exception:  # the store has failed; other ranks may have reported a cause before
            if self.local_world_size < self.world_size and is_consequence(error):  # the store's machine may have failed
                host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                lost = self.cause().text
                gone = f"rank 0's torchrun or machine failed: the rendezvous store at {host} is unreachable"
                text = f"{gone}{lost and '; '}{lost.rstrip('.')}. See the errors of the ranks on that machine."
                self._print(f"{text} Error on this rank:\n{format_error(error)}")
        answers(rank_extensions(), lambda each: each.leave())
        shutdown.exit_now(1)

    def end_after_failure(self, save: Callable[[], object], cause: Callable[[], Cause], mercy_s: float) -> None:
        save()
        if not self.store.ended.wait(mercy_s):
            found = cause()

            def report() -> bool:
                if self.store.is_first("a loss"):
                    self._report(None, found)
                return True

            if answer_within(mercy_s, report) is None:  # the machine of the store has failed too
                self._print(found.text)
            shutdown.exit_now(1)

    def failed_ranks(self) -> set[int]:
        """Return the ranks that extensions have detected as failed. Thread-safe."""
        return {rank for found in answers(rank_extensions(), lambda each: each.failed_ranks()) for rank in found}

    def cause(self) -> Cause:
        """Return the failure of other ranks; its text is empty if no extension detects one. May wait some seconds.

        In that case, a launcher that started all ranks detects the failure from their exit codes.
        """
        return first(rank_extensions(), lambda each: each.cause()) or Cause("", True)

    def note(self, why: str) -> None:
        answers(rank_extensions(), lambda each: each.noted(self, why))

    def _expect_no_failure(self) -> tuple[int, ...]:
        """Raise ``LaunchError`` if ranks have failed. Otherwise return an empty tuple."""
        if self.failed_ranks():
            raise LaunchError(self.cause().text)
        return ()

    def _exit(self, error: Preempted | Stopped) -> NoReturn:
        """Exit this rank together with the other ranks after a signal, so that no rank reports a failure."""
        with contextlib.suppress(Exception):
            if self.rank == 0:
                print_exit(error)
            self.store.set_ended()
            self.store.await_ended(_EXIT_S, self.failed_ranks)
        raise error from None

    def _agree_on_run(self, cfg: Any) -> None:
        """Publish the run's directory on rank 0, and make ``${now:...}`` resolve to the same time on all ranks."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        if self.rank == 0:
            hydra = HydraConfig.get()
            self.store.begin(hydra.runtime.output_dir, resume_overrides(hydra, cfg))
        run = self.store.run()
        publish_run(run["dir"], run["resume"])
        started = datetime.fromtimestamp(run["time"])
        # OmegaConf 2.4 deprecates register_new_resolver; until 2.3, register_resolver took legacy resolvers.
        short: Any = OmegaConf.register_resolver
        register = short if "use_cache" in inspect.signature(short).parameters else OmegaConf.register_new_resolver
        register("now", lambda pattern: started.strftime(pattern), use_cache=True, replace=True)

    def _agree_on_values(self, cfg: Any, values: Any) -> None:
        """Use rank 0's resolved values on all ranks. Warn once about each key whose values differ. Collective."""
        import torch.distributed as dist

        sent = [values]
        dist.broadcast_object_list(sent)
        for key in take(cfg, sent[0]):
            if self.store.is_first(f"differs: {key}"):
                warn(f"stagereg: {key} {_DIFFERS}")

    def _report_cause(self, error: Exception) -> None:
        if not is_consequence(error):
            self.store.set("cause is known", True)
            if isinstance(error, (ConfigError, errors.RegistryError, errors.InstallationError)):
                self.store.set("comes again", True)
            if self.store.is_first(format_error(error)):
                self._report(error)

    def _report(self, error: Exception | None, cause: Cause | None = None) -> None:
        """Report the error of this rank, after the failure of other ranks that caused it (``cause``), if any."""
        texts = [*([cause.text] if cause else []), *([format_error(error)] if error else [])]
        text = " Error on this rank:\n".join(filter(None, texts))
        self.note(text)
        if self.launched:
            # If the launcher of all ranks detects the same failure, it prints that failure instead.
            seen = cause is not None and cause.seen and self.local_world_size == self.world_size
            self.store.add_error(text, "consequences" if seen else "errors")
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        warn(f"rank {self.rank}: {text}")


def is_rank() -> bool:
    """Return whether this process was started as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def alone(task: Callable[[Any], Any], cfg: Any) -> Any:
    """Run the job in this process, as the only rank. An existing process group is used, and is not closed."""
    import torch.distributed as dist
    from hydra.core.utils import env_override

    if dist.is_initialized():
        return task(cfg)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = RunStore(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
    with env_override(variables), process_group(store.group, 0, 1, 0, 1):
        return task(cfg)
