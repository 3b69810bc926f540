"""``stagereg.main``: Hydra's entry point for a training function, which also starts the ranks.

``python train.py nproc=2`` composes the config in this process and runs the job on local ranks (``launch``). Under
``torchrun`` this process is a rank already (``rank``). With ``nproc=1``, or without ``nproc``, this process is the only
rank. Each job of a sweep gets fresh ranks.
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

_FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch for errors that are raised, not printed
_INITIALISED = (
    "the program calls init_process_group, and stagereg.main has done that already: with gloo for CPU tensors, and the "
    "accelerator's own backend beside it. Leave the call out, and destroy_process_group and set_device with it."
)

_SECOND_CALL = (
    "only the first call of a function of stagereg.main in a script can start ranks, as each rank runs the script from "
    "its start to the end of that call. Put the second call into a script of its own, or call both functions in one: "
    "`def run(cfg): train(cfg); evaluate(cfg)` under stagereg.main."
)
_called: weakref.WeakSet[Any] = weakref.WeakSet()
"""The scripts, as the module ``__main__``, that have called a function of :func:`main`."""


def main(
    config_path: str | None = None, config_name: str | None = None, version_base: str | None = "1.3"
) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorate a training function ``train(cfg)`` so that calling ``train()`` runs the program.

    Every rank calls the function with the same composed config, inside an initialised process group: gloo for CPU
    tensors, the accelerator's own beside it where there is one. ``nproc`` of the config says how many local ranks to
    start; under ``torchrun`` the ranks given are used. Modules named by ``plugins``, in a config or on the command
    line, are imported before options are chosen (:mod:`stagereg.config.plugins`). What rank 0 returns is the job's
    return value, for sweepers and callbacks; from several ranks it comes as JSON. Meanwhile each rank records what
    checkpointers, joins and :func:`stagereg.log` emit, in the job's output directory. ``train(cfg)`` runs the function
    in this process, with no command line and no recording, and returns its value.

    All ranks get the same overrides, and the time of one clock in ``${now:...}``. The values of the program's own
    resolvers are resolved once, by the launcher or by rank 0 under ``torchrun``; a warning names each key whose
    resolver gives another value on some rank. Each rank itself resolves values of its environment
    (``${oc.env:RANK}``), values that depend on the number of a rank, and objects that JSON cannot hold.

    A rank that the launcher has started ends when the function returns, so the script after the first call runs in the
    launcher only. A later call in the same script cannot start ranks.

    Args:
        config_path: folder of the configs, relative to the script, as in ``hydra.main``.
        config_name: name of the primary config.
        version_base: as in ``hydra.main``.

    Raises:
        SystemExit: with code 1 after an error, which is on stderr by then; 130 after SIGINT and 143 after SIGTERM; 75
            if SIGTERM or SIGUSR1 came, and the run has saved its last step or had not taken a step.
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
        elif parsed(sys.argv[1:]).multirun:  # the tasks of a scheduler's job inherit it, and tell it to no store
            os.environ.setdefault(SECRET, secrets.token_hex(32))
        _run_hydra(job, arguments)
        if rank is not None and rank.launched:  # the rest of the script is the launcher's
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
        first_step.take_step()  # the program continues, or ends, as any other


def _import_plugins() -> None:
    """Import what the command line names; those that configs name are imported while Hydra composes."""
    import stagereg.config.plugins as plugins

    known = parsed(sys.argv[1:])
    try:
        plugins.from_overrides(os.environ.get("COMP_LINE", "").split() if known.shell_completion else known.overrides)
    except plugins.PluginError:
        if not known.shell_completion:  # else a name that is still being typed
            raise


def _follow(rank: Rank) -> None:
    """Make this rank's command line the one of its run."""
    known = parsed(sys.argv[1:])
    if known.multirun or "hydra.mode=MULTIRUN" in known.overrides:
        raise LaunchError(_how_to_sweep(rank))
    if known.help or known.hydra_help or known.cfg or known.info or known.shell_completion:
        if rank.rank > 0:  # Hydra shows something and leaves, once
            shutdown.exit_now(0)
        return
    sys.argv = [*sys.argv, *rank.overrides()]


def _how_to_sweep(rank: Rank) -> str:
    """What to run in place of ``torchrun ... train.py -m``."""
    nodes = rank.world_size // rank.local_world_size
    where = f", and over {nodes} machines each job has to be a scheduler's own" if nodes > 1 else ""
    slurm = f"hydra/launcher=submitit_slurm hydra.launcher.nodes={nodes} " if nodes > 1 else ""
    command = f"python {sys.argv[0]} -m nproc={rank.local_world_size} {slurm}..."
    return f"a sweep needs fresh ranks for each job, torchrun starts them only once{where}: run `{command}`, once"


def _run_hydra(job: _Job, arguments: dict[str, Any]) -> None:
    """Run the job as ``hydra.main`` does; errors of the project are raised, all others printed by Hydra."""
    import hydra

    # Hydra prints its errors without its own frames nowhere else; rewriting that would take a hundred lines.
    from hydra._internal.utils import run_and_report
    from hydra.core.utils import env_override

    from stagereg.config.suggestions import explain

    if arguments["version_base"] == "1.3" and not hydra.__version__.startswith("1.3."):
        del arguments["version_base"]  # the default, which later releases warn of where it is named
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
    """Run the task once the plugins that its config names are imported, also where no option has asked for them."""
    from stagereg.config.plugins import from_config
    from stagereg.config.resolved_tree import SWITCHES

    from_config(cfg)
    try:
        return task(cfg)
    except ValueError as error:
        if "initialize the default process group twice" in str(error):
            raise LaunchError(_INITIALISED) from error
        raise
    except AttributeError as error:  # OmegaConf's derives from it
        group = getattr(error, "key", None)
        if group in SWITCHES and group not in cfg:
            begin = "begin the config with defaults: [stagereg, _self_]"
            raise LaunchError(f"the config has no {group}: {begin}; or {SWITCHES[group]}") from error
        raise


class _Job:
    """What Hydra calls with the composed config; picklable, so that launchers can call it in other processes."""

    def __init__(self, task: Callable[[Any], Any], command: CommandLine, rank: Rank | None) -> None:
        # Hydra finds the script, and with it the config folder, through the function it unwraps from this.
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
                # Hydra adds its own lines to any exception of a job, but not to this one.
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
