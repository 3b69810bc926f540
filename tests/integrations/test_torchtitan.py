"""torchtitan through stagereg: the example goes on where it was, the manager does what torchtitan's own does."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="make frameworks installs it")

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

import stagereg
from stagereg.checkpoint.store.failpoints import watch
from stagereg.errors import CheckpointError, ConfigError, InstallationError
from stagereg.integrations.torchtitan import StageregCheckpointManager
from stagereg.testing.ranks import run_ranks

from ..support.watching import watching

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "torchtitan_train.py"
RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]


# -- the example


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*RUN, "--dir", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(run: subprocess.Popen[str]) -> tuple[str, list[int]]:
    """Return the digest that a run has ended with, and the steps it has made."""
    try:
        output, _ = run.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 0, output
    return output.split("digest ")[1].split()[0], [int(step) for step in re.findall(r"^step (\d+) ", output, re.M)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    digest, steps = finish(start(tmp_path_factory.mktemp("whole")))
    assert steps == [*range(1, 61)]
    return digest


def test_a_stopped_run_comes_to_the_same_end(uninterrupted: str, tmp_path: Path) -> None:
    finish(start(tmp_path, "--steps", "8"))
    digest, steps = finish(start(tmp_path))
    assert steps == [*range(9, 61)]
    assert digest == uninterrupted


# -- the manager


class State:
    """What torchtitan's Trainer saves of itself, and the position in a rank's data."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def __iter__(self) -> Any:
        while True:
            self.step += 1
            yield torch.full((4,), float(self.step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Stateless(State):
    """Has nothing to save, such as torchtitan's tests have for loaders and schedules."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


class Numbers(State, torch.utils.data.IterableDataset):  # type: ignore[misc, type-arg]
    """As a dataset."""


class Run:
    """A model, sharded where there are ranks, with torchtitan's optimizers, schedule and loader, and a manager."""

    def __init__(self, root: Path | str, seed: int = 0, kind: Any = StageregCheckpointManager, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), options.pop("second", torch.nn.Linear)(8, 4))
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if size > 1:
            fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (size,)))
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[self.model]
        )
        self.schedule = LRSchedulersContainer.Config(warmup_steps=4).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.progress, self.loader = State(), ParallelAwareDataloader(Numbers(), rank, size, batch_size=2)
        self.seen = torch.zeros(2)
        adapter = options.pop("sd_adapter", None)
        defaults: dict[str, Any] = {"interval": 2, "last_save_model_only": False, "initial_load_model_only": False}
        self.manager = kind.Config(enable=True, folder="ck", **{**defaults, **options}).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.progress, "seen": self.seen, "nothing": Stateless()},
            sd_adapter=adapter,
            base_folder=str(root),
        )

    def train(self, until: int, steps: int = 0) -> Run:
        """As torchtitan's Trainer does."""
        batches = iter(self.loader)
        while self.progress.step < until:
            self.progress.step += 1
            self.seen += 1
            self.optimizers.zero_grad()
            self.model(next(batches)).square().mean().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedule.step()
            self.manager.save(self.progress.step, last_step=self.progress.step == steps)
        return self

    def content(self) -> dict[str, Any]:
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in self.model.state_dict().items()}
        flat = {name: getattr(x, "full_tensor", lambda x=x: x)() if isinstance(x, torch.Tensor) else x
                for name, x in self.optimizers.state_dict().items()}  # fmt: skip
        return {
            **{name: x.tolist() for name, x in whole.items()},
            **{name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in flat.items()},
            "schedule": self.schedule.state_dict(),
            "step": self.progress.step,
            "seen": self.seen.tolist(),
            "data": self.loader.state_dict(),
        }

    def weights(self) -> dict[str, Any]:
        return {name: x for name, x in self.content().items() if name in self.model.state_dict()}


class Split(torch.nn.Module):
    """Has one parameter, of which its state dict has two, made anew each time; and a buffer that is not saved."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(out, 2, width))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._joined)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        w = state.pop(f"{prefix}w")
        state |= {f"{prefix}a": w[:, 0].contiguous(), f"{prefix}b": w[:, 1].contiguous()}

    @staticmethod
    def _joined(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        state[f"{prefix}w"] = torch.stack([state.pop(f"{prefix}{name}") for name in "ab"], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.sum(1).T


def steps_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "ck").iterdir() if path.name.startswith("step-"))


def expect_restored(saved: Run, root: Any, **options: Any) -> None:
    saved.manager.close()
    found = Run(root, seed=1, **options)
    assert found.manager.load()
    assert found.content() == saved.content()
    found.manager.close()


def test_all_that_the_trainer_saves_is_restored(tmp_path: Path) -> None:
    for root in (tmp_path, f"memory:/{tmp_path}"):
        expect_restored(Run(root).train(4), root)


class Noisy(torch.nn.Linear):
    """Draws from all three generators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        return super().forward(torch.nn.functional.dropout(x, 0.2)) * noise


def noisy(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    def run(folder: str, seed: int, until: int) -> dict[str, Any]:
        made = Run(root / folder, second=Noisy)
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed + rank)
        made.manager.load()
        content = made.train(until, until if folder == "end" else 0).content()
        made.manager.close()
        return {**content, "drawn": [random.random(), np.random.rand(), torch.rand(1).item()]}

    found = {"whole": run("whole", 1, 8)}
    for folder, until in (("end", 4), ("between", 5)):
        run(folder, 1, until)
        found[folder] = run(folder, 10, 8)
    return found


def test_random_numbers_of_each_rank_go_on(tmp_path: Path) -> None:
    """From the last save of a run, and from one before the step at which it was stopped."""
    for found in run_ranks(noisy, 2, args=(tmp_path,), timeout_s=60):
        assert found["end"] == found["between"] == found["whole"]


@pytest.mark.parametrize("kind", [StageregCheckpointManager, CheckpointManager])
def test_a_model_may_save_otherwise_than_it_is(tmp_path: Path, kind: Any) -> None:
    run_ranks(split, nproc=1, args=(str(tmp_path), kind), timeout_s=60)


def split(rank: int, world_size: int, root: str, kind: Any) -> None:
    saved = Run(root, kind=kind, second=Split).train(4)
    saved.manager.close()
    path = next(each for each in Path(root, "ck").iterdir() if re.fullmatch("step-0*4", each.name))
    names = {name.partition(".")[0]: name for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata}
    assert {"0", "1", "optimizer", "lr_scheduler", "train_state", "dataloader", "seen"} <= {*names}
    assert "cache" not in str(names)
    expect_restored(saved, root, second=Split)


def both_ways(rank: int, world_size: int, root: str) -> None:
    """What one of the two managers has saved the other one restores, sharded."""
    for one, other in ((StageregCheckpointManager, CheckpointManager), (CheckpointManager, StageregCheckpointManager)):
        where = f"{root}/{one.__name__}"
        saved = Run(where, kind=one).train(4)
        saved.manager.close()
        dist.barrier()
        [path] = [each for each in (Path(where) / "ck").iterdir() if re.fullmatch("step-0*4", each.name)]
        found = Run(f"{where}/other", seed=1, kind=other, initial_load_path=str(path))
        assert found.manager.load()
        assert found.content() == saved.content()
        model = Run(f"{where}/model", seed=1, kind=other, initial_load_path=str(path), initial_load_model_only=True)
        assert model.manager.load()
        assert (model.weights(), model.progress.step) == (saved.weights(), 0)
        for each in (found, model):
            each.manager.close()


def test_torchtitans_manager_and_this_load_each_others(tmp_path: Path) -> None:
    run_ranks(both_ways, nproc=2, args=(str(tmp_path),), timeout_s=90)


def test_a_folder_of_torchtitans_manager_is_gone_on_from(tmp_path: Path) -> None:
    run_ranks(migrated, nproc=1, args=(str(tmp_path),), timeout_s=60)
    assert steps_in(tmp_path) == ["step-00000006", "step-00000008", "step-2", "step-4"]


def migrated(rank: int, world_size: int, root: str) -> None:
    old = Run(root, kind=CheckpointManager).train(4)
    old.manager.close()
    run = Run(root, seed=1, keep_latest_k=2)
    assert run.manager.load()
    assert run.content() == old.content()
    run.train(8).manager.close()
    again = Run(root, seed=2)
    assert again.manager.load()
    assert again.progress.step == 8
    again.manager.close()


@pytest.mark.parametrize("load_only", [False, True])
def test_the_newest_undamaged_checkpoint_is_loaded(tmp_path: Path, load_only: bool) -> None:
    run = Run(tmp_path, keep_latest_k=3).train(6)
    run.manager.close()
    damaged = tmp_path / "ck" / "step-00000006" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = Run(tmp_path, seed=1, load_only=load_only)
    assert found.manager.load()
    assert found.progress.step == 4
    found.manager.close()


def test_a_tier_gets_its_own_steps_and_the_newest_of_both_is_loaded(tmp_path: Path) -> None:
    target = "stagereg.extensions.tiers.disk.DiskTier"
    tier = {"_target_": target, "dir": str(tmp_path / "near"), "every": 2, "copies": 0}
    options: dict[str, Any] = {"interval": 10, "checkpoint_options": {"tier": tier}}
    first = Run(tmp_path, **options)
    assert not first.manager.load()
    saved = first.train(4)
    saved.manager.close()
    assert steps_in(tmp_path) == []
    found = Run(tmp_path, seed=1, **options)
    assert found.manager.load()
    assert found.content() == saved.content()
    found.train(12, steps=12).manager.close()
    assert steps_in(tmp_path) == ["step-00000010", "step-00000012"]  # the last one is torchtitan's to have
    again = Run(tmp_path, seed=2, **options)
    assert again.manager.load()
    assert again.progress.step == 12
    again.manager.close()
    reads = Run(tmp_path, seed=3, load_only=True, **options)
    assert reads.manager.load()
    assert reads.progress.step == 12
    reads.manager.close()


def test_keep_latest_k_of_0_keeps_all_of_them(tmp_path: Path) -> None:
    for keep, there in ((0, 5), (2, 2)):
        Run(tmp_path / str(keep), keep_latest_k=keep).train(10).manager.close()
        assert len(steps_in(tmp_path / str(keep))) == there


def test_a_step_that_is_asked_for_is_loaded_or_an_error(tmp_path: Path) -> None:
    Run(tmp_path, keep_latest_k=3).train(6).manager.close()
    run = Run(tmp_path, seed=1)
    assert run.manager.load(4)
    assert run.progress.step == 4
    with pytest.raises(FileNotFoundError, match=r"load_step=3 was not found in .*\. Steps with a checkpoint: 2, 4, 6"):
        run.manager.load(3)
    run.manager.close()


def test_a_fresh_start_loads_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.manager.load()
    with pytest.raises(
        FileNotFoundError, match=r"--checkpoint.load_step=5 was not found in .*\. Steps with a checkpoint: none"
    ):
        run.manager.load(5)
    with pytest.raises(ValueError, match="initial_load_path=/nowhere is not a directory"):
        Run(tmp_path / "new", initial_load_path="/nowhere").manager.load()
    run.manager.close()


def test_a_load_in_mid_run_waits_for_the_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path).train(2)
    run.manager.maybe_wait_for_saving()
    waited, wait = threading.Event(), stagereg.Checkpointer.wait

    def waiting(checkpointer: stagereg.Checkpointer) -> None:
        waited.set()
        wait(checkpointer)

    before = watch(lambda point: waited.wait(30) if point == "writing" else None)
    try:
        saved = run.train(4).content()
        run.manager.maybe_wait_for_staging()
        for x in run.model.parameters():
            x.data.zero_()
        monkeypatch.setattr(stagereg.Checkpointer, "wait", waiting)
        assert run.manager.load(4)
    finally:
        waited.set()
        watch(before)
    assert {**run.content(), "data": saved["data"]} == saved
    run.manager.close()


def test_what_is_excluded_from_loading_stays_as_it_is(tmp_path: Path) -> None:
    saved = Run(tmp_path).train(4)
    saved.manager.close()
    run = Run(tmp_path, seed=1, exclude_from_loading=["lr_scheduler", "train_state"])
    fresh = run.content()
    assert run.manager.load()
    assert run.content() == {**saved.content(), "schedule": fresh["schedule"], "step": 0}
    run.manager.close()


def test_a_seed_checkpoint_is_a_model_to_begin_with(tmp_path: Path) -> None:
    seed = Run(tmp_path, last_save_model_only=True)
    assert seed.manager.save(0, last_step=True)
    seed.manager.close()
    run = Run(tmp_path, seed=1)
    assert run.manager.load()
    assert (run.weights(), run.progress.step) == (seed.weights(), 0)
    run.train(2).manager.close()
    again = Run(tmp_path, seed=2)
    assert again.manager.load()
    assert again.content() == run.content()
    again.manager.close()


def test_an_exported_model_begins_a_run_and_only_begins_it(tmp_path: Path) -> None:
    done = Run(tmp_path / "done", last_save_model_only=True).train(4, steps=4)
    done.manager.close()
    path = str(tmp_path / "done" / "ck" / "step-00000004")
    run = Run(tmp_path, seed=1, initial_load_path=path, initial_load_model_only=True)
    assert run.manager.load()
    assert (run.weights(), run.progress.step) == (done.weights(), 0)
    run.train(2).manager.close()
    again = Run(tmp_path, seed=2, initial_load_path=path, initial_load_model_only=True)
    assert again.manager.load()
    assert again.content() == run.content()
    again.manager.close()


@pytest.mark.parametrize("interval", [2, 3])
def test_the_last_save_is_the_model_in_the_export_dtype(tmp_path: Path, interval: int) -> None:
    run = Run(tmp_path, interval=interval, last_save_model_only=True, export_dtype="bfloat16").train(6, steps=6)
    with stagereg.open_checkpoint(tmp_path / "ck" / "latest") as found:
        assert sorted(found.entries) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    into = {name: torch.zeros_like(x, dtype=torch.bfloat16) for name, x in run.model.state_dict().items()}
    dcp.load(into, checkpoint_id=tmp_path / "ck" / "step-00000006", no_dist=True)
    assert all(torch.equal(into[name], x.bfloat16()) for name, x in run.model.state_dict().items())
    run.manager.close()
    again = Run(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"contains only the model: last_save_model_only"):
        again.manager.load()
    again.manager.close()


class Adapter:
    """Names as on the Hub."""

    fqn_to_index_mapping: dict[str, int] | None = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hub.{name}": x for name, x in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hub."): x for name, x in state.items()}

    def get_hf_storage_reader(self, path: str, quantized: bool) -> Any:
        return dcp.HuggingFaceStorageReader(path)


@pytest.mark.parametrize("files", [1, 2])
def test_the_last_save_may_be_for_hugging_face(tmp_path: Path, files: int) -> None:
    pytest.importorskip("safetensors")
    run_ranks(exported, nproc=2, args=(str(tmp_path), files), timeout_s=90)


def exported(rank: int, world_size: int, root: str, files: int) -> None:
    adapter = Adapter()
    adapter.fqn_to_index_mapping = (
        {f"hub.{i}.{x}": i + 1 for i in (0, 1) for x in ("weight", "bias")} if files > 1 else None
    )
    hf = {"last_save_in_hf": True, "last_save_model_only": True, "sd_adapter": adapter}
    run = Run(root, **hf).train(4, steps=4)
    assert len([*Path(root, "ck", "step-4-hf").glob("*.safetensors")]) == files
    assert not [each for each in os.listdir(f"{root}/ck") if each.endswith(".tmp")]
    initial = {"initial_load_path": f"{root}/ck/step-4-hf", "initial_load_in_hf": True, "initial_load_model_only": True}
    found = Run(f"{root}/new", seed=1, **initial, sd_adapter=adapter)
    assert found.manager.load()
    assert found.weights() == run.weights()
    for each in (run, found):
        each.manager.close()


def test_load_only_reads_beside_a_run_and_writes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path).train(4)
    run.manager.maybe_wait_for_saving()
    reader = Run(tmp_path, seed=1, load_only=True)  # while the run holds the folder
    assert reader.manager.load()
    assert reader.progress.step == 4
    reader.train(8, steps=8).manager.close()
    assert steps_in(tmp_path) == ["step-00000002", "step-00000004"]
    run.manager.close()


def test_saves_come_when_torchtitan_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, interval=4, keep_latest_k=0, enable_first_step_checkpoint=True).train(6, steps=6)
    run.train(8).manager.close()
    assert steps_in(tmp_path) == [f"step-{step:08d}" for step in (1, 4, 6, 8)]


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    manager = StageregCheckpointManager.Config(folder="ck").build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.load()
    assert not manager.save(1, last_step=True)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()


def test_waiting_for_staging_keeps_later_writes_out(tmp_path: Path) -> None:
    run = Run(tmp_path).train(3)
    run.progress.step = 4
    run.manager.save(4)
    run.manager.maybe_wait_for_staging()
    saved = run.weights()
    for x in run.model.parameters():
        x.data.zero_()
    run.manager.maybe_wait_for_saving()
    assert run.manager.save_future is None
    found = Run(tmp_path / "new", seed=1, initial_load_path=str(tmp_path / "ck" / "step-00000004"))
    assert found.manager.load()
    assert found.weights() == saved
    for each in (run, found):
        each.manager.close()


def test_a_failed_save_is_raised_by_the_next_one(tmp_path: Path) -> None:
    run = Run(tmp_path).train(3)
    run.manager.maybe_wait_for_saving()

    def fail(point: str) -> None:
        if point == "writing":
            raise OSError(28, "No space left on device")

    with watching(fail):
        run.train(4)
        with pytest.raises(CheckpointError, match="No space left"):
            run.manager.maybe_wait_for_saving()
    run.train(6).manager.close()
    assert steps_in(tmp_path) == ["step-00000002", "step-00000006"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_options": {"every": 3}}, "must not contain 'every': torchtitan's own options decide it"),
        ({"checkpoint_options": {"restor": {}}}, r"takes no 'restor'\. Did you mean 'restore'"),
        ({"stager": "overlaped"}, "overlapped"),
        ({"last_save_in_hf": True, "last_save_model_only": True}, "last_save_in_hf requires a state dict adapter"),
    ],
)
def test_what_is_of_no_use_is_refused_at_the_start(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, stagereg.StageregError), match=message):
        Run(tmp_path, **options)
    with pytest.raises(ConfigError, match="exclude_from_loading contains 'loader'"):
        Run(tmp_path, exclude_from_loading=["loader"], initial_load_path=str(tmp_path)).manager.load()


@pytest.mark.parametrize(
    "options",
    [
        {"interval": 0},
        {"keep_latest_k": 1},
        {"exclude_from_loading": ["model"]},
        {"initial_load_path": "relative"},
        {"initial_load_in_hf_quantized": True},
        {"last_save_in_hf": True, "last_save_model_only": False},
        {"last_save_in_hf": True, "folder": "gs://bucket"},
    ],
)
def test_options_are_checked_as_torchtitan_does(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011
        CheckpointManager.Config(**options)
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        StageregCheckpointManager.Config(**options)


def test_the_config_can_be_written_as_json() -> None:
    config = StageregCheckpointManager.Config(checkpoint_options={"restore": {"verify": "fast"}}).to_dict()
    assert json.loads(json.dumps(config))["checkpoint_options"] == {"restore": {"verify": "fast"}}
    assert {*CheckpointManager.Config().to_dict()} - {*config} == {"async_mode"}


def test_another_torchtitan_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version

    monkeypatch.setattr(CheckpointManager, "dcp_save", lambda self, states: None)
    with pytest.raises(
        InstallationError, match=f"torchtitan {version('torchtitan')} is not supported: .* dcp_save.*==0.3"
    ):
        Run(tmp_path)


def test_the_arguments_are_those_of_torchtitans_manager() -> None:
    ours, theirs = (
        inspect.signature(kind.__init__).parameters for kind in (StageregCheckpointManager, CheckpointManager)
    )
    assert [*ours] == [*theirs]
    assert issubclass(StageregCheckpointManager, BaseCheckpointManager)


def test_the_config_of_the_page_for_newcomers_is_one() -> None:
    diff = (EXAMPLE.parents[2] / "docs" / "coming-from-torchtitan.md").read_text().partition("```diff\n")[2]
    lines = diff.partition("```")[0].splitlines()
    made: list[dict[str, Any]] = [{}, {}]
    for space, mark in zip(made, "-+", strict=True):
        exec("\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark)), space)
    theirs, ours = made[0]["checkpoint"], made[1]["checkpoint"]
    assert isinstance(ours, StageregCheckpointManager.Config)
    assert (ours.interval, ours.keep_latest_k, ours.folder) == (theirs.interval, theirs.keep_latest_k, theirs.folder)
