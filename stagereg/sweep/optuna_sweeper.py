"""``hydra/sweeper=stagereg_optuna``: Optuna chooses the jobs of a sweep, by the figure that ``sweep.metric`` names.

An option of a component, such as ``stager.threads``, is varied only with components that have it. What the program has
by itself is tried first, and no combination twice. A trial is ``sweep.repeats`` jobs, one after the other, its value
their median; after each of them the pruner may end it. Trials are kept in a database; the same command with the same
``hydra.sweep.dir`` goes on from there. Needs Optuna, which is imported when a search begins.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import stagereg.config.schema as schema
import stagereg.registry as registry
from stagereg.sweep.figures import number
from stagereg.sweep.interleaved import ContainedTask, SweepError, check_directories, check_repeats, check_swept
from stagereg.sweep.metric import directed
from stagereg.sweep.result import KEYS

log = logging.getLogger(__name__)

_STUDY = "stagereg"
_SEARCH, _JOBS, _ERROR = "search", "jobs", "error"
"""Attributes of a study (what it searches, how many jobs it has started) and of a trial that failed."""
_DRAWS = 1000
"""Draws without a new combination after which a search ends: it has seen them all, or nearly."""


@dataclass(eq=False)
class OptunaSweeper(Sweeper):
    """Hydra's sweeper that searches.

    Attributes:
        n_trials: trials in all, also of earlier searches in the same storage.
        repeats: jobs of a trial.
        metric: a figure of stagereg; ``None`` for the number that the task returns.
        direction: ``"minimize"``, ``"maximize"``, or ``None`` for the metric's own.
        storage: a URL that Optuna takes.
        seed: of the sampler.
        sampler: config of an Optuna sampler that takes ``seed``.
        pruner: config of an Optuna pruner.
    """

    n_trials: int
    repeats: Any
    metric: str | None
    direction: str | None
    storage: str
    seed: int
    sampler: DictConfig
    pruner: DictConfig

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=ContainedTask(task_function), config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Search until there are ``n_trials`` trials, or all was tried. Raises: ``SweepError``, before any job."""
        check_repeats(self.repeats)
        try:
            import optuna
        except ImportError as error:
            raise SweepError(f"Searching needs Optuna ({error}): pip install 'hydra-stagereg[optuna]'") from None
        optuna.logging.set_verbosity(logging.WARNING)
        self._optuna: Any = optuna
        overrides = OverridesParser.create(config_loader=self._loader).parse_overrides(arguments)
        check_swept(overrides)
        swept = [override for override in overrides if override.is_sweep_override()]
        if not swept:
            raise SweepError("There is nothing to search: name the values of a key, as in stager=blocking,overlapped")
        # Options of components come after the groups that choose them.
        swept.sort(key=lambda override: "." in override.key_or_group)
        self._space = {override.get_key_element(): self._distribution(override) for override in swept}
        self._fixed = [str(override.input_line) for override in overrides if not override.is_sweep_override()]
        check_directories(self._loader, self._config, [[*self._fixed, f"++sweep.repeat={job}"] for job in range(2)])
        directory = Path(self._config.hydra.sweep.dir)
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, directory / "multirun.yaml")
        self._search(self._opened(swept))

    def _search(self, study: Any) -> None:
        ended = [trial for trial in study.get_trials(deepcopy=False) if _has_ended(trial)]
        self._tried = {self._overrides(trial.params) for trial in ended}
        log.info("%d of %d trials were done before", len(ended), self.n_trials)
        for done in range(len(ended), self.n_trials):
            asked = self._asked(study)
            if asked is None:
                log.info("Nothing is left to try after %d trials", done)
                return
            self._run(study, *asked)

    def _run(self, study: Any, trial: Any, overrides: Sequence[str]) -> None:
        """Run the jobs of a trial, until one fails or the pruner ends them, and keep what came of it."""
        states = self._optuna.trial.TrialState
        values: list[float] = []
        for repeat in range(self.repeats):
            index = study.user_attrs.get(_JOBS, 0)
            # Before it starts: no job may ever run in the directory of one that was killed.
            study.set_user_attr(_JOBS, index + 1)
            job = [*self._fixed, *overrides, f"++sweep.repeat={repeat}"]
            (returned,) = self._launcher.launch([job], initial_job_idx=index)
            # The public property would raise the job's error.
            value = number(returned._return_value) if returned.status == JobStatus.COMPLETED else None
            if value is None:
                trial.set_user_attr(_ERROR, f"job {index} has no value")
                study.tell(trial, state=states.FAIL)
                return
            values.append(value)
            trial.report(statistics.median(values), repeat)
            if repeat + 1 < self.repeats and trial.should_prune():
                study.tell(trial, state=states.PRUNED)
                return
        study.tell(trial, statistics.median(values))

    # -- the study

    def _opened(self, swept: Sequence[Override]) -> Any:
        """The study, new or begun earlier. What a search that was killed has left under way counts as not tried."""
        optuna = self._optuna
        direction = self.direction or "minimize"
        if self.metric is not None:
            direction = "maximize" if directed(self.metric, self.direction).better == "higher" else "minimize"
        try:
            study = optuna.create_study(
                storage=self.storage, study_name=_STUDY, direction=direction, load_if_exists=True
            )
        except Exception as error:  # of Optuna, of the database below it, or of that one's driver
            raise SweepError(f"Optuna cannot use {self.storage}: {str(error).splitlines()[0]}") from error
        study.pruner = instantiate(self.pruner)
        search = {
            "over": sorted(str(override.input_line) for override in swept),
            "with": sorted(each for each in self._fixed if each.lstrip("+").partition("=")[0] not in KEYS),
            "metric": self.metric,
            "direction": direction,
        }
        before = study.user_attrs.get(_SEARCH, search)
        if before != search:
            raise SweepError(
                f"{self.storage} has another search, whose values cannot be mixed with these: name another one.\n"
                f"It has {json.dumps(before)}\nThis is {json.dumps(search)}"
            )
        study.set_user_attr(_SEARCH, search)
        trials = study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state == optuna.trial.TrialState.RUNNING:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        # The same seed again would draw the same again.
        study.sampler = instantiate(self.sampler, seed=self.seed + len(trials))
        self._random = optuna.create_study(sampler=optuna.samplers.RandomSampler(self.seed + len(trials)))
        if not any(map(_has_ended, trials)):
            study.enqueue_trial(self._defaults())
        return study

    def _asked(self, study: Any) -> tuple[Any, tuple[str, ...]] | None:
        """A trial and its overrides, or ``None`` if all were tried; where the sampler repeats itself, a random one."""
        trial = study.ask()
        chosen = self._chosen(trial)
        for _ in range(_DRAWS):
            if self._overrides(chosen) not in self._tried:
                break
            chosen = self._chosen(self._random.ask())
        overrides = self._overrides(chosen)
        if chosen != trial.params or overrides in self._tried:
            study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            if overrides in self._tried:
                return None
            study.enqueue_trial(chosen)
            trial = study.ask()
            self._chosen(trial)
        self._tried.add(overrides)
        return trial, overrides

    def _chosen(self, trial: Any) -> dict[str, Any]:
        of = self._optuna.distributions
        chosen: dict[str, Any] = {}
        for key, values in self._space.items():
            if not self._applies(key, chosen):
                continue
            if isinstance(values, of.CategoricalDistribution):
                chosen[key] = trial.suggest_categorical(key, values.choices)
            elif isinstance(values, of.IntDistribution):
                chosen[key] = trial.suggest_int(key, values.low, values.high, step=values.step, log=values.log)
            else:
                chosen[key] = trial.suggest_float(key, values.low, values.high, log=values.log)
        return chosen

    def _overrides(self, chosen: dict[str, Any]) -> tuple[str, ...]:
        return tuple(f"{key}={chosen[key]}" for key in self._space if key in chosen)

    def _applies(self, key: str, chosen: dict[str, Any]) -> bool:
        """Whether the component that is chosen has the option; other keys always apply."""
        kind, _, field = key.lstrip("+").partition(".")
        name = chosen.get(kind, self._config.hydra.runtime.choices.get(kind))
        if not field or kind not in registry.kinds() or name not in registry.names(kind):
            return True
        return field.partition(".")[0] in schema.options(registry.find(kind, name).load())

    # -- the space

    def _own(self, key: str) -> Any:
        """What the program has for a key or a group by itself."""
        path = key.lstrip("+")
        own = OmegaConf.select(self._config, path, throw_on_resolution_failure=False)
        return self._config.hydra.runtime.choices.get(path, own)

    def _defaults(self) -> dict[str, Any]:
        """What the program has by itself, as far as it is among the values that are searched."""
        defaults: dict[str, Any] = {}
        for key, values in self._space.items():
            own = self._own(key)
            if isinstance(values, self._optuna.distributions.CategoricalDistribution):
                own = "null" if own is None else str(own)
                fits = own in values.choices
            else:
                fits = isinstance(own, (int, float)) and values.low <= own <= values.high
            if fits:
                defaults[key] = own
        return defaults

    def _distribution(self, override: Override) -> Any:
        """The values of an override, as Optuna has them. Raises: ``SweepError``, ``HydraException``."""
        of = self._optuna.distributions
        sweep: Any = override.value()
        try:
            if override.is_interval_sweep():
                is_log = "log" in sweep.tags
                if isinstance(sweep.start, int) or type(self._own(override.get_key_element())) is int:
                    return of.IntDistribution(math.ceil(sweep.start), math.floor(sweep.end), log=is_log)
                return of.FloatDistribution(sweep.start, sweep.end, log=is_log)
            if override.is_range_sweep() and isinstance(steps := sweep.range(), range) and steps.step > 0:
                return of.IntDistribution(steps[0], steps[-1], step=steps.step)
            return of.CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
        except (ValueError, IndexError) as error:
            raise SweepError(f"{override.input_line} cannot be searched: {error}") from error


# Hydra 1.3 takes no sweeper from elsewhere. The file that packaging puts there has this class.
OptunaSweeper.__module__ = "hydra_plugins.stagereg_plugin"


def _has_ended(trial: Any) -> bool:
    """Whether a trial came to its end, well or not; one that a killed search left, or never ran, has not."""
    return trial.state.name in ("COMPLETE", "PRUNED") or _ERROR in trial.user_attrs
