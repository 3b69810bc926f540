"""What the checkpointer promises in a single process: when it saves, what it keeps, what it restores, how it ends."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import random
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from stagereg.assembly import Checkpointer, Preemption, Replicas
from stagereg.base.option_text import constructed
from stagereg.checkpoint.options import Failure, Restore
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError, ConfigError, UnknownNameError
from stagereg.stagers.async_stager import AsyncStager


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_maybe_save_saves_at_positive_multiples_of_every(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every=3, keep=9, save_last=False) as checkpointer:
        saved = [step for step in range(8) if checkpointer.maybe_save(step, {"x": step})]
    assert saved == [3, 6]
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000006"]


def test_a_clean_end_saves_the_last_step_and_an_error_does_not(tmp_path: Path) -> None:
    for first, last in ((1, 7), (8, 9), (10, 10)):  # the last of these saves it by itself
        with Checkpointer(str(tmp_path), every=5, keep=9) as checkpointer:
            checkpointer.restore({"x": 0})
            for step in range(first, last + 1):
                checkpointer.maybe_save(step, {"x": step})
    checkpointer = Checkpointer(str(tmp_path), every=5, keep=9)
    checkpointer.maybe_save(11, {"x": 11})
    checkpointer.__exit__(KeyError, KeyError(), None)
    assert names(tmp_path) == ["latest", *(f"step-{step:08}" for step in (5, 7, 9, 10))]


def test_a_commit_is_reported_and_an_error_of_that_is_logged(tmp_path: Path, caplog: Any) -> None:
    heard: list[int] = []

    def fails(step: int) -> None:
        raise ValueError("of the listener")

    with Checkpointer(str(tmp_path), every=1) as checkpointer:
        checkpointer.listen(fails)
        checkpointer.listen(lambda step: heard.append(step if (tmp_path / f"step-{step:08}").is_dir() else -1))
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
        checkpointer.wait()
        assert heard == [1, 2]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_what_is_switched_off_saves_and_restores_nothing(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "c"), every=1, enable=False) as checkpointer:
        assert checkpointer.restore({"x": 0}) is None
        assert not any(checkpointer.maybe_save(step, {"x": step}) for step in range(1, 4))
        checkpointer.save(4, {"x": 4})
        checkpointer.wait()
        assert (checkpointer.saved, checkpointer.latest, checkpointer.stats.saves) == (None, None, 0)
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.maybe_save(5, {})
    assert list(tmp_path.iterdir()) == []


def test_the_newest_keep_stay_and_latest_is_a_relative_link(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), every=1, keep=2) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, {"x": step})
        checkpointer.wait()
        assert checkpointer.latest == tmp_path / "step-00000005"
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    assert os.readlink(tmp_path / "latest") == "step-00000005"


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(5, {"x": "old", "y": 1})
        checkpointer.save(5, {"x": "new"})
        checkpointer.wait()
        state = {"x": ""}
        assert checkpointer.restore(state) == 5
        with pytest.raises(CheckpointError, match="The checkpoint has no 'y'"):
            checkpointer.restore({"y": 0})
    assert state == {"x": "new"}
    assert [name.partition(".")[0] for name in names(tmp_path)] == ["latest", "step-00000005"]


def test_newest_means_committed_last(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), keep=2) as checkpointer:
        for step in (100, 200, 300, 150):
            checkpointer.save(step, {"x": step})
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore({"x": 0}) == 150
    assert names(tmp_path) == ["latest", "step-00000150", "step-00000300"]


def test_resume_chooses_what_restore_loads(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore({"x": 0}) is None
        checkpointer.save(1, {"x": 1})
        checkpointer.save(2, {"x": 2})
    first = tmp_path / "step-00000001"
    for resume, step in (("auto", 2), ("latest", 2), (str(first), 1), (str(tmp_path / "latest"), 2), ("never", None)):
        state = {"x": 0}
        with Checkpointer(str(tmp_path), resume=resume) as checkpointer:
            assert checkpointer.restore(state) == step
        assert state == {"x": step or 0}


@pytest.mark.parametrize("resume", ["latest", "/nowhere/step-00000001"])
def test_a_missing_named_checkpoint_is_an_error(tmp_path: Path, resume: str) -> None:
    with Checkpointer(str(tmp_path), resume=resume) as checkpointer, pytest.raises(CheckpointError, match="complete"):
        checkpointer.restore({"x": 0})


def test_a_bare_name_is_a_checkpoint_of_the_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, work, state = tmp_path / "runs", tmp_path / "work", {"x": 0}
    for folder, value in ((runs, 1), (work, 2)):
        with Checkpointer(str(folder), keep=9) as checkpointer:
            checkpointer.save(4, {"x": value})
            checkpointer.save(4 + value, {"x": value})
    monkeypatch.chdir(work)

    def restored(resume: str) -> int | None:
        with Checkpointer(str(runs), resume=resume, keep=9) as checkpointer:
            return checkpointer.restore(state)

    assert (restored("step-00000005"), state["x"]) == (5, 1)
    assert (restored("step-00000006"), state["x"]) == (6, 2)
    where = f"is in {runs} and in the working directory. Choose one: {runs}/step-00000004 or {work}/step-00000004."
    with pytest.raises(CheckpointError, match=f"step-00000004 {where}"):
        restored("step-00000004")
    assert (restored("./step-00000004"), state["x"]) == (4, 2)
    assert (restored(f"{runs}/step-00000004"), state["x"]) == (4, 1)
    why = f"complete checkpoint: it does not exist. `stagereg verify {runs}` lists the valid checkpoints"
    with pytest.raises(CheckpointError, match=why):
        restored("step-00000009")


def test_random_number_generators_continue(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {})
        drawn = random.random(), torch.rand(3).tolist(), numpy.random.rand()
        checkpointer.restore({})
        assert (random.random(), torch.rand(3).tolist(), numpy.random.rand()) == drawn


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (Failure, {"mtbf": 6}, "mtbf must be a duration above 0"),
        (Failure, {"timeout": datetime.timedelta(0)}, "timeout must be a duration above 0"),
        (Failure, {"on_error": None}, "on_error must be one of raise, warn"),
        (Preemption, {"grace_period": 25}, "grace_period must be a duration above 0"),
        (Restore, {"verify": "fsat"}, r"verify must be one of full, fast, not 'fsat'\. Did you mean 'fast'\?"),
        (Restore, {"read": "twice"}, "read must be one of auto, each, once"),
        (Restore, {"max_crashes": True}, "max_crashes must be a whole number of at least 1"),
        (Restore, {"cast": 1}, "cast must be true or false"),
        (Replicas, {"share": "first"}, "share must be true or false"),
        (Replicas, {"verify_every": -1}, "verify_every must be a whole number of at least 0"),
    ],
)
def test_a_group_of_options_checks_itself(group: type, values: dict[str, Any], message: str) -> None:
    constructed("checkpoint")
    option, _, text = message.partition(" ")
    with pytest.raises(ConfigError, match=rf"^{group.__name__}\({option}=\.\.\.\) {text}"):
        group(**values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dir": ""}, "dir must be the path"),
        ({"dir": 3}, "dir must be the path"),
        ({"every": 0}, "every must be a whole number of at least 1, not 0"),
        ({"every": True}, "every must be a whole number"),
        ({"every": "atuo"}, r"every must be one of auto, .*'atuo'\. Did you mean 'auto'\?"),
        (
            {"failure": {"mtbf": "6h"}},
            r"failure must be stagereg\.Failure\(on_error=\.\.\., timeout=\.\.\., mtbf=\.\.\.\), not",
        ),
        (
            {"replicas": "first"},
            r"replicas must be stagereg\.Replicas\(share=\.\.\., verify_every=\.\.\.\), not 'first'",
        ),
        ({"preemption": Preemption}, r"preemption must be stagereg\.Preemption\(grace_period=\.\.\.\), not"),
        ({"keep": 1.5}, "keep must be a whole number"),
        ({"resume": ""}, "resume must be one of auto, latest, never, the path of a checkpoint, not ''"),
        ({"resume": "newest"}, "resume must be one of auto, latest, never, the path of a checkpoint, not 'newest'"),
        ({"every": "a number of steps"}, "every must be a whole number"),
        ({"every": "ten"}, "every must be one of auto, a number of steps, not 'ten'"),
        ({"stager": 3}, "stager must be a stager or the name of one, such as 'overlapped', not 3: builtins.int can"),
        ({"storage": DcpStorage}, r"storage must be a storage or .*: it is a class\. Pass an instance"),
        ({"evry": 2}, "^Checkpointer takes no 'evry'. Did you mean 'every'[?] It takes: dir, every, keep, "),
    ],
)
def test_useless_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.sub(r"^(\w+) (?=must|is)", r"\1.* ", message)):
        Checkpointer(**{"dir": str(tmp_path / "run"), **arguments})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("step", "name", "message"),
    [
        (1, "stagereg.step", r"stagereg\.step"),
        ("7", "x", "must be an integer in 0"),
        (True, "x", "must be an integer in 0"),
        (2**63, "x", r"must be an integer in 0\.\.2\*\*63-1"),
    ],
)
def test_a_step_or_a_name_that_cannot_be_is_refused(tmp_path: Path, step: Any, name: str, message: str) -> None:
    with Checkpointer(str(tmp_path), every=1) as checkpointer:
        for save in (checkpointer.save, checkpointer.maybe_save):
            with pytest.raises(CheckpointError, match=message):
                save(step, {name: 1})
        checkpointer.save(2**63 - 1, {"x": 1})
        checkpointer.wait()
        assert checkpointer.restore({"x": 0}) == 2**63 - 1


def test_a_stager_and_a_storage_may_be_given_by_name(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), stager="blocking", storage="torch_dcp") as checkpointer:
        checkpointer.save(1, {"x": torch.ones(2)})
    assert json.loads(next(tmp_path.glob("step-*/manifest.json")).read_text())["storage"] == "torch_dcp"
    with pytest.raises(UnknownNameError, match="No stager named 'half'"):
        Checkpointer(str(tmp_path), stager="half")


def test_a_directory_without_permission_is_refused_at_the_first_step() -> None:
    for ask in (lambda each: each.maybe_save(1, {"x": 1}), lambda each: each.save(1, {"x": 1}), Checkpointer.lock):
        with pytest.raises(CheckpointError, match=r'Cannot write to dir="/proc/checkpoints": ') as refused:
            ask(Checkpointer("/proc/checkpoints"))
        assert str(refused.value).count("Cannot write to") == 1


def test_a_file_in_the_place_of_the_directory_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for bad in (file, file / "below"):
        with pytest.raises(ConfigError) as refused:
            Checkpointer(str(bad))
        said = f'dir="{bad}" must be the path or URL of a directory, but {file} is a file.'
        assert str(refused.value) == said
        assert refused.value.__cause__ is refused.value.__context__ is None


def test_leftovers_of_a_killed_run_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.0123456789ab.tmp").mkdir()
    (tmp_path / ".step-00000007.0123456789ab.tmp" / "__0_0.distcp").touch()
    for name in (".kept.json.0123456789ab.tmp", "..restored.json.0123456789ab.tmp"):
        (tmp_path / name).touch()
    kept = [".kept.json.tmp", ".mine.0123456789ab.tmp", ".mine.json.tmp", "step-notes"]
    for name in kept:
        (tmp_path / name).touch()
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.lock()
    assert names(tmp_path) == kept


def test_use_after_close_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.close()
    checkpointer.close()
    for use in (
        lambda: checkpointer.save(1, {}),
        lambda: checkpointer.maybe_save(1, {}),
        lambda: checkpointer.restore({}),
        checkpointer.wait,
        checkpointer.__enter__,
    ):
        with pytest.raises(CheckpointError, match="closed"):
            use()


def test_a_checkpoint_is_found_by_any_path_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with Checkpointer(str(tmp_path / "run")) as checkpointer:
        checkpointer.save(1, {"x": 1})
    monkeypatch.setattr(CheckpointStore, "publish", lambda *_: 1 // 0)
    own, other = "newest valid checkpoint is step 1", f"no complete checkpoint in {tmp_path}/new yet"
    for named, used, newest in (("link", "run", own), ("run", "link", own), ("run", "new", other)):
        path = str(tmp_path / named / "step-00000001")
        with Checkpointer(str(tmp_path / used), resume=path) as checkpointer:
            checkpointer.restore({"x": 0})
            checkpointer.save(2, {"x": 2})
            with pytest.raises(CheckpointError, match=newest):
                checkpointer.wait()


def test_a_run_that_forgot_restore_deletes_no_later_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(first: int, last: int, restores: bool, **options: Any) -> list[str]:
        caplog.clear()
        with Checkpointer(str(tmp_path), every=5, keep=2, **options) as checkpointer:
            if restores:
                checkpointer.restore({"x": 0})
            for step in range(first, last + 1):
                checkpointer.maybe_save(step, {"x": step})
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    assert run(1, 30, restores=True) == []
    assert run(1, 15, restores=False) == [
        f"stagereg: restore() was not called, and {tmp_path} has checkpoints of an earlier run, among them "
        "step-00000025, step-00000030: this run deletes each of them after reaching its step. To resume from them, "
        'call restore(state) before the loop. To retain them, give this run another directory, dir="PATH". To start '
        'from scratch on purpose, add resume="never".'
    ]
    assert names(tmp_path) == ["kept.json", "latest", *(f"step-{step:08}" for step in (10, 15, 25, 30))]
    assert len(run(1, 40, restores=False)) == 1
    assert names(tmp_path) == ["latest", "step-00000035", "step-00000040"]
    assert run(1, 15, restores=False, resume="never") == []
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000015"]


@pytest.mark.parametrize("call", ["save", "maybe_save", "restore"])
def test_what_is_no_state_is_refused_with_what_one_is(tmp_path: Path, call: str) -> None:
    model = torch.nn.Linear(2, 2)
    with Checkpointer(str(tmp_path)) as checkpointer:
        arguments: tuple[Any, ...] = ([model],) if call == "restore" else ({"model": model}, 1)
        with pytest.raises(CheckpointError, match=r"A state is a dict .*, as in save\(step, .*, not a (list|int)\."):
            getattr(checkpointer, call)(*arguments)


def test_what_cannot_be_saved_is_named_by_restore(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path)) as checkpointer:
        for value, text in ((lambda: 0, "'x.f' cannot be saved: it is a function"), (datetime.datetime.now(), "'x.f'")):
            with pytest.raises(CheckpointError, match=f"^No save could succeed: {text}") as error:
                checkpointer.restore({"x": {"f": value}})
            assert " at 0x" not in str(error.value)  # which would make another message of it on each rank
        assert checkpointer.restore({"x": {"f": 1}}) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"verify": "fast"}, "It is restore.verify: restore=Restore(verify='fast')."),
        ({"grace_period": None}, "It is preemption.grace_period: preemption=Preemption(grace_period=None)."),
        ({"verify_every": 5}, "It is replicas.verify_every: replicas=Replicas(verify_every=5)."),
    ],
)
def test_an_option_in_its_old_place_is_refused_with_its_new_one(tmp_path: Path, old: dict[str, Any], new: str) -> None:
    with pytest.raises(ConfigError) as error:
        Checkpointer(str(tmp_path), **old)
    assert new in str(error.value)


def test_what_a_program_no_longer_wants_saved_is_not_kept_in_memory(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        model = torch.nn.Linear(2, 2)
        checkpointer.save(1, {"model": model})
        checkpointer.wait()
        checkpointer.remember({})
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


class Recording(AsyncStager):
    """Copies nothing; reports what was called."""

    def __init__(self, wait: bool) -> None:
        self.calls: list[str] = []
        self._synchronize_after_execute = wait

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.calls.append("stage")
        return state_dict

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


def test_the_stager_is_synchronised_if_it_asks_and_closed_once(tmp_path: Path) -> None:
    for wait, calls in ((True, ["stage", "synchronize", "close"]), (False, ["stage", "close"])):
        stager = Recording(wait=wait)
        with Checkpointer(str(tmp_path), stager=stager) as checkpointer:
            checkpointer.save(1, {"x": 1})
        checkpointer.close()
        assert stager.calls == calls


@pytest.mark.parametrize(
    ("resume", "restores", "how"),
    [
        ("auto", True, "The same command resumes from there, if it has more steps to take."),
        ("latest", False, "To resume from this checkpoint, call restore(state) before the loop."),
        ("never", True, 'To resume from this checkpoint, start the run with resume="auto".'),
    ],
)
def test_the_end_says_what_makes_the_next_run_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: str, restores: bool, how: str
) -> None:
    with caplog.at_level(logging.INFO), Checkpointer(str(tmp_path), every=1, resume=resume) as checkpointer:
        if restores:
            checkpointer.restore({"x": 0})
        checkpointer.maybe_save(1, {"x": 1})
    newest = f"stagereg: The newest valid checkpoint is step 1, in {tmp_path}."
    assert caplog.records[-1].getMessage() == f"{newest} {how}"
