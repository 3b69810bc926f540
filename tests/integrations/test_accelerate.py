"""attach: save_state and load_state through a Checkpointer, and uneven inputs with exact numbers; DDP and FSDP2."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stagereg
from stagereg.checkpoint.store.failpoints import watch
from stagereg.errors import CheckpointError, ConfigError, InstallationError, JoinError
from stagereg.testing import run_ranks

pytest.importorskip("accelerate", reason="make frameworks installs it")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)

from stagereg.integrations.accelerate import attach

EXAMPLE = Path(__file__).parents[2] / "examples/integrations/accelerate_train.py"
LIMIT_S = 40
EXAMPLE_S = 100
PORTS = itertools.count(10_000 + 20 * (os.getpid() % 1_000))
"""Below those that the system gives to others in between."""


class Counter:
    """Something of the user's that is registered for checkpointing."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def parts() -> tuple[Any, Any, Any]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    adamw = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, adamw, torch.optim.lr_scheduler.ExponentialLR(adamw, 0.9)


class Program:
    """A training program for accelerate, on one process or a rank of several."""

    def __init__(self, fsdp: bool = False, seed: int = 0, adapter: bool = True, join: bool = False, **config: Any):
        options = config.pop("options", {})
        self.accelerator: Any = Accelerator(cpu=True, project_config=ProjectConfiguration(**config))
        if fsdp:  # accelerate chooses FSDP on accelerators alone; all that follows is its own code
            AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        set_seed(seed)
        module, adamw, schedule = parts()
        loader = DataLoader(TensorDataset(torch.randn(16, 4, dtype=torch.double)), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            module, adamw, schedule, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        if adapter:
            attach(self.accelerator, join=join, **options)

    def step(self, x: torch.Tensor) -> None:
        self.accelerator.backward(self.model(x).square().mean())
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.n += 1

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.step(torch.randn(4, 4, dtype=torch.double) * (random.random() + np.random.rand()))

    def save_each(self, *where: Path | str | None) -> list[Any]:
        """Train before each save, then end training; return what each save has to bring back."""
        states = []
        for each in where:
            self.train()
            returned = self.accelerator.save_state(each)
            assert each is None or returned == Path(each)
            states.append(self.seen())
        self.accelerator.end_training()
        return states

    def seen(self) -> list[Any]:
        """All that a checkpoint is to bring back, as values to compare; the random numbers are drawn."""
        states = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        generator = self.loader.synchronized_generator  # None on one process
        order = None if generator is None else generator.get_state()
        drawn = [random.random(), float(np.random.rand()), torch.rand(2)]
        return plain([*states, self.counter.n, order, self.loader.iteration, self.accelerator.step, *drawn])


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.removeprefix("module.") if isinstance(key, str) else key: plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.tolist()
    return value


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Forget what accelerate shares between the Accelerators of a process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def visible(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name != ".stagereg")


def reset() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Hold the writing of saves until the event is set, at the end of the block at last."""
    goes_on = threading.Event()
    watch(lambda point: threading.current_thread() is threading.main_thread() or goes_on.wait(60))
    try:
        yield goes_on
    finally:
        goes_on.set()
        watch(None)


# -- where checkpoints lie


def test_a_later_save_replaces_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    last = tmp_path / "last"
    others = ["step-00000001", "step-100", "notes.txt"]  # of the program, the first two directories
    for name in others[:2]:
        (last / name / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/manifest.json").write_text("{}")
    (last / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (last / others[2]).write_text("")
    *_, state = Program().save_each(*[last] * 4)
    assert visible(last) == sorted([*others, "step-00000002", "step-00000006"])
    assert (tmp_path / "elsewhere/manifest.json").exists()
    other = Program(seed=1)
    other.accelerator.load_state(last)
    assert other.seen() == state
    other.accelerator.save_state(last)
    other.accelerator.end_training()
    assert visible(last) == sorted([*others, "step-00000002", "step-00000007"])


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    link = tmp_path / "run/last"
    link.symlink_to(tmp_path / "disk/last")
    *_, state = Program().save_each(link, link)
    assert link.is_symlink()
    assert visible(tmp_path / "disk/last") == ["step-00000002"]
    assert os.listdir(tmp_path / "run") == ["last"]
    other = Program(seed=1)
    other.accelerator.load_state(link)
    assert other.seen() == state


def test_what_a_program_makes_meanwhile_stays(tmp_path: Path) -> None:
    """A directory is made between ``save_state(dir)`` and the end of that save: with files in it, or without."""
    program = Program()
    with held():
        program.accelerator.save_state(tmp_path / "a")
        (tmp_path / "a").mkdir()
        (tmp_path / "a/tokenizer.json").write_text("{}")
    program.accelerator.end_training()
    assert visible(tmp_path / "a") == ["step-00000001", "tokenizer.json"]


def test_a_path_that_becomes_a_file_fails_the_save_and_keeps_the_file(tmp_path: Path) -> None:
    program = Program()
    with held():
        program.accelerator.save_state(tmp_path / "a")
        (tmp_path / "a").write_text("mine")
    with pytest.raises(CheckpointError, match=r"a rename or deletion in .* failed"):
        program.accelerator.load_state(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"
    (tmp_path / "a").unlink()
    program.accelerator.save_state(tmp_path / "b")  # after which what failed is done again
    program.accelerator.end_training()
    assert visible(tmp_path) == ["a", "b"]
    assert visible(tmp_path / "a") == ["step-00000001"]


def test_directories_with_different_parents(tmp_path: Path) -> None:
    states = Program().save_each(*[tmp_path / name for name in ("1/state", "2/state", "1/state")])
    for name, state in (("1/state", states[2]), ("2/state", states[1])):
        other = Program(seed=1)
        other.accelerator.load_state(tmp_path / name)
        assert other.seen() == state
    program = Program(options={"stager": stagereg.build("stager", "overlapped")})
    program.accelerator.save_state(tmp_path / "1/state")
    with pytest.raises(ConfigError, match="serves only one Accelerator"):
        program.accelerator.save_state(tmp_path / "2/state")


@pytest.mark.parametrize("at", ["writing", "described", "committed", "retained"])
def test_a_crash_leaves_the_previous_checkpoint_complete(tmp_path: Path, at: str) -> None:
    command = [sys.executable, "-c", KILLED, tmp_path / "a", at]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == -signal.SIGKILL
    assert visible(tmp_path) == ["a"]
    with stagereg.open_checkpoint(tmp_path / "a", verify=True) as checkpoint:
        assert (checkpoint["model.weight"] == 1).all()
    accelerator: Any = Accelerator(cpu=True)
    attach(accelerator)
    model = accelerator.prepare(torch.nn.Linear(10, 10))
    accelerator.load_state(tmp_path / "a")
    assert (model.weight == 1).all()
    accelerator.save_state(tmp_path / "b")
    accelerator.end_training()
    assert not list((tmp_path / ".stagereg").glob("*step-*")), "what the killed run left is deleted"


KILLED = """
import os, signal, sys, torch
from accelerate import Accelerator
from stagereg.checkpoint.store.failpoints import watch
from stagereg.integrations.accelerate import attach
accelerator = Accelerator(cpu=True)
attach(accelerator)
model = accelerator.prepare(torch.nn.Linear(10, 10))
for value in (1.0, 2.0):
    torch.nn.init.constant_(model.weight, value)
    if value == 2.0:
        accelerator.free_memory()  # waits
        model = accelerator.prepare(model)
        watch(lambda point: point == sys.argv[2] and os.kill(os.getpid(), signal.SIGKILL))
    accelerator.save_state(sys.argv[1])
accelerator.end_training()
"""


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    states = Program(**config).save_each(None, None)
    file = next((tmp_path / "checkpoints/step-00000001").glob("*.distcp"))
    file.write_bytes(b"x" + file.read_bytes()[1:])
    other = Program(seed=1)
    with caplog.at_level(logging.WARNING):
        other.accelerator.load_state(tmp_path / "checkpoints")
    assert other.seen() == states[0]
    assert "step-00000001 is corrupt and was skipped" in caplog.text


def test_automatic_names_are_steps_and_total_limit_is_keep(tmp_path: Path) -> None:
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2}
    states = Program(**config).save_each(None, None, None)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000001", "step-00000002"]

    other = Program(seed=1, **config)
    with pytest.raises(CheckpointError, match=r"earlier run, up to step-00000002\. Call load_state"):
        other.accelerator.save_state()
    other.accelerator.load_state(tmp_path / "checkpoints/checkpoint_1")
    assert other.seen() == states[1]
    other.accelerator.load_state()
    assert other.seen() == states[2]
    other.accelerator.save_state()
    other.accelerator.end_training()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000002", "step-00000003"]


def test_without_a_limit_all_automatic_ones_stay(tmp_path: Path) -> None:
    Program(project_dir=str(tmp_path), automatic_checkpoint_naming=True).save_each(*[None] * 4)
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 4


def near(folder: Path, **options: Any) -> dict[str, Any]:
    tier = stagereg.build("tier", "disk", dir=str(folder / "near"), every=options.pop("tier_every", 10), copies=0)
    config = {"project_dir": str(folder), "automatic_checkpoint_naming": True}
    return {**config, "options": {"tier": tier, **options}}


def test_a_tier_has_its_own_interval_in_calls_of_save_state(tmp_path: Path) -> None:
    program = Program(**near(tmp_path, tier_every=2, every=6))
    for step in range(12):
        program.train(1)
        program.accelerator.save_state()
        if step == 10:
            state = program.seen()
    program.accelerator.end_training()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000006"]

    other = Program(seed=1, **near(tmp_path, tier_every=2, every=6))
    other.accelerator.load_state()
    assert other.seen() == state
    assert other.accelerator.project_configuration.iteration == 11
    other.accelerator.end_training()


# -- migration


@pytest.mark.parametrize("safe", [True, False])
def test_what_accelerate_alone_saved_is_loaded(tmp_path: Path, safe: bool) -> None:
    program = Program(adapter=False)
    program.train()
    program.accelerator.save_state(str(tmp_path / "a"), safe_serialization=safe)
    saved = program.seen()
    other = Program(seed=1)
    other.accelerator.load_state(str(tmp_path / "a"))
    loaded = other.seen()
    assert loaded[:4] == saved[:4]
    assert loaded[-2:] == saved[-2:]
    other.train()
    other.accelerator.save_state(tmp_path / "a")
    state = other.seen()
    other.accelerator.load_state(tmp_path / "a")
    assert other.seen() == state


def test_the_newest_of_a_project_may_be_accelerates(tmp_path: Path) -> None:
    config = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    _, old = Program(adapter=False, **config).save_each(None, None)
    other = Program(seed=1, **config)
    other.accelerator.load_state()
    assert other.seen()[:4] == old[:4]
    [new] = other.save_each(None)
    assert sorted(each.name for each in (tmp_path / "checkpoints").glob("*_*")) == ["checkpoint_0", "checkpoint_1"]
    assert (tmp_path / "checkpoints/step-00000002").is_dir()
    third = Program(seed=2, **config)
    third.accelerator.load_state()
    assert third.seen() == new


def seedable(seed: int) -> tuple[Any, Any]:
    reset()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(seed)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(16.0)), batch_size=2, shuffle=True))
    attach(accelerator)
    return accelerator, loader


def test_a_shuffled_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    """Also in a program that is started with another seed: no sample twice, none left out."""
    accelerator, loader = seedable(0)
    seen = []
    for i, (x,) in enumerate(loader):
        seen += x.tolist()
        if i == 3:
            accelerator.save_state(tmp_path / "a")
    accelerator.end_training()
    accelerator, loader = seedable(1)
    accelerator.load_state(tmp_path / "a")
    assert [x for (batch,) in accelerator.skip_first_batches(loader, 4) for x in batch.tolist()] == seen[8:]


# -- what is refused


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"every": 10}, "call save_state whenever a checkpoint is due"),
        ({"dir": "x"}, "pass the directory to save_state\\(dir\\)"),
        ({"kepe": 10}, "Did you mean 'keep'"),
        ({"keep": 0}, "at least 1"),
        ({"keep": 2}, "keep requires automatic_checkpoint_naming"),
        ({"tier": "memory"}, "automatic_checkpoint_naming"),
    ],
)
def test_options_of_no_use_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        attach(Accelerator(cpu=True), **options)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        (DistributedType.DEEPSPEED, {}, "this Accelerator uses DEEPSPEED"),
        (DistributedType.NO, {"save_on_each_node": True}, "save_on_each_node"),
        (DistributedType.NO, {"automatic_checkpoint_naming": True}, "project_dir"),
    ],
)
def test_what_cannot_be_kept_is_refused(kind: DistributedType, config: dict[str, Any], why: str) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**config))
    AcceleratorState._shared_state["distributed_type"] = kind
    with pytest.raises(ConfigError, match=why):
        attach(accelerator)


def test_hooks_are_refused_before_and_after(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: None)
    with pytest.raises(ConfigError, match="register_for_checkpointing"):
        attach(accelerator)
    handle.remove()
    attach(accelerator)
    for register in (accelerator.register_save_state_pre_hook, accelerator.register_load_state_pre_hook):
        with pytest.raises(ConfigError, match="register_for_checkpointing"):
            register(lambda *_: None)


def test_attaching_twice_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    with pytest.raises(ConfigError, match="Call attach only once"):
        attach(accelerator)


def test_arguments_without_a_use_are_refused(tmp_path: Path) -> None:
    accelerator: Any = Program().accelerator
    with pytest.raises(ConfigError, match="safe_serialization=False"):
        accelerator.save_state(tmp_path / "a", safe_serialization=False)
    with pytest.raises(ConfigError, match="No directory was given"):
        accelerator.save_state()
    with pytest.raises(ConfigError, match="no checkpoint in"):
        accelerator.load_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "a")
    with pytest.raises(ConfigError, match="strict=False"):
        accelerator.load_state(tmp_path / "a", strict=False)
    with pytest.raises(ConfigError, match="is a URL"):
        accelerator.save_state("memory://bucket/a")


def test_paths_that_must_not_be_replaced_are_refused(tmp_path: Path) -> None:
    with stagereg.Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"n": 1})
    (tmp_path / "file").write_text("")
    accelerator: Any = Program().accelerator
    for name, why in (("run", "contains checkpoints of a Checkpointer"), ("file", "is a file")):
        with pytest.raises(ConfigError, match=why):
            accelerator.save_state(tmp_path / name)
    accelerator.end_training()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.stagereg").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match="is a link"):
        Program().accelerator.save_state(tmp_path / "linked/a")
    assert stagereg.open_checkpoint(tmp_path / "run", verify=True).step == 1


def test_a_changed_accelerate_is_named_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "save_state", lambda self, output_dir, renamed: None)
    with pytest.raises(InstallationError, match=r"accelerate \d+\.\d+.* is not supported: .* save_state"):
        attach(Accelerator(cpu=True))


# -- the background


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    program = Program()
    program.accelerator.save_state(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        program.accelerator.save_state(tmp_path / "file/b")
    program.counter.n = lambda: None  # type: ignore[assignment]
    with contextlib.suppress(CheckpointError):
        program.accelerator.save_state(tmp_path / "c")
        with pytest.raises(CheckpointError, match="custom"):
            program.accelerator.end_training()
    assert visible(tmp_path) == ["a", "file"]


def test_what_another_accelerator_still_writes_is_loaded(tmp_path: Path) -> None:
    program = Program()
    with held() as goes_on:
        program.accelerator.save_state(tmp_path / "a")
        state, other = program.seen(), Program(seed=1)
        threading.Timer(0.5, goes_on.set).start()
        other.accelerator.load_state(tmp_path / "a")
    assert other.seen() == state


SCRIPT = """
import sys, torch
from accelerate import Accelerator
from stagereg.integrations.accelerate import attach
accelerator = Accelerator(cpu=True)
attach(accelerator)
model = accelerator.prepare(torch.nn.Linear(1000, 1000))
accelerator.save_state(sys.argv[1])
"""


def test_the_end_of_the_process_waits_for_the_last_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "a"], check=True, timeout=LIMIT_S)
    assert stagereg.open_checkpoint(str(tmp_path / "a"), verify=True)["model.weight"].shape == (1000, 1000)
    assert visible(tmp_path) == ["a"]


def test_freed_objects_are_not_kept(tmp_path: Path) -> None:
    import gc
    import weakref

    program = Program()
    program.accelerator.save_state(tmp_path / "a")
    gone = weakref.ref(program.model)
    program.accelerator.free_memory()
    del program.model, program.optimizer, program.scheduler
    gc.collect()
    assert gone() is None


# -- several ranks


def saves(rank: int, world_size: int, root: str, fsdp: bool) -> list[Any]:
    program = Program(fsdp=fsdp, seed=rank)
    for step in range(4):
        program.train()
        program.accelerator.save_state(f"{root}/{step}")
    program.train()
    state = program.seen()
    program.accelerator.load_state(f"{root}/3")
    program.train()
    again = program.seen()
    reset()
    other = Program(fsdp=fsdp, seed=7 + rank)
    other.accelerator.load_state(f"{root}/3")
    other.train()
    states = [state, again, other.seen()]
    other.accelerator.end_training()
    return states


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_ranks_go_on_alike(tmp_path: Path, fsdp: bool) -> None:
    for state, again, other in run_ranks(saves, 2, args=(str(tmp_path), fsdp), timeout_s=LIMIT_S):
        assert state == again == other
    assert visible(tmp_path) == ["0", "1", "2", "3"]


def loads(rank: int, world_size: int, root: str) -> list[Any]:
    program = Program(seed=7 + rank)
    program.accelerator.load_state(root)
    return [program.accelerator.num_processes, *program.seen()[:4]]


def saves_sharded(rank: int, world_size: int, root: str) -> list[Any]:
    return Program(fsdp=True).save_each(root)[0][:4]


def test_what_fsdp2_saved_another_number_of_ddp_ranks_loads(tmp_path: Path) -> None:
    model, _, scheduler, counter = run_ranks(saves_sharded, 2, args=(str(tmp_path / "a"),), timeout_s=LIMIT_S)[0]
    for loaded in run_ranks(loads, 3, args=(str(tmp_path / "a"),), timeout_s=LIMIT_S):
        assert loaded[:2] == [3, model]
        assert loaded[3:] == [scheduler, counter]


# -- uneven inputs

LENGTHS = ((3, 5), (4, 2), (2, 3))


def batches(rank: int, epoch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * epoch + rank)
    return [torch.randn(3, 4, dtype=torch.double, generator=generator) for _ in range(LENGTHS[epoch][rank])]


def joins(rank: int, world_size: int, fsdp: bool, root: str) -> list[Any]:
    program = Program(fsdp=fsdp, join=True)
    for epoch in range(len(LENGTHS)):
        with program.accelerator.join_uneven_inputs([program.model], even_batches=False):
            for i, x in enumerate(batches(rank, epoch)):
                program.step(x)
                if i == 3:  # one rank has left by then
                    program.accelerator.save_state(f"{root}/{epoch}")
    states = [
        program.model.state_dict(),
        program.optimizer.state_dict()["state"],
        program.scheduler.scheduler.last_epoch,
    ]
    found = plain([*states, program.accelerator.project_configuration.iteration, sorted(vars(program.optimizer))])
    program.accelerator.load_state(f"{root}/1")
    return [*found, plain(program.model.state_dict())]


def expected() -> list[Any]:
    """What one process computes: in each step the mean over the world of the ranks' gradients."""
    set_seed(0)
    module, optimizer, scheduler = parts()
    saved: Any = None
    for epoch, lengths in enumerate(LENGTHS):
        inputs = [batches(rank, epoch) for rank in range(2)]
        for i in range(max(lengths)):
            (sum(module(each[i]).square().mean() for each in inputs if i < len(each)) / 2).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            for _ in range(2):  # AcceleratedScheduler: once for each process
                scheduler.step()
            optimizer.zero_grad()
            if epoch == 1 and i == 3:
                saved = plain(module.state_dict())
    return [plain(module.state_dict()), plain(optimizer.state_dict()["state"]), scheduler.last_epoch, 2, saved]


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_uneven_inputs_have_exact_numbers(tmp_path: Path, fsdp: bool) -> None:
    first, second = run_ranks(joins, 2, args=(fsdp, str(tmp_path)), timeout_s=LIMIT_S)
    assert first == second
    assert "step" not in first.pop(4), "what was replaced is put back"
    for found, right in zip(first, expected(), strict=True):
        assert_close(found, right)


def assert_close(found: Any, right: Any) -> None:
    if isinstance(right, dict):
        assert found.keys() == right.keys()
        for key in right:
            assert_close(found[key], right[key])
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(right), rtol=1e-9, atol=1e-12)


def drifts(rank: int, world_size: int, how: str) -> str:
    program = Program(join=True)
    accelerator = program.accelerator
    with pytest.raises(JoinError) as error:  # noqa: PT012
        if how == "accumulates":
            accelerator.gradient_accumulation_steps = 2
        with accelerator.join_uneven_inputs([program.model], even_batches=None if how == "not prepared" else False):
            for x in batches(rank, 0)[: 0 if how == "no batch" and rank == 0 else 9]:
                program.step(x)
            if how == "schedule":
                program.scheduler.step()
            if how == "clips once" and rank == 1:
                accelerator.clip_grad_norm_(program.model.parameters(), 0.25)
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("accumulates", "gradient_accumulation_steps of 1"),
        ("no batch", "This rank has had no batch yet"),
        ("not prepared", r"cannot join a loop over a loader.*pass even_batches=False to join_uneven_inputs"),
        ("schedule", r"their scheduler counts: rank 0 has \[16\], rank 1 has \[12\]"),
        ("clips once", r"the calls of their last step: rank 0 has .'clip_grad_norm_\(0.5\)', 'step of optimizer 0'"),
    ],
)
def test_what_would_drift_is_an_error_on_all_ranks(how: str, why: str) -> None:
    for text in run_ranks(drifts, 2, args=(how,), timeout_s=LIMIT_S):
        assert re.search(why, text), text


def loops_as_accelerate(rank: int, world_size: int) -> list[Any]:
    program = Program(join=True)
    sampler = program.loader.batch_sampler
    lengths = []
    own = program.optimizer.step = program.optimizer.step  # as a schedule that is given this optimizer replaces it
    for even in (None, True, False):
        with program.accelerator.join_uneven_inputs([program.model], even_batches=even):
            lengths.append(sampler.even_batches)
            for (x,) in program.loader:
                program.step(x)
    assert vars(program.optimizer)["step"] is own
    return [*lengths, sampler.even_batches, program.counter.n]


def loops_rightly(rank: int, world_size: int) -> int:
    program = Program(join=True)
    join, evaluated = program.accelerator.join_uneven_inputs, program.accelerator.prepare(DataLoader(range(4)))
    for even, loader in ((None, program.loader), (None, buffered(program.loader)), (True, program.loader.dataset)):
        with join([program.model], even_batches=even):
            with torch.no_grad():
                program.model(torch.ones(1, 4, dtype=torch.double))
            for i, (x,) in enumerate(loader):
                for _ in evaluated:
                    break
                for _ in evaluated:
                    pass
                program.step(x)
                if i == 3:
                    break
    assert "backward" not in vars(program.accelerator)
    return program.counter.n


def buffered(loader: Any) -> Iterator[Any]:
    """Take two batches ahead, as a loader that prefetches does."""
    ahead: list[Any] = []
    for batch in loader:
        ahead.append(batch)
        if len(ahead) > 2:
            yield ahead.pop(0)
    yield from ahead


def test_loops_with_even_batches_are_not_refused() -> None:
    assert run_ranks(loops_rightly, 2, timeout_s=LIMIT_S) == [12, 12]


def test_even_batches_are_overridden_as_accelerate_does() -> None:
    for found in run_ranks(loops_as_accelerate, 2, timeout_s=LIMIT_S):
        assert found == [True, True, False, True, 12]


# -- the example, as a user runs it


def example(dir: Path, epochs: int, kill_at: int | None = None, after_s: float = 0.0) -> list[str]:
    """Run the example on two ranks, or kill both so long after it has saved a step; return its digests."""
    port = next(PORTS)
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(2):  # as torchrun starts them, but in one process group
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        env = {**os.environ, **{name: str(value) for name, value in sizes.items()}, "MASTER_ADDR": "127.0.0.1"}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(EXAMPLE), "--dir", str(dir), "--epochs", str(epochs)]
        group = ranks[0].pid if ranks else 0
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env=env, process_group=group, **pipes))
    ends = time.monotonic() + EXAMPLE_S
    try:
        if kill_at is not None:
            while newest(dir) < kill_at and ranks[0].poll() is None and time.monotonic() < ends:
                time.sleep(0.002)
            time.sleep(after_s)
            os.killpg(ranks[0].pid, signal.SIGKILL)
        output = "".join(each.communicate(timeout=EXAMPLE_S)[0] for each in ranks)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert {each.returncode for each in ranks} == {0 if kill_at is None else -signal.SIGKILL}, output
    return re.findall(r"digest ([0-9a-f]{16})", output)


def newest(dir: Path) -> int:
    names = os.listdir(dir) if dir.is_dir() else []
    return max((int(each[5:13]) for each in names if each.startswith("step-")), default=-1)


def content(dir: Path) -> dict[str, Any]:
    with stagereg.open_checkpoint(str(dir), verify=True) as checkpoint:
        tensors = {name: checkpoint[name].tolist() for name in checkpoint}
        return {"tensors": tensors, **{name: checkpoint.entry(name) for name in ("scheduler", "custom", "accelerator")}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    digests = example(dir, 4)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    return digests, content(dir)


def killed_and_resumed(dir: Path, seed: int, kills: int) -> tuple[list[str], dict[str, Any]]:
    drawn = random.Random(seed)
    for _ in range(kills):
        example(dir, 4, drawn.randint(newest(dir) + 1, 9), drawn.uniform(0.0, 0.05))
    return example(dir, 4), content(dir)


@pytest.mark.timeout(300)  # for four runs of the example, each of which has its own limit
def test_stopped_killed_and_resumed_ends_bit_for_bit_alike(uninterrupted: Any, tmp_path: Path) -> None:
    example(tmp_path / "run", 1)
    assert newest(tmp_path / "run") == 3
    assert killed_and_resumed(tmp_path / "run", 1, kills=1) == uninterrupted
