"""``stagereg.main``: a decorator like ``hydra.main`` for a training function, which also starts the ranks.

``python train.py nproc=2`` composes the config in this process and runs the job on local ranks (``launch``). Under
``torchrun``, this process is already a rank (``rank``). With ``nproc=1``, or without ``nproc``, this process is the
only rank. Each job of a sweep runs on fresh ranks.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from typing import Any

import stagereg.base.first_step as first_step
import stagereg.base.shutdown as shutdown
from stagereg.base.command import publish_run, resume_overrides
from stagereg.base.crash_report import format_error
from stagereg.base.output import warn
from stagereg.base.overrides import raw
from stagereg.errors import ConfigError, LaunchError, Preempted, StageregError, Stopped
from stagereg.launch.command_line import CommandLine, number, parsed
from stagereg.launch.exits import print_exit
from stagereg.launch.extension import begin, expect_installed, launch_extensions, mark
from stagereg.launch.job import run_recorded
from stagereg.launch.launch import RanksFailedError, checked_nproc, launch
from stagereg.launch.rank import SECRET, Rank, alone, is_rank
from stagereg.launch.scheduler_task import SchedulerTask

_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's environment variable that makes errors propagate instead of being printed
_INITIALISED = (
    "the program calls init_process_group, but stagereg.main has already initialised the process group: gloo for CPU "
    "tensors, plus the accelerator's own backend. Remove the calls of init_process_group, destroy_process_group and "
    "set_device."
)
_SECOND_CALL = (
    "only the first call of a function of stagereg.main in a script can start ranks, because each rank runs the script "
    "up to the end of that call. Move the second call to another script, or call both functions in one: "
    "`def run(cfg): train(cfg); evaluate(cfg)` under stagereg.main."
)
_called: weakref.WeakSet[Any] = weakref.WeakSet()
"""The scripts (modules ``__main__``) that have called a function decorated with :func:`main`."""


def main(
    config_path: str | None = None, config_name: str | None = None, version_base: str | None = "1.3"
) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorate a training function ``train(cfg)`` so that calling ``train()`` runs the program.

    Every rank calls the function with the same composed config, inside an initialised process group: gloo for CPU
    tensors, plus the accelerator's own backend if there is an accelerator. The option ``nproc`` sets the number of
    local ranks; under ``torchrun``, its ranks are used. The modules that the option ``plugins`` lists are imported
    before Hydra resolves config groups (:mod:`stagereg.config.plugins`). Rank 0's return value is the job's return
    value, for sweepers and callbacks; with several ranks it is sent as JSON. Each rank records the events of
    checkpointers, joins and :func:`stagereg.log` in the job's output directory. A call with a config, ``train(cfg)``,
    runs the function in this process, without a command line and without a record, and returns its value.

    All ranks get the same overrides, and the same time in ``${now:...}``. The launcher, or rank 0 under ``torchrun``,
    resolves the values of the program's own resolvers once for all ranks. A warning names each key whose resolver
    returns a different value on some rank. Environment variables (``${oc.env:RANK}``), values that depend on the rank,
    and objects that JSON cannot represent are resolved on each rank.

    A rank that the launcher started exits when the function returns, so only the launcher runs the rest of the script.
    A later call in the same script cannot start ranks.

    Args:
        config_path: directory of the configs, relative to the script, as in ``hydra.main``.
        config_name: name of the primary config.
        version_base: as in ``hydra.main``.

    Raises:
        SystemExit: With code 1 after an error, which has been printed to stderr; 130 after SIGINT; 143 after SIGTERM;
            75 if SIGTERM or SIGUSR1 arrived and the run saved its last step or had not taken a step.
    """

    def decorate(task: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(task)
        def start(cfg: Any = None) -> Any:
            if cfg is not None:
                return _with_plugins(functools.partial(alone, task), cfg)
            return _start(task, {"config_path": config_path, "config_name": config_name, "version_base": version_base})

        return start

    return decorate


def _start(task: Callable[[Any], Any], arguments: dict[str, Any]) -> None:
    rank = None
    try:
        begin()
        rank = Rank.current()
        job = _Job(task, CommandLine.of_this_process(), rank)
        _import_plugins()
        if rank is not None:
            _follow(rank)
        elif parsed(sys.argv[1:]).multirun:  # tasks of a scheduler's job inherit the secret through the environment
            os.environ.setdefault(SECRET, secrets.token_hex(32))
        _run_hydra(job, arguments)
        if rank is not None and rank.launched:  # only the launcher runs the rest of the script
            sys.exit()
    except KeyboardInterrupt:
        if is_rank():
            shutdown.exit_now(130)
        warn("stopped by SIGINT")
        sys.exit(130)
    except StageregError as error:
        if rank is not None:
            rank.fail(error)
        _print(error)
        sys.exit(1)
    finally:
        first_step.take_step()  # restores the default signal handling


def _import_plugins() -> None:
    """Import the plugins that the command line names. Hydra later imports the plugins that configs name."""
    import stagereg.config.plugins as plugins

    known = parsed(sys.argv[1:])
    try:
        plugins.from_overrides(os.environ.get("COMP_LINE", "").split() if known.shell_completion else known.overrides)
    except plugins.PluginError:
        if not known.shell_completion:  # during completion, the user is still typing the name
            raise


def _follow(rank: Rank) -> None:
    """Add the overrides that all ranks of the run share to this rank's command line."""
    known = parsed(sys.argv[1:])
    if known.multirun or "hydra.mode=MULTIRUN" in known.overrides:
        raise LaunchError(_how_to_sweep(rank))
    if known.help or known.hydra_help or known.cfg or known.info or known.shell_completion:
        if rank.rank > 0:  # only rank 0 prints the text and exits
            shutdown.exit_now(0)
        return
    sys.argv = [*sys.argv, *rank.overrides()]


def _how_to_sweep(rank: Rank) -> str:
    """Return an error message with the command that replaces ``torchrun ... train.py -m``."""
    nodes = rank.world_size // rank.local_world_size
    where = f"; on {nodes} machines, each job of the sweep must be a job of the scheduler" if nodes > 1 else ""
    slurm = f"hydra/launcher=submitit_slurm hydra.launcher.nodes={nodes} " if nodes > 1 else ""
    command = f"python {sys.argv[0]} -m nproc={rank.local_world_size} {slurm}..."
    return f"a sweep needs fresh ranks for each job, but torchrun starts ranks once{where}. Run `{command}` once."


def _run_hydra(job: _Job, arguments: dict[str, Any]) -> None:
    """Run the job with ``hydra.main``. Raises ``StageregError``; Hydra prints all other errors."""
    import hydra

    # Only this private function of Hydra prints errors without Hydra's frames.
    from hydra._internal.utils import run_and_report
    from hydra.core.utils import env_override

    from stagereg.config.suggestions import explain

    if arguments["version_base"] == "1.3" and not hydra.__version__.startswith("1.3."):
        del arguments["version_base"]  # later releases warn about this default if it is passed
    try:
        with env_override({_FULL_ERROR: "1"}):
            hydra.main(**arguments)(job)()
    except StageregError:
        raise
    except Exception as error:
        if explanation := explain(error):
            raise ConfigError(explanation) from error
        run_and_report(functools.partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error


def _with_plugins(task: Callable[[Any], Any], cfg: Any) -> Any:
    """Import all plugins that the config names, then run the task and explain frequent errors."""
    from stagereg.config.plugins import from_config
    from stagereg.config.resolved_tree import SWITCHES

    from_config(cfg)
    try:
        return task(cfg)
    except ValueError as error:
        if "initialize the default process group twice" in str(error):
            raise LaunchError(_INITIALISED) from error
        raise
    except AttributeError as error:  # base class of OmegaConf's error
        group = getattr(error, "key", None)
        if group in SWITCHES and group not in cfg:
            begin = "Begin the config with `defaults: [stagereg, _self_]`"
            raise LaunchError(f"the config has no key {group!r}. {begin}; or {SWITCHES[group]}") from error
        raise


class _Job:
    """The function that Hydra calls with the composed config. Picklable, because some launchers use new processes."""

    def __init__(self, task: Callable[[Any], Any], command: CommandLine, rank: Rank | None) -> None:
        # Hydra finds the script and the config directory through the wrapped function.
        functools.update_wrapper(self, task)
        self._task = functools.partial(_with_plugins, task)
        self._command = command
        self._rank = rank
        script = sys.modules["__main__"]
        self._is_first = script not in _called
        _called.add(script)
        self._full_error = os.environ.get(_FULL_ERROR, "0")

    def __call__(self, cfg: Any) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.utils import env_override
        from hydra.types import RunMode

        from stagereg.config.instantiate import check_values
        from stagereg.config.suggestions import refuse_unused

        mark("composed")
        hydra = HydraConfig.get()
        one_of_several = hydra.mode == RunMode.MULTIRUN
        with env_override({_FULL_ERROR: self._full_error}):
            try:
                refuse_unused(cfg, raw(hydra.overrides.task))
                check_values(cfg)
                expect_installed(cfg)
                if self._rank is not None:
                    if one_of_several:
                        raise LaunchError(_how_to_sweep(self._rank))
                    return self._rank.run(self._task, cfg)
                return self._run(cfg, hydra, one_of_several)
            except StageregError as error:
                if self._rank is not None:
                    self._rank.fail(error)
                if one_of_several:
                    raise
                _print(error)
                # Hydra prints additional lines for every exception of a job except SystemExit.
                raise SystemExit(1) from None

    def _run(self, cfg: Any, hydra: Any, one_of_several: bool) -> Any:
        nproc, extensions = checked_nproc(number(cfg, "nproc", 1)), launch_extensions()
        needed = [each.check(cfg) for each in extensions]
        if nproc > 1 or any(needed) or one_of_several or SchedulerTask.current().count > 1:
            if not self._is_first:
                raise LaunchError(_SECOND_CALL)
            return launch(self._command, cfg, hydra, nproc, extensions)
        publish_run(hydra.runtime.output_dir, resume_overrides(hydra, cfg))
        try:
            return alone(functools.partial(run_recorded, self._task), cfg)
        except (Preempted, Stopped) as error:
            print_exit(error)
            raise
        except Exception as error:
            raise RanksFailedError(f"rank 0: {format_error(error)}") from error


def _print(error: StageregError) -> None:
    warn(str(error) if isinstance(error, RanksFailedError) else f"stagereg: {error}")
