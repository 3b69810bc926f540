"""Observes the steps after a save, or the first steps of a proof, on each rank."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import stagereg.base.record as record
import stagereg.extensions.prove.notes as notes
import stagereg.extensions.prove.observing as observing
from stagereg.base.capture import is_capturing
from stagereg.base.hooks import AFTER_STEPS
from stagereg.base.version import __version__
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import Checkpoint, step_name
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.store.open_store import open_store
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import reason
from stagereg.extensions.prove.observing import DATA, LOSS, STEP, VALUE, Snapshot, values_of

ENVIRONMENT = "STAGEREG_PROVE"
"""Environment variable of a proof: the path of a JSON file, which ``stagereg prove`` writes (:class:`Trial`)."""
ACCUMULATED = "accumulated gradients"
UNNUMBERED = -2  # the number of all steps of a trainer that does not number its steps
_WAIT_S = 30.0  # seconds in which the ranks of a proof wait for each other, and in which records are written
_HELD = 8  # maximum number of saves whose records are not complete
_numbers = itertools.count()  # numbers the checkpointers of this process, in the order of construction

_log = logging.getLogger(__name__)


@dataclass
class Window:
    """The snapshots of the steps after one save."""

    step: int
    saved: Snapshot  # the random number generators at the save
    start: Snapshot = field(default_factory=dict)  # before the first forward after the save
    ends: list[Snapshot] = field(default_factory=list)  # at the end of each step
    key: str = ""  # the committed checkpoint; on rank 0
    written: bool = False  # whether the file of this rank exists

    @property
    def rows(self) -> list[Snapshot]:
        return observing.resolved([self.saved, self.start, *self.ends])  # waits for the accelerator


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method so that an exception is logged and closes all windows: a gap would refute a checkpoint."""

    @functools.wraps(method)
    def call(self: Observer, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.drop()
            text = "stagereg: cannot record these steps for `stagereg prove`: %s"
            _log.warning(text, reason(error), exc_info=error)

    return call


class Observer(CheckpointExtension):
    """Takes snapshots in open windows. The methods run on the training thread, except ``committed``."""

    name = "prove"
    reads_only = False  # whether the checkpointer must not save
    ends_at_forward = False  # whether a step ends at the forward that follows an optimizer step

    def __init__(self, steps: int, number: int) -> None:
        self.steps, self.number, self.ends = steps, number, 0  # ``ends``: number of steps that the program has ended
        self.open: list[Window] = []
        self.state: Mapping[str, Any] = {}
        self.has_left = False  # whether this rank has left its loop
        self._fixed = False  # whether a trainer has chosen the objects
        self._hooked = True  # whether forward hooks observe the batches
        self._step: Snapshot = {}  # the observations of the current step
        self._handles: list[Callable[[], object]] = []  # remove the hooks

    def start(self, setup: Setup, saves: Saves) -> None:
        self.setup = setup
        record.listen(self)

    def given(self, state: Mapping[str, Any]) -> None:
        if not self._fixed:
            self.state = state

    def observe(self, objects: Mapping[str, Any], hooked: bool = True) -> None:
        """Observe ``objects`` instead of saved states. Without ``hooked``, a trainer calls :meth:`forward` itself."""
        self.state, self._fixed, self._hooked = objects, True, hooked

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the logged loss of a step into the snapshot."""
        if self.open and "loss" in values:
            self._step[f"{LOSS}: loss"] = repr(values["loss"])

    def begin(self, step: int) -> None:
        """Open a window for the steps after ``step``."""
        self._step = self._step if self.open else {}
        windows = [*self.open, Window(step, observing.generators(values_of(self.state)))]
        self.drop()  # the state may have other modules than before
        self.open = windows
        values = [each for value in self.state.values() for each in (value if isinstance(value, list) else [value])]
        modules = dict.fromkeys(each for each in values * self._hooked if isinstance(each, torch.nn.Module))
        hooks = [one.register_forward_pre_hook(_Hook(self), prepend=True, with_kwargs=True) for one in modules]
        self._handles = [*(each.remove for each in hooks), AFTER_STEPS.add(self._update)]

    @_guarded
    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        self.ends, self.has_left = self.ends + 1, False
        observed, self._step = self._step, {}
        if windows := [each for each in self.open if step != each.step]:
            row = observing.snapshot(self.state, values_of(self.state))
            row |= observing.gradients(self.state)  # without an optimizer step, they are accumulated for a later one
            row |= {f"{STEP}: step": step, f"{STEP}: optimizer steps": 0, f"{DATA}: count": 0, **observed}
            for window in windows:
                window.ends.append(row)
                if len(window.ends) == self.length():
                    self.drop([each for each in self.open if each is not window])
                    self.over(window)

    def next_step(self) -> None:
        """End the current step if an optimizer has stepped. For trainers that do not number their steps."""
        if f"{STEP}: optimizer steps" in self._step:
            self.end_step(UNNUMBERED, None)

    def follow(self, over: bool) -> None:
        self.has_left = True  # the loop of a join, so this rank takes no more steps
        self.finish()

    def finish(self) -> None:
        """Close all windows, even if not all steps were taken."""
        windows = [each for each in self.open if each.ends or self.has_left]
        self.drop()
        for window in windows:
            self.over(window)

    def length(self) -> int:
        """Return the number of steps in a window of this rank."""
        return self.steps

    def over(self, window: Window) -> None:
        """Process a window that is over."""
        raise NotImplementedError

    def drop(self, stay: Sequence[Window] = ()) -> None:
        """Close all windows except ``stay``. Removes the hooks if none stays."""
        self.open = [*stay]
        while self._handles and not stay:
            self._handles.pop()()

    @_guarded
    def forward(self, inputs: Any) -> None:
        """Observe the inputs of a forward that builds a graph."""
        if not torch.is_grad_enabled() or is_capturing():
            return
        if self.ends_at_forward:
            self.next_step()
        if waiting := [each for each in self.open if not each.start]:
            start = observing.snapshot(self.state, values_of(self.state))
            start[f"{VALUE}: {ACCUMULATED}"] = len(observing.gradients(self.state))
            for window in waiting:
                window.start = start
        tensors = [*observing.tensors_of(inputs)]
        self._step.setdefault(f"{DATA}: batches", [[], 0.0, 0])[0].extend(map(observing.digest, tensors))
        self._step.setdefault(f"{DATA}: samples", [[], 0.0, 0])[0].append(observing.samples(tensors))
        count = len(tensors[0]) if tensors and tensors[0].ndim else 0
        self._step[f"{DATA}: count"] = self._step.get(f"{DATA}: count", 0) + count

    @_guarded
    def _update(self, optimizer: Any) -> None:
        number = self._step[f"{STEP}: optimizer steps"] = self._step.get(f"{STEP}: optimizer steps", 0) + 1
        for name, value in observing.gradients(self.state, optimizer).items():
            self._step[name if number == 1 else f"{name}, optimizer step {number}"] = value


class _Hook:
    """A forward pre-hook without effect in copies and pickles of the module, and in compiled code."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._observer is not None:
            self._observer.forward((args, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class Recorder(Observer):
    """Records the ``steps`` steps after each save to the checkpoint directory, in that directory."""

    def __init__(self, steps: int, number: int) -> None:
        super().__init__(steps, number)
        self._windows: dict[int, Window] = {}  # incomplete records, by step
        self._threads: list[threading.Thread] = []

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        if any(isinstance(each, StoreTarget) for each in targets):
            self.drop([each for each in self.open if each.step != step])
            self.begin(step)
            self._windows[step] = self.open[-1]
            if len(self._windows) > _HELD:
                del self._windows[next(iter(self._windows))]

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        self.drop()  # the next steps do not follow an earlier save

    def over(self, window: Window) -> None:
        event = torch.Event(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None
        if event is not None:
            event.record()
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(threading.Thread(target=self._write, args=(window, event), daemon=True))
        self._threads[-1].start()

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        if where == "store" and checkpoint is not None and step in self._windows:
            self._windows[step].key = checkpoint.key
            self._finish(self._windows[step])

    def close(self, in_time: bool) -> None:
        self.finish()
        if len(self._windows) > 1 and not self.ends:
            _log.warning("stagereg: no steps were recorded for `stagereg prove`. Call should_save() after each step.")
        until = time.monotonic() + _WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _write(self, window: Window, event: torch.Event | None) -> None:
        try:
            if event is not None:
                event.synchronize()
            content = {"run": self.setup.token, "rows": window.rows}
            notes.write(self.setup.store, window.step, content, self.setup.ranks.rank)
            window.written = True
            self._finish(window)
        except Exception as error:
            _log.warning("stagereg: cannot record the steps after step %d: %s", window.step, reason(error))

    def _finish(self, window: Window) -> None:
        """Write the file of a checkpoint, once it is committed and its steps are over. On rank 0."""
        if window.key and window.written:  # two threads may both write the same content
            self._windows.pop(window.step, None)
            steps = {"steps": len(window.ends), "wanted": self.steps, "number": self.number}
            found = {"run": self.setup.token, "key": window.key, **steps, **about(self.setup.ranks.size)}
            notes.write(self.setup.store, window.step, found)
            notes.clear(self.setup.store)


def about(ranks: int) -> dict[str, Any]:
    """Return facts about this process that may explain a difference."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    return {
        "ranks": ranks,
        "torch": torch.__version__,
        "stagereg": __version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "benchmark": torch.backends.cudnn.benchmark,
        "hydra": hydra is not None and hydra.HydraConfig.initialized(),
    }


class Trial(Observer):
    """Takes the steps of a proof in a program that ``stagereg prove`` has started, and then ends the process.

    ``task``: the ``checkpoint`` with its ``step``; the ``number`` of its checkpointer; the ``steps`` to take, by rank,
    and the ``most`` of them; the number of ``ranks`` that saved; the directory ``scratch``, which all ranks see.
    """

    reads_only = True

    def __init__(self, task: Mapping[str, Any], number: int) -> None:
        super().__init__(task["most"], number)
        self._task, self._is_it = SimpleNamespace(**task), number == task["number"]
        self.checkpoint = ""  # the checkpoint that this checkpointer restores; ``"never"``: none

    def replaced(self, dir: str | None, resume: str) -> tuple[str, str]:
        """Return ``dir`` and ``resume`` for a checkpointer that restores the checkpoint, and writes only to scratch."""
        if not self._is_it and resume in ("auto", "latest") and dir is not None:
            same = open_store(dir).look(f"{dir}/{step_name(self._task.step)}").checkpoint or open_store(dir).latest()
            resume = "never" if same is None else same.path
        self.checkpoint = self._task.checkpoint if self._is_it else resume
        return f"{self._task.scratch}/checkpoints-{self.number}", self.checkpoint

    def claim(self) -> str:
        """Make this checkpointer restore the checkpoint of the proof, and return the checkpoint's path."""
        self._is_it, self.checkpoint = True, str(self._task.checkpoint)
        return self.checkpoint

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        if self._is_it and request.own and candidate is not None:
            self.drop()
            self.given(request.state)
            self.begin(-1)  # a step that the program takes, even the restored step, belongs to the window

    def begin(self, step: int) -> None:
        Path(self._task.scratch, "restored").touch()
        super().begin(step)

    def length(self) -> int:
        ranks = self.setup.ranks
        return int(self._task.steps[str(ranks.rank)]) if ranks.size == self._task.ranks else self.steps

    def over(self, window: Window) -> None:
        """Write the results of this rank. If it has taken all steps, end it without the program's own exit."""
        ranks, scratch = self.setup.ranks, Path(self._task.scratch)
        part = scratch / f"rank{ranks.rank}.part"
        part.write_text(json.dumps({"rows": window.rows, **about(ranks.size)}))
        part.rename(part.with_suffix(".json"))
        same = ranks.size == self._task.ranks
        awaited = [rank for rank in range(ranks.size) if not same or self._task.steps[str(rank)]]
        if len(window.ends) < self.steps:  # the program ends, or this rank must still take part in a join
            return
        files, until = [scratch / f"rank{each}.json" for each in awaited], time.monotonic() + _WAIT_S
        while time.monotonic() < until and not all(each.exists() for each in files):
            time.sleep(0.02)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(0)

    def close(self, in_time: bool) -> None:
        self.has_left = True
        self.finish()


def observer(steps: int) -> Observer | None:
    """Return the extension for a new checkpointer; ``None`` if it records nothing."""
    number = next(_numbers)
    if path := os.environ.get(ENVIRONMENT):
        return Trial(json.loads(Path(path).read_text()), number)
    return Recorder(steps, number) if steps else None
