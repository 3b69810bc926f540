"""What a checkpoint costs training, saved by the trainer itself and through stagereg: ``make bench-integrations``.

Each trainer trains the model of ``stagereg bench stall`` on one rank, in segments as there. With torch, accelerate and
torchtitan the loop is the user's; Lightning's and Hugging Face's ``Trainer`` have their own, which runs on a thread and
stops after each step. One group a trainer, in a process of its own; each row has a model and a trainer of its own. What
a trainer has not flushed is flushed after its turn, which is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import itertools
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict_saver import async_save

import stagereg.bench.command as command
import stagereg.bench.stall as stall
from stagereg.assembly import Preemption
from stagereg.bench.ceiling import flush
from stagereg.bench.measure import Series, in_own_process, interleave, quiet
from stagereg.bench.report import Group, Line
from stagereg.bench.stall import Segment, StallTraining
from stagereg.checkpoint.options import Restore
from stagereg.errors import CheckpointError
from stagereg.extensions.interop.dcp_writer import DcpWriter
from tests.benchmarks import program

_LIMIT_S = 300.0  # for a step, and for a checkpoint to be complete
_MANY = 1_000_000  # steps, more than are made


def row_names() -> list[str]:
    """The names of all rows there are: a trainer, and a way to save."""
    return [f"{trainer}:{way}" for trainer, (_, durable) in _TRAINERS.items() for way in durable]


def group(trainer: str, rows: Sequence[str], rounds: int, scale: float, folder: Path) -> Group:
    """Measure those of :func:`row_names` that are of one trainer, into an empty directory.

    Raises:
        LaunchError: the process that measures ended before it was done.
    """
    heads = ["blocked ms", "lost ms", "± ms", "IQR ms", "lost steps", "durable"]
    if importlib.util.find_spec(trainer) is None:
        reason = f"skipped: {trainer} is not installed (pip install './stagereg[{trainer}]')"
        return Group(trainer, f"integrations: {reason}", heads, [Line(trainer, [*("-" for _ in heads[1:]), reason])])
    taken = in_own_process(_measure, rows, rounds, scale, folder, OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    mib = _nbytes(StallTraining(scale, "cpu")) / 2**20
    measured = stall.group(trainer, f"integrations {trainer}: {mib:.1f} MiB, 1 torch thread", taken)
    durable = {f"{trainer}:{way}": text for way, text in _TRAINERS[trainer][1].items()}
    lines = [dataclasses.replace(x, cells=x.cells and [*x.cells, durable[x.row]]) for x in measured.lines]
    return dataclasses.replace(measured, heads=heads, lines=lines)


def _measure(rows: Sequence[str], rounds: int, scale: float, folder: Path) -> list[Series]:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    if rows[0].startswith("torch"):  # torchtitan too; accelerate destroys a group at the end of each row
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    cases = [TrainerSegment(row, StallTraining(scale, "cpu"), folder / row.replace(":", "-")) for row in rows]
    with quiet(), contextlib.redirect_stdout(io.StringIO()):  # the output of trainers is no part of the tables
        return interleave(cases, rounds, what="integrations")


class TrainerSegment(Segment):
    """Four steps by a trainer, and then a checkpoint and four steps that it may disturb."""

    _begin: Callable[[], Any] | None = None

    def turn(self) -> Iterator[float | None]:
        """Leave nothing to be written that the next row would have to wait for."""
        yield from super().turn()
        if not self.rows[-1].endswith(":stagereg"):
            flush(self.folder)

    def prepare(self) -> None:
        """Make the trainer, once. Delete the checkpoint before, where no trainer does that."""
        for old in self.folder.glob("torch-*"):
            shutil.rmtree(old)
        if self._begin is None:
            self._nbytes = _nbytes(self.training)
            self.folder.mkdir()
            self._closing = contextlib.ExitStack()
            trainer, _, way = self.rows[-1].partition(":")
            self._begin = _TRAINERS[trainer][0](self.training, way, self.folder, self._closing)

    def save(self) -> Any:
        """Wait until the trainer, or stagereg, says that it is complete."""
        if self._begin is None or self.rows[-1].endswith(stall.BASE):
            return super().save()
        return self._begin()

    def prove(self) -> None:
        """Raise ``CheckpointError`` if the checkpoints that are there have less than the weights and Adam's state."""
        written = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if written < self._nbytes and not self.rows[-1].endswith(stall.BASE):
            raise CheckpointError(f"only {written} of {self._nbytes} bytes were written")

    def close(self) -> None:
        """Close the trainer."""
        if self._begin is not None:
            self._closing.close()


# -- each begins a checkpoint, and returns what waits until it is complete; with the loop of the user


def _torch(training: StallTraining, way: str, folder: Path, closing: contextlib.ExitStack) -> Any:
    numbers = itertools.count()

    def save() -> Any:
        target = folder / f"torch-{next(numbers)}"
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        writer = DcpWriter(target) if way == "stagereg" else None
        future: Any = async_save(state, checkpoint_id=target, storage_writer=writer)
        return future.result

    return save


def _accelerate(training: StallTraining, way: str, folder: Path, closing: contextlib.ExitStack) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    training.model, training.optimizer = accelerator.prepare(training.model, training.optimizer)
    if way == "stagereg":
        from stagereg.integrations.accelerate import attach

        attach(accelerator)
    closing.callback(accelerator.end_training)

    def save() -> Any:
        path = folder / "checkpoints" / f"step-{project.iteration:08d}"
        accelerator.save_state()
        return lambda: _wait_for(path) if way == "stagereg" else None

    return save


def _torchtitan(training: StallTraining, way: str, folder: Path, closing: contextlib.ExitStack) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    from stagereg.integrations.torchtitan import StageregCheckpointManager

    parts = [training.model]
    adam = ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-4})
    optimizers = OptimizersContainer.Config(param_groups=[adam], implementation="for-loop").build(model_parts=parts)
    schedule = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=_MANY)
    kind: Any = StageregCheckpointManager if way == "stagereg" else CheckpointManager
    mode = {"async_mode": "async"} if way == "async" else {}
    objects = {"dataloader": None, "optimizers": optimizers, "lr_schedulers": schedule, "states": {}}
    manager = kind.Config(enable=True, interval=1, keep_latest_k=2, **mode).build(
        model_parts=parts, sd_adapter=None, base_folder=str(folder), **objects
    )
    closing.callback(manager.close)

    def step() -> None:
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedule.step()

    training.optimizer = SimpleNamespace(step=step, zero_grad=optimizers.zero_grad)  # type: ignore[assignment]
    numbers = itertools.count(1)

    def save() -> Any:
        manager.save(next(numbers))
        return manager.maybe_wait_for_saving

    return save


# -- likewise, with a loop of the trainer's own


def _lightning(training: StallTraining, way: str, folder: Path, closing: contextlib.ExitStack) -> Any:
    from lightning import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from stagereg.integrations.lightning import StageregCheckpointIO

    class LightningLoss(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Loss(training.model)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer

    class LightningSteps(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            while (then := loop.pause()) == "save":
                trainer.save_checkpoint(path)
            trainer.should_stop = then == "stop"

    path = folder / "last.ckpt"
    plugin: Any = AsyncCheckpointIO() if way == "async" else None
    if way == "stagereg":
        plugin = StageregCheckpointIO(restore=Restore(verify="fast"))
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu", max_steps=_MANY, callbacks=[LightningSteps()], plugins=plugin, default_root_dir=folder, **off
    )
    data = torch.utils.data.DataLoader(_samples(training), batch_size=2)
    loop = _StoppedLoop(lambda: trainer.fit(LightningLoss(), data))
    loop.begin(training, closing)

    def save() -> Any:
        loop.go_on("save")
        waits = {"async": lambda: plugin.teardown(), "stagereg": lambda: plugin.choose(path)}
        return waits.get(way, lambda: None)

    return save


def _transformers(training: StallTraining, way: str, folder: Path, closing: contextlib.ExitStack) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from stagereg.integrations.transformers import StageregCallback

    class TransformersSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            then = loop.pause()
            control.should_save, control.should_training_stop = then == "save", then == "stop"

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = loop.pause() == "stop"

    options: dict[str, Any] = {"save_strategy": "no", "save_total_limit": 2, "logging_strategy": "no", "use_cpu": True}
    options |= {"report_to": "none", "disable_tqdm": True, "max_grad_norm": 0, "per_device_train_batch_size": 2}
    callbacks: list[Any] = [TransformersSteps()]
    if way == "stagereg":
        callbacks.append(StageregCallback(preemption=Preemption(grace_period=None)))  # this is no main thread
    trainer = Trainer(
        _Loss(training.model),
        TrainingArguments(str(folder), max_steps=_MANY, **options),
        train_dataset=_samples(training),
        optimizers=(training.optimizer, None),
        callbacks=callbacks,
    )
    loop = _StoppedLoop(trainer.train)
    loop.begin(training, closing)

    def save() -> Any:
        loop.go_on("save")
        path = folder / "checkpoints" / f"step-{trainer.state.global_step:08d}"
        return lambda: _wait_for(path) if way == "stagereg" else None

    return save


class _StoppedLoop:
    """A trainer's loop on a thread of its own, which stops where it calls :meth:`pause`."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._told, self._done = SimpleQueue[str](), SimpleQueue[BaseException | None]()
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)

    def begin(self, training: StallTraining, closing: contextlib.ExitStack) -> None:
        """Have the trainer make its first step, and ``training`` step by it."""
        closing.callback(self.close)
        training.step = lambda: self.go_on("step")  # type: ignore[method-assign]
        self._thread.start()
        self._wait()

    def pause(self) -> str:
        """Stop, on the trainer's thread; return what it is to do then: ``step``, ``save`` or ``stop``."""
        self._done.put(None)
        return self._told.get()

    def go_on(self, then: str) -> None:
        """Have the trainer do that; return when it has stopped again, or raise what it raised."""
        self._told.put(then)
        self._wait()

    def close(self) -> None:
        self._told.put("stop")
        self._thread.join(_LIMIT_S)

    def _run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            self._done.put(error)

    def _wait(self) -> None:
        if (error := self._done.get(timeout=_LIMIT_S)) is not None:
            raise error


class _Loss(torch.nn.Module):
    """A model that returns its loss, as Hugging Face's do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.model(input_ids).flatten(0, 1), labels.flatten())}


def _nbytes(training: StallTraining) -> int:
    return 3 * sum(x.nbytes for x in training.model.parameters())


def _samples(training: StallTraining) -> Any:
    return [{"input_ids": x[:-1], "labels": x[1:]} for x in training.tokens] * 1000


def _wait_for(path: Path) -> None:
    """Return when a checkpoint of stagereg has appeared, which it does once it is complete."""
    limit = time.monotonic() + _LIMIT_S
    while not path.exists():
        if time.monotonic() > limit:
            raise CheckpointError(f"{path} has not appeared within {_LIMIT_S:.0f} s.")
        time.sleep(0.001)


_TRAINERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "torch": (_torch, {"none": "-", "async": "files", "stagereg": "yes"}),
    "accelerate": (_accelerate, {"none": "-", "own": "no", "stagereg": "yes"}),
    "lightning": (_lightning, {"none": "-", "own": "no", "async": "no", "stagereg": "yes"}),
    "transformers": (_transformers, {"none": "-", "own": "no", "stagereg": "yes"}),
    "torchtitan": (_torchtitan, {"none": "-", "own": "files", "async": "files", "stagereg": "yes"}),
}
"""Who makes a trainer's ways to save, and of each what has been flushed when a checkpoint is said to be complete."""


def groups(asked: argparse.Namespace, rows: Sequence[str]) -> list[Group]:
    """Measure rows of :func:`row_names`, and of each trainer the one without a checkpoint."""
    found = []
    for trainer in dict.fromkeys(row.partition(":")[0] for row in rows):
        wanted = [f"{trainer}:{way}" for way in _TRAINERS[trainer][1]]
        wanted = [row for row in wanted if row in rows or row == wanted[0]]
        with command.folder_below(asked.dir) as folder:
            found.append(group(trainer, wanted, asked.rounds, asked.scale, Path(folder)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs training, by the trainer and by stagereg.")
    command.add_options(parser, 9, lambda asked: row_names(), groups)
    return program.main(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
