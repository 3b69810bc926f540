"""Makes accelerate's ``save_state`` and ``load_state`` use a Checkpointer, and ``join_uneven_inputs`` use a Join::

      accelerator = Accelerator(...)
    + stagereg.integrations.accelerate.attach(accelerator, join=True)

The rest of the program stays unchanged. :func:`attach` replaces methods of one Accelerator object, because hooks of
accelerate can replace only the model file. ``save_state(dir)`` returns as soon as the state is staged. ``dir`` appears
when the checkpoint is complete, and a later save to ``dir`` replaces the checkpoint (see :mod:`.named`).
``load_state(dir)`` also loads checkpoints that accelerate saved without stagereg.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType

from stagereg.assembly import Checkpointer, Preemption
from stagereg.base.followers import followers
from stagereg.base.spec import refuse_unknown
from stagereg.checkpoint.format.manifest import LATEST, MANIFEST
from stagereg.checkpoint.options import expect_alike
from stagereg.checkpoint.ranks.rank_group import RankGroup
from stagereg.checkpoint.ranks.requests import OperationLog
from stagereg.checkpoint.state.entries import per_rank
from stagereg.errors import CheckpointError, ConfigError
from stagereg.integrations.accelerate_join import AcceleratorJoin, inner
from stagereg.integrations.agreed import agreed, expect_known
from stagereg.integrations.named import NamedCheckpoints, newest_in, restore, split
from stagereg.integrations.proofs import Proofs, is_proof

__all__ = ["attach"]

_WRITTEN_FOR = ">=1.10,<1.16"
_METHODS = {
    "save_state": ("output_dir", "safe_serialization", "save_model_func_kwargs"),
    "load_state": ("input_dir", "load_kwargs", "load_model_func_kwargs"),
    "register_save_state_pre_hook": ("hook",),
    "register_load_state_pre_hook": ("hook",),
    "join_uneven_inputs": ("joinables", "even_batches"),
    "clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "clip_grad_value_": ("parameters", "clip_value"),
    "backward": ("loss", "kwargs"),
    "end_training": (),
    "free_memory": ("objects",),
}
_HOOKS = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
_PARALLEL = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
_DECIDED = {  # Checkpointer options that attach does not accept, with advice for each
    "every": "call save_state whenever a checkpoint is due",
    "dir": "pass the directory to save_state(dir)",
    "resume": "pass the checkpoint to load_state",
    "process_group": "all ranks of the Accelerator save together",
}
_OF_A_PROJECT = ("keep", "on_commit")  # options that require automatic_checkpoint_naming
_NUMBERS = itertools.count()  # numbers the calls of attach, identically on all ranks
_ORDER = "synchronized_generator"  # attribute of a data loader: the random number generator that shuffles
_STEP, _OLD_NAME = re.compile(r"step-(\d+)"), re.compile(r"checkpoint_(\d+)")


def attach(accelerator: Accelerator, join: bool = False, **checkpoint_options: Any) -> None:
    """Make ``save_state`` and ``load_state`` of this Accelerator use a Checkpointer. Call it on all ranks.

    A save contains models, optimizers, schedulers, data loaders, registered objects, the scaler and the random number
    generators of every rank. A background thread writes the staged copy; ``end_training`` and the exit of the process
    wait for this thread. If a save fails, the next call of ``save_state``, ``load_state`` or ``end_training`` raises
    the error, or else the exit of the process does. A checkpoint can be loaded with any world size. Random number
    generators and data loader state are restored only if the world size is the same.

    ``save_state(dir)`` replaces the checkpoint in ``dir``, and does not delete other files. The number in the name of a
    checkpoint, such as ``dir/step-00000007``, counts the saves to the parent directory of ``dir``; its subdirectory
    ``.stagereg`` contains unfinished saves. With ``automatic_checkpoint_naming``, ``save_state()`` saves to
    ``project_dir/checkpoints/step-00000000``, then to ``step-00000001`` and so on. The number is
    ``project_configuration.iteration``, which ``load_state`` sets. ``total_limit`` is passed as ``keep``.

    A ``tier`` (a local copy) requires ``automatic_checkpoint_naming``. ``save_state()`` also saves to the tier, and
    ``load_state()`` loads the newest checkpoint of both. With ``every``, call ``save_state()`` after each optimizer
    step: ``tier.every`` selects the steps that are saved to the tier, ``every`` those saved to the directory.

    Args:
        accelerator: an Accelerator to which no other adapter is attached.
        join: also replace ``join_uneven_inputs``. For each step of the other ranks, a rank without data then repeats
            the calls that followed ``backward`` in its last step: ``accelerator.clip_grad_norm_``, and ``step`` of
            optimizers and schedulers. So their states stay equal. The end of the block checks that all ranks made the
            same calls.
        **checkpoint_options: options of :class:`stagereg.Checkpointer`. ``keep`` and ``on_commit`` require
            ``automatic_checkpoint_naming``. ``preemption.grace_period`` defaults to ``None``, because only
            ``save_state`` could respond to a signal. A ``stager`` object, unlike a name, supports only one directory.

    Raises:
        ConfigError: the Accelerator uses an unsupported feature (DeepSpeed, XLA, ``save_on_each_node``, hooks of
            ``save_state``), or an option is invalid.
        InstallationError: this version of accelerate is not supported.
    """
    methods = {name: ("self", *arguments) for name, arguments in _METHODS.items()}
    lacks = [name for name in (*_LISTS, *_HOOKS) if not hasattr(accelerator, name)]
    expect_known("accelerate", _WRITTEN_FOR, type(accelerator), methods, lacks)
    _expect_fit(accelerator, join)
    _Attached(accelerator, join, checkpoint_options)


class _Attached:
    """Replaces the checkpoint methods of one Accelerator."""

    _open: ClassVar[weakref.WeakSet[_Attached]] = weakref.WeakSet()  # instances whose training has not ended

    def __init__(self, accelerator: Any, join: bool, options: dict[str, Any]) -> None:
        self._accelerator, self._project = accelerator, accelerator.project_configuration
        self._automatic = bool(self._project.automatic_checkpoint_naming)
        self._has_tier, self._asks = options.get("tier") is not None, "every" in options
        usual = {"preemption": Preemption(grace_period=None)}
        self._options = {**usual, **self._checked(options), "save_last": False}
        self._named: NamedCheckpoints | None = None  # the directory of the last save_state(dir)
        self._checkpointer: Checkpointer | None = None  # the checkpointer of the last save, which may be closed
        self._proofs = Proofs(self._options, ends_at_forward=True)
        if is_proof():
            accelerator.log_with = []  # so that trackers write nothing
        elif self._has_tier:  # A tier must record the run from the start, so do not wait for the first save.
            self._checkpointer = Checkpointer(self._where(None), **self._options)
        self._goes_on = False  # whether this run has saved or loaded a checkpoint before
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._requests = OperationLog(group, f"accelerate/{next(_NUMBERS)}")
        self._open.add(self)
        followers.add(self)
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        accelerator.end_training, accelerator.free_memory = self.end_training, self.free_memory
        accelerator.register_save_state_pre_hook = accelerator.register_load_state_pre_hook = _refuse_hook
        if join:
            accelerator.join_uneven_inputs = AcceleratorJoin(accelerator, self._proofs.end_step).join

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Path:
        _refuse_arguments("save_state", kwargs | ({} if safe_serialization else {"safe_serialization": False}))
        where = self._where(None if self._automatic else output_dir)
        if is_proof():
            if self._asks and (proof := self._proofs.checkpointer) is not None:
                proof.maybe_save(self._project.iteration, self._state())
            self._project.iteration += 1
        else:
            self._requests.post(where)
            self._save(where)
        return Path(where)

    def follow(self) -> None:
        """Take part in the saves of the other ranks. Called in a join, on a rank that has run out of data."""
        while (where := self._requests.take_next()) is not None:
            self._save(where)

    def loop_ended(self) -> None:
        """Do nothing: :meth:`follow` has already taken part in every save."""

    def _save(self, where: str) -> None:
        if self._automatic:
            self._save_to_project(where)
        else:
            expect_alike(self._ranks, {"dir": where})
            parent, name = self._agreed(lambda: split(where if "://" in where else os.path.realpath(where)))
            named = self._open_named(parent)
            named.save(self._state(), self._agreed(lambda: named.begin(name)))
        self._project.iteration += 1

    def _save_to_project(self, where: str) -> None:
        step = self._project.iteration
        newest = -1 if self._goes_on else self._agreed(lambda: _highest(where, _STEP))
        if step <= newest:
            raise CheckpointError(
                f"{where} has checkpoints of an earlier run, up to step-{newest:08d}. Call load_state() to "
                f"resume from it, set project_configuration.iteration to {newest + 1}, or use another project_dir."
            )
        self._goes_on = True
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(where, resume="never", **self._options)
        self._proofs.add(self._checkpointer)
        save = self._checkpointer.maybe_save if self._asks else self._checkpointer.save
        save(step, self._state())

    def _open_named(self, parent: str) -> NamedCheckpoints:
        """Open the directory ``parent`` for saves. Closes another open directory to release its memory. Collective."""
        if self._named is None or not self._named.is_open or self._named.parent != parent:
            if self._named is not None:
                self._named.close()
                if not isinstance(self._options.get("stager"), str | None):
                    raise ConfigError(
                        "A stager object passed to attach serves only one Accelerator and the subdirectories of one "
                        "directory. Pass a name, for example stager='overlapped', to build a stager for each."
                    )
            first = self._accelerator.process_index == 0
            self._named = NamedCheckpoints(parent, first, self._options, replaces_files=False)
            self._checkpointer = self._named.checkpointer
            self._proofs.add(self._checkpointer)
        return self._named

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a checkpoint saved by stagereg, or by accelerate alone, like :meth:`Accelerator.load_state`."""
        where = self._where(input_dir)
        NamedCheckpoints.wait_for_all(self._agreed)
        for each in [*self._open]:  # Another Accelerator of this process may still be writing the checkpoint.
            each._wait()
        source, ours = self._agreed(lambda: _sought(where, input_dir is None, self._has_tier))
        for observer in self._proofs.observers:
            observer.drop()  # the next steps do not follow an earlier save
        if (proven := self._proofs.checkpoint(where)) is not None:
            source, ours = proven, True
        if source is None:
            raise ConfigError(f"There is no checkpoint in {where}.")
        if not ours:
            type(self._accelerator).load_state(self._accelerator, source, load_kwargs, **kwargs)
            step = int(found[1]) if self._automatic and (found := _OLD_NAME.search(Path(source).name)) else None
        else:
            _refuse_arguments("load_state", kwargs | ({"load_kwargs": load_kwargs} if load_kwargs else {}))
            state = self._state()
            proof = None if proven is None else self._proofs.checkpointer
            own = None if self._has_tier and input_dir is None else source
            step = proof.restore(state) if proof else self._restore(state, own)
            if step is None:
                raise CheckpointError(f"There is no complete checkpoint in {source}.")
            self._accelerator.step = state["accelerator"]["step"]
            loaders = zip(self._accelerator._dataloaders, state["accelerator"]["loaders"], strict=False)
            for loader, (done, seed) in loaders:
                loader.iteration = done
                if seed is not None:
                    loader.get_sampler().initial_seed = seed
        if step is not None and self._automatic:
            self._project.iteration = step + 1
        self._goes_on = True

    def _restore(self, state: dict[str, Any], source: str | None) -> int | None:
        if self._checkpointer is not None and (self._named is None or self._named.is_open):
            return self._checkpointer.restore(state, source)
        assert source is not None  # source is None only with a tier, which always has a Checkpointer
        options = {name: self._options[name] for name in self._options.keys() & {"restore", "failure", "storage"}}
        return restore(source, state, self._agreed, self._accelerator.process_index == 0, **options)

    def end_training(self) -> None:
        self._open.discard(self)
        self._proofs.end_step()
        self._proofs.close()
        try:
            if self._named is not None:
                self._named.close()
            elif self._checkpointer is not None:
                self._checkpointer.close()
        finally:
            type(self._accelerator).end_training(self._accelerator)

    def free_memory(self, *objects: Any) -> Any:
        self._wait()
        if self._checkpointer is not None:
            self._checkpointer.remember({})
        return type(self._accelerator).free_memory(self._accelerator, *objects)

    def _wait(self) -> None:
        if self._checkpointer is not None and (self._named is None or self._named.is_open):
            self._checkpointer.wait()

    def _state(self) -> dict[str, Any]:
        accelerator = self._accelerator
        kinds = {
            "model": accelerator._models,
            "optimizer": [inner(each) for each in accelerator._optimizers],
            "scheduler": [each.scheduler for each in accelerator._schedulers],
            "custom": accelerator._custom_objects,
            "scaler": [] if accelerator.scaler is None else [accelerator.scaler],
        }
        loaders = accelerator._dataloaders
        return {
            **{f"{kind}_{i}" if i else kind: each for kind, objects in kinds.items() for i, each in enumerate(objects)},
            "dataloaders": per_rank(_Positions(loaders)),
            "accelerator": {
                "step": accelerator.step,
                "loaders": [(each.iteration, getattr(each.get_sampler(), "initial_seed", None)) for each in loaders],
            },
        }

    def _where(self, named: str | os.PathLike[str] | None) -> str:
        if named is None and not self._automatic:
            raise ConfigError("No directory was given. Pass one, or enable automatic_checkpoint_naming.")
        text = os.path.join(self._accelerator.project_dir, "checkpoints") if named is None else os.fspath(named)
        return text if "://" in text else os.path.abspath(os.path.expanduser(text))

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Check the options of ``attach``, and return them for the Checkpointer, with ``total_limit`` as ``keep``."""
        if self._has_tier and not self._automatic:
            raise ConfigError("A tier requires automatic_checkpoint_naming, because it supports only one directory.")
        for name in (options.keys() & _DECIDED) - ({"every"} if self._has_tier else set()):
            raise ConfigError(f"attach does not take {name!r}: {_DECIDED[name]}.")
        refuse_unknown("attach", options, Checkpointer)
        Checkpointer.check_options(options)
        if not self._automatic:
            for name in options.keys() & set(_OF_A_PROJECT):
                raise ConfigError(
                    f"{name} requires automatic_checkpoint_naming. Without it, save_state(dir) always "
                    "replaces the checkpoint in dir."
                )
            return options
        limit = self._project.total_limit
        usual = {"keep": sys.maxsize if limit is None else limit, **options}
        if limit not in (None, usual["keep"]):
            raise ConfigError(f"total_limit={limit} and keep={usual['keep']} differ. Set only one of them.")
        return usual

    @cached_property
    def _ranks(self) -> RankGroup:
        """All ranks, in a process group separate from the one of training. The first access is collective."""
        return RankGroup()

    def _agreed(self, look: Callable[[], Any]) -> Any:
        """Call ``look`` on rank 0, and return its result or raise its error on all ranks. Collective."""
        ranks, failing = self._ranks, "The ranks could not agree on a directory"
        return agreed(look, ranks.rank == 0, lambda found: ranks.run_on_all(failing, lambda: found)[0])


class _Positions:
    def __init__(self, loaders: Sequence[Any]) -> None:
        self._loaders = loaders

    def state_dict(self) -> dict[str, Any]:
        return {
            str(i): {
                "loader": loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None,
                "order": None if (order := getattr(loader, _ORDER, None)) is None else order.get_state(),
            }
            for i, loader in enumerate(self._loaders)
        }

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for i, loader in enumerate(self._loaders):
            state = states.get(str(i), {})
            if state.get("loader") is not None:
                loader.load_state_dict(state["loader"])
            if state.get("order") is not None and (order := getattr(loader, _ORDER, None)) is not None:
                order.set_state(state["order"])


def _expect_fit(accelerator: Any, join: bool) -> None:
    kind, project = accelerator.distributed_type, accelerator.project_configuration
    if "save_state" in vars(accelerator):
        raise ConfigError("save_state of this Accelerator is already replaced. Call attach only once.")
    if kind not in _PARALLEL:
        raise ConfigError(f"attach supports one process, DDP and FSDP, but this Accelerator uses {kind.value}.")
    if join and kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError("join=True supports DDP and FSDP2, but this Accelerator uses FSDP1. Set fsdp_version=2.")
    if project.save_on_each_node:
        raise ConfigError("save_on_each_node is not supported: all ranks must write to one file system.")
    if project.automatic_checkpoint_naming and accelerator.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs a project_dir.")
    if any(getattr(accelerator, hooks) for hooks in _HOOKS):
        _refuse_hook()


def _refuse_hook(*_: object) -> NoReturn:
    raise ConfigError(
        "Hooks of save_state and load_state are not supported: the checkpoint directory does not exist before the "
        "checkpoint is complete. Register the saved objects with accelerator.register_for_checkpointing(object)."
    )


def _refuse_arguments(method: str, given: dict[str, Any]) -> None:
    if given:
        names = ", ".join(f"{name}={value!r:.50}" for name, value in given.items())
        raise ConfigError(f"{method} with stagereg does not support {names}. Remove these arguments.")


def _sought(where: str, is_project: bool, has_tier: bool) -> tuple[str | None, bool]:
    """Return the path to load, or ``None`` if none exists, and whether stagereg (not accelerate) saved it."""
    if is_project and (old := _highest(where, _OLD_NAME)) > _highest(where, _STEP):
        return f"{where}/checkpoint_{old}", False
    if is_project and has_tier:  # The tier may have a newer checkpoint than the directory.
        return where, True
    if not os.path.isdir(where) and "://" not in where:
        found = _OLD_NAME.fullmatch(Path(where).name)  # the name that accelerate gives a checkpoint, checkpoint_N
        same = None if found is None else Path(where).with_name(f"step-{int(found[1]):08d}")
        return (None, False) if same is None or not same.is_dir() else (str(same), True)
    if "://" not in where and not os.path.lexists(f"{where}/{LATEST}") and (saved := newest_in(Path(where))):
        return str(saved), True
    return where, "://" in where or (Path(where) / MANIFEST).exists() or _highest(where, _STEP) >= 0


def _highest(directory: str, pattern: re.Pattern[str]) -> int:
    """Return the highest number in the names of a directory that match ``pattern``, or -1 if no name matches."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return max((int(found[1]) for name in names if (found := pattern.match(name))), default=-1)
