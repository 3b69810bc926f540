"""The Hugging Face Trainer with stagereg's checkpoints: it ends as it would have without being stopped, bit for bit."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="make frameworks installs it")
EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
sys.path.append(str(EXAMPLES))

# ruff: noqa: E402
import transformers_train as example
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import stagereg
import stagereg.extensions.preemption.consensus as preemption_consensus
from stagereg.errors import CheckpointError, ConfigError, InstallationError, Preempted
from stagereg.integrations.transformers import StageregCallback, _Run
from stagereg.testing import run_ranks
from stagereg.testing.ranks import RankFailure

LIMIT_S = 120
STEPS = 12
"""Of 5 an epoch on two ranks; every second is saved."""


STOPS = {"in an epoch": 8, "after an epoch": 11, "before the first save": 1}


class Stop(Exception):
    """What ends a run in its middle."""


class At(TrainerCallback):
    """Does something at the end of one step, after the Trainer's own callbacks."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


class Count(TrainerCallback, ExportableState):
    """A callback with a state, which resumes with the Trainer."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Noise(TrainerCallback):
    """Scales a gradient by what the generators of all ranks draw, which are elsewhere each time a run begins."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for _ in range(self.ahead):
            random.random(), np.random.rand(), torch.rand(1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()])
        torch.distributed.all_reduce(drawn)
        next(given["model"].parameters()).grad.mul_(drawn.prod())


def stop() -> None:
    raise Stop


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def flat(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.cpu().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(str(key).encode() + flat(each) for key, each in value.items())
    return b"".join(map(flat, value)) if isinstance(value, (list, tuple)) else repr(value).encode()


def ended(hf: Trainer) -> dict[str, Any]:
    """What has to be the same after a run that was stopped."""
    states = {"model": hf.model, "optimizer": hf.optimizer, "scheduler": hf.lr_scheduler}
    digests = {name: hashlib.sha256(flat(each.state_dict())).hexdigest() for name, each in states.items()}
    return {"step": hf.state.global_step, "weights": example.digest(hf.model), **digests}


def run(folder: Path, *callbacks: Any, **changes: Any) -> Trainer:
    """Train to the end, resuming from what is in ``folder``."""
    hf = example.trainer(str(folder), STEPS, [StageregCallback(), *callbacks], **changes)
    hf.train(resume_from_checkpoint=True)
    return hf


def stopped_at(step: int, folder: Path, **changes: Any) -> dict[str, Any]:
    with pytest.raises(Stop):
        run(folder, At(step, stop), **changes)
    return ended(run(folder, **changes))


def with_noise(folder: Path, rank: int) -> dict[str, Any]:
    found = {"uninterrupted": ended(run(folder / "whole", Noise(rank)))}
    for when, step in list(STOPS.items())[:2]:
        with pytest.raises(Stop):
            run(folder / when, Noise(rank), At(step, stop))
        found[when] = ended(run(folder / when, Noise(10 + rank)))
    return found


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in folder.glob("checkpoints/step-*"))


def preempted(folder: Path, rank: int) -> dict[str, Any]:
    def signal_one() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + LIMIT_S
            while not any(hf.stagereg.checkpointer.preemption.signal_flags()) and time.monotonic() < deadline:
                time.sleep(0.001)

    preemption_consensus._EVERY_S = 0.0
    hf = example.trainer(str(folder), STEPS, [StageregCallback(), At(3, signal_one)], save_steps=STEPS)
    try:
        hf.train(resume_from_checkpoint=True)
    except Preempted as exit:
        return {"code": exit.code, "left": exit.step, "saved": steps_in(folder), **ended(run(folder))}
    return {}


def damaged(folder: Path, rank: int) -> dict[str, Any]:
    with pytest.raises(Stop):
        run(folder, At(7, stop))
    if rank == 0:
        file = folder / "checkpoints" / "step-00000006" / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    hf = run(folder)
    return {"restored": Path(hf.stagereg.checkpointer.restored).name, **ended(hf)}


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
BEST |= {"learning_rate": 0.1, "greater_is_better": True, "restore_callback_states_from_checkpoint": True}


def best(folder: Path, stops: int | None) -> dict[str, Any]:
    count = Count()
    if stops is not None:
        with pytest.raises(Stop):
            run(folder, count, At(stops, stop), **BEST)
    hf = run(folder, Count(), **BEST)
    torch.distributed.barrier()
    files = {
        name: example.digest(AutoModelForCausalLM.from_pretrained(path))
        for name, path in {"best": hf.state.best_model_checkpoint, "end": str(folder)}.items()
    }
    (counted,) = [each for each in hf.callback_handler.callbacks if isinstance(each, Count)]
    kept = sorted(path.name for path in folder.glob("*best-*"))
    evaluated = [each["eval_loss"] for each in hf.state.log_history if "eval_loss" in each]
    state = {"best": hf.state.best_global_step, "metric": hf.state.best_metric, "evaluated": evaluated}
    return {**ended(hf), **state, "files": files, "counted": counted.steps, "kept": kept}


def again(folder: Path) -> dict[str, Any]:
    run(folder)
    taken: list[int] = []
    hf = run(folder, At(STEPS + 1, lambda: taken.append(1)))
    return {"taken": len(taken), **ended(hf)}


def near(folder: Path, stops: int | None) -> dict[str, Any]:
    """With a tier that gets each step, and the store every fourth."""
    saves: list[int] = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves.append(state.global_step)

    def trainer(*callbacks: Any) -> Trainer:
        tier = stagereg.build("tier", "disk", dir=str(folder / "near"), every=1, copies=0)
        given = [StageregCallback(tier=tier), *callbacks, Count(), Saves()]
        return example.trainer(str(folder), STEPS, given, save_steps=4, restore_callback_states_from_checkpoint=True)

    left = None
    if stops is not None:
        with pytest.raises(Stop):
            trainer(At(stops + 1, stop)).train(resume_from_checkpoint=True)
        left = steps_in(folder)
    hf = trainer()
    hf.train(resume_from_checkpoint=True)
    restored = hf.stagereg.checkpointer.restored
    (counted,) = [each for each in hf.callback_handler.callbacks if isinstance(each, Count)]
    found = {"left": left, "from": str(restored or "").rpartition("/")[2][:13], "saves": saves}
    return {**ended(hf), "counted": counted.steps, "saved": steps_in(folder), **found}


def scenarios(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """All that two ranks of one start can do."""
    whole = run(folder / "whole")
    found = {
        "uninterrupted": {**ended(whole), "saved": steps_in(folder / "whole")},
        **{f"stopped {when}": stopped_at(step, folder / f"stopped at {step}") for when, step in STOPS.items()},
        "preempted": preempted(folder / "preempted", rank),
        "damaged": damaged(folder / "damaged", rank),
        "finished": again(folder / "finished"),
        "accumulating": ended(run(folder / "more", gradient_accumulation_steps=2, save_total_limit=None)),
        "accumulating, stopped": stopped_at(7, folder / "less", gradient_accumulation_steps=2),
        "with noise": with_noise(folder / "noise", rank),
        "best": best(folder / "best", None),
        "best, stopped": best(folder / "best-stopped", 9),
    }
    return {**found, "all saved": steps_in(folder / "more")}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = run_ranks(scenarios, 2, args=(tmp_path_factory.mktemp("ranks"),), timeout_s=LIMIT_S)
    assert first["uninterrupted"] == second["uninterrupted"]
    return first


SAME = ("step", "weights", "model", "optimizer", "scheduler")


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "how",
    [
        "stopped in an epoch",
        "stopped after an epoch",
        "stopped before the first save",
        "preempted",
        "damaged",
        "finished",
    ],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(how: str, on_two_ranks: dict[str, Any]) -> None:
    whole, found = on_two_ranks["uninterrupted"], on_two_ranks[how]
    assert {name: found[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert whole["step"] == STEPS


def with_and_without_a_stop(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    return [near(folder / "whole", None), near(folder / "stopped", 7)]


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_tier_gets_steps_of_its_own_and_is_gone_on_from(tmp_path: Path) -> None:
    whole, found = run_ranks(with_and_without_a_stop, 2, args=(tmp_path,), timeout_s=LIMIT_S)[0]
    assert {name: found[name] for name in SAME} == {name: whole[name] for name in SAME}
    assert (found["left"], found["from"]) == ([4], "step-00000007")
    assert found["counted"] == whole["counted"] == STEPS
    assert found["saves"] == whole["saves"] == [4, 8, STEPS]
    assert found["saved"] == whole["saved"] == [8, STEPS]


def test_random_numbers_of_each_rank_go_on_after_and_within_an_epoch(on_two_ranks: dict[str, Any]) -> None:
    found = on_two_ranks["with noise"]
    assert found["uninterrupted"]["weights"] != on_two_ranks["uninterrupted"]["weights"]
    assert found["in an epoch"] == found["after an epoch"] == found["uninterrupted"]


def test_accumulated_gradients_make_no_difference(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["accumulating, stopped"] == on_two_ranks["accumulating"]


def test_preemption_saves_on_all_ranks_and_exits_with_75(on_two_ranks: dict[str, Any]) -> None:
    found = on_two_ranks["preempted"]
    assert found["code"] == 75
    assert 3 <= found["left"] < STEPS
    assert found["saved"][-1] == found["left"]


def test_a_damaged_checkpoint_is_passed_over(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["damaged"]["restored"].startswith("step-00000004")


def test_a_finished_run_takes_no_more_steps(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["finished"]["taken"] == 0


def test_save_total_limit_is_how_many_stay(on_two_ranks: dict[str, Any]) -> None:
    assert on_two_ranks["uninterrupted"]["saved"] == [10, 12]
    assert on_two_ranks["all saved"] == [2, 4, 6, 8, 10, 12]


def test_the_best_model_is_loaded_and_survives_a_stop(on_two_ranks: dict[str, Any]) -> None:
    whole, found = on_two_ranks["best"], on_two_ranks["best, stopped"]
    assert whole["best"] < STEPS  # or loading it would be no test
    assert {**found, "files": None, "kept": None} == {**whole, "files": None, "kept": None}
    assert whole["evaluated"].index(max(whole["evaluated"])) == whole["best"] // 2 - 1
    assert whole["counted"] == STEPS


def test_a_best_model_stays_while_a_checkpoint_refers_to_it(tmp_path: Path) -> None:
    """With keep=1: that of the complete checkpoint, of the two that are under way, and the new one."""
    trainer: Any = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path), should_save=True, process_index=0))
    trainer.args.save_total_limit, trainer.args.save_strategy = 1, "steps"
    trainer.state, trainer.save_model = SimpleNamespace(), lambda path, _internal_call: os.makedirs(path, exist_ok=True)
    run = _Run(trainer, {})
    for step in range(1, 6):
        run._write_best(step)
    assert sorted(os.listdir(tmp_path)) == ["best-2", "best-3", "best-4", "best-5"]


def test_from_pretrained_reads_the_best_and_the_last_model(on_two_ranks: dict[str, Any]) -> None:
    for found in (on_two_ranks["best"], on_two_ranks["best, stopped"]):
        assert found["files"] == {"best": found["weights"], "end": found["weights"]}
        assert f"best-{found['best']}" in found["kept"]
        assert not [name for name in found["kept"] if name.startswith(".")]


def run_or_die(rank: int, world_size: int, folder: Path, at: int | None) -> dict[str, Any]:
    return ended(run(folder, *([] if at is None else [At(at, kill)])))


def expect_same_end_after_a_kill(folder: Path, seed: int, whole: dict[str, Any]) -> None:
    at = random.Random(seed).randint(1, STEPS)
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(run_or_die, 2, args=(folder, at), timeout_s=LIMIT_S)
    for found in run_ranks(run_or_die, 2, args=(folder, None), timeout_s=LIMIT_S):
        assert found == {name: whole[name] for name in SAME}, f"killed at step {at}"


@pytest.mark.timeout(4 * LIMIT_S)
def test_a_killed_run_goes_on_to_the_same_end(tmp_path: Path, on_two_ranks: dict[str, Any]) -> None:
    expect_same_end_after_a_kill(tmp_path, 3, on_two_ranks["uninterrupted"])


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_example_runs_below_torchrun(tmp_path: Path, on_two_ranks: dict[str, Any]) -> None:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(Path(stagereg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    for steps in (5, STEPS):
        command = [*program, str(EXAMPLES / "transformers_train.py"), f"--output-dir={tmp_path}", f"--steps={steps}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
    assert f"step {STEPS} digest " in done.stdout


# -- one process


@pytest.fixture(autouse=True)
def no_environment_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(tmp_path, At(5, stop))
    for found in run_ranks(run_or_die, 2, args=(tmp_path, None), timeout_s=LIMIT_S):
        assert found["step"] == STEPS
    assert steps_in(tmp_path) == [10, 12]


def test_a_run_that_the_trainer_saved_goes_on(tmp_path: Path) -> None:
    hf = example.trainer(str(tmp_path), STEPS, [At(7, stop)])
    with pytest.raises(Stop):
        hf.train()
    count = Count()
    found = ended(run(tmp_path, count))
    assert count.steps == STEPS - 6
    assert found == ended(run(tmp_path / "whole"))


def test_every_saves_in_place_of_the_trainers_steps(tmp_path: Path) -> None:
    hf = example.trainer(
        str(tmp_path), 8, [StageregCallback(every=3, keep=9)], save_strategy="no", save_total_limit=None
    )
    hf.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [3, 6, 8]


def test_an_epoch_at_a_time_is_saved(tmp_path: Path) -> None:
    run(tmp_path, save_strategy="epoch")
    assert steps_in(tmp_path) == [10, 12]


def test_a_path_chooses_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, save_total_limit=None)
    count = Count()
    hf = example.trainer(str(tmp_path / "other"), STEPS, [StageregCallback(), count])
    hf.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-00000004"))
    assert [each["step"] for each in hf.state.log_history if "loss" in each] == list(range(1, STEPS + 1))
    assert count.steps == STEPS - 4


def test_what_a_subclass_does_when_it_saves_is_done(tmp_path: Path) -> None:
    class Writer(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Path(self.args.output_dir, "card.md").touch()
            super()._save_checkpoint(model, trial)

    plain = example.trainer(str(tmp_path), 4, [])
    hf = Writer(plain.model, plain.args, train_dataset=plain.train_dataset, callbacks=[StageregCallback()])
    hf.train()
    assert type(hf).__name__ == "Writer"
    assert (tmp_path / "card.md").exists()
    assert steps_in(tmp_path) == [2, 4]
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_trainer_that_is_there_can_be_attached_to(tmp_path: Path) -> None:
    hf = example.trainer(str(tmp_path), 4, [])
    StageregCallback().attach(hf)
    hf.train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [2, 4]
    with pytest.raises(ConfigError, match="already"):
        StageregCallback().attach(hf)


def test_a_callback_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    hf = example.trainer(str(tmp_path), 4, [])
    hf.add_callback(StageregCallback())
    with pytest.raises(ConfigError, match=r"attach\(trainer\)"):
        hf.train()


def test_a_failure_in_the_background_reaches_the_loop(tmp_path: Path) -> None:
    def spoil() -> None:
        hf.stagereg.checkpointer.wait()
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").touch()

    hf = example.trainer(str(tmp_path), STEPS, [StageregCallback(), At(3, spoil)])
    with pytest.raises(CheckpointError, match="Step 4"):
        hf.train()
    assert hf.state.global_step < STEPS


REFUSED = {
    "save_only_model": ({"save_only_model": True}, {}),
    "enable_jit_checkpoint": ({"enable_jit_checkpoint": True}, {}),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}),
    "both decide when to save": ({}, {"every": 5}),
    "both limit the checkpoints": ({"save_total_limit": 3}, {"keep": 3}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_kept_is_refused_at_construction(said: str, tmp_path: Path) -> None:
    changes, options = REFUSED[said]
    with pytest.raises(ConfigError, match=said):
        example.trainer(str(tmp_path), 4, [StageregCallback(**options)], **changes)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("option", "said"), [("evry", "Did you mean 'every'"), ("resume", "resume_from_checkpoint")])
def test_an_option_that_is_none_is_refused(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StageregCallback(**{option: 5})


def test_a_search_of_parameters_is_refused(tmp_path: Path) -> None:
    hf = example.trainer(str(tmp_path), 4, [StageregCallback()])
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        hf.train(trial={"learning_rate": 1})


def test_a_changed_trainer_is_an_error_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagereg.integrations.agreed.version", lambda package: "9.0.1")
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda self, path: None)
    with pytest.raises(InstallationError, match=r"9\.0\.1.* _load_from_checkpoint.*5\.23"):
        StageregCallback()
    monkeypatch.delattr(Trainer, "_load_from_checkpoint")
    with pytest.raises(InstallationError, match="has no "):
        StageregCallback()


def test_a_trainer_that_does_not_ask_for_the_state_is_heard(tmp_path: Path) -> None:
    class Deaf(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
            pass

    run(tmp_path)
    plain = example.trainer(str(tmp_path), 14, [])
    hf = Deaf(plain.model, plain.args, train_dataset=plain.train_dataset, callbacks=[StageregCallback()])
    with pytest.raises(InstallationError, match="did not load the optimizer"):
        hf.train(resume_from_checkpoint=True)
