"""What is called after a checkpoint is complete holds nothing up, and whatever it does, nothing but it fails."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.assembly import Checkpointer, Preemption
from stagereg.errors import ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.testing.ranks import run_ranks

from ...support.forks import run_forked

LIMIT_S = 60.0
ROOT = Path(__file__).parents[3]


class Held:
    """A component that stays in its call until it is let go; which steps it was called for."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.called, self.go_on = threading.Event(), threading.Event()

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        self.steps.append(checkpoint.step)
        self.called.set()
        assert self.go_on.wait(LIMIT_S)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go_on.set()


def steps(root: Path) -> list[int]:
    return sorted(int(each.name[5:13]) for each in root.glob("step-*"))


def test_it_is_called_with_the_complete_checkpoint(tmp_path: Path) -> None:
    seen: list[CommittedCheckpoint] = []

    def look(checkpoint: CommittedCheckpoint) -> None:
        assert (Path(checkpoint.path) / "manifest.json").read_text() == checkpoint.manifest.dumps()
        assert threading.current_thread() is not threading.main_thread()
        seen.append(checkpoint)

    with Checkpointer(str(tmp_path), on_commit=[look], keep=9) as checkpointer:
        for step in (1, 2, 3):
            stagereg.log(step, loss=0.5)
            checkpointer.save(step, {"x": step})
    assert [(each.step, each.path, each.manifest.step) for each in seen] == [
        (step, tmp_path / f"step-{step:08}", step) for step in (1, 2, 3)
    ]
    assert [each.metrics for each in seen] == [{"loss": 0.5}] * 3
    assert (checkpointer.stats.on_commit_calls, checkpointer.stats.on_commit_failures) == (3, 0)


def test_the_block_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "callbacks.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["10", "20"]


def test_it_holds_up_neither_saves_nor_other_components(tmp_path: Path, held: Held) -> None:
    quick: list[int] = []
    checkpointer = Checkpointer(str(tmp_path), keep=9, on_commit=[held, lambda c: quick.append(c.step)])
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": step})
        checkpointer.wait()
    assert held.called.wait(LIMIT_S)
    assert (steps(tmp_path), held.steps) == ([1, 2, 3], [1])
    held.go_on.set()
    checkpointer.close()
    assert (held.steps, quick) == ([1, 2, 3], [1, 2, 3])


def test_its_checkpoint_is_not_deleted_under_it(tmp_path: Path, held: Held, caplog: Any) -> None:
    with Checkpointer(str(tmp_path), keep=1, on_commit={"slow": held}) as checkpointer:
        checkpointer.save(1, {"x": 1})
        assert held.called.wait(LIMIT_S)
        for step in (2, 3, 4):
            checkpointer.save(step, {"x": step})
            checkpointer.wait()
        assert steps(tmp_path) == [1, 4]
        held.go_on.set()
    assert held.steps == [1, 4]
    assert caplog.text.count("already deleted: the component is slower") == checkpointer.stats.on_commit_failures == 2
    with Checkpointer(str(tmp_path), keep=1) as checkpointer:
        checkpointer.restore({"x": 0})
        checkpointer.save(5, {"x": 5})
    assert steps(tmp_path) == [5]


def raises(checkpoint: CommittedCheckpoint) -> None:
    raise ValueError("of the component")


def exits(checkpoint: CommittedCheckpoint) -> None:
    sys.exit(3)


def interrupts(checkpoint: CommittedCheckpoint) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("component", "what"), [(raises, "ValueError: of the component"), (exits, "SystemExit: 3"), (interrupts, "Keyb")]
)
def test_what_it_raises_is_logged_and_counted(
    tmp_path: Path, caplog: Any, component: Callable[..., Any], what: str
) -> None:
    with Checkpointer(str(tmp_path), on_commit=[component]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
    assert [what in record.getMessage() for record in caplog.records] == [True, True]
    assert (checkpointer.stats.on_commit_failures, checkpointer.stats.saves) == (2, 2)


def test_one_that_hangs_is_given_up_and_left_out(tmp_path: Path, held: Held, caplog: Any) -> None:
    with Checkpointer(str(tmp_path), on_commit={"hung": held}) as checkpointer:
        checkpointer._calls._callers[0].limit_s = 0.5
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
    assert "on_commit hung has not returned for 0.5 s (Failure(timeout=...)), and is not called again" in caplog.text
    assert "on_commit hung was not called: its call for step 1 has not returned (step 2)" in caplog.text
    assert (held.steps, checkpointer.stats.on_commit_failures) == ([1], 2)


def test_one_that_hung_is_called_again_once_it_returns(tmp_path: Path, held: Held) -> None:
    with Checkpointer(str(tmp_path), on_commit=[held]) as checkpointer:
        checkpointer._calls._callers[0].limit_s = 0.5
        checkpointer.save(1, {"x": 1})
        checkpointer._calls.finish()
        held.go_on.set()
        checkpointer._calls._callers[0]._call.join(LIMIT_S)
        checkpointer.save(2, {"x": 2})
    assert held.steps == [1, 2]


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_one_that_loses_the_checkpoint_is_named(tmp_path: Path, caplog: Any, how: str) -> None:
    def lose(checkpoint: CommittedCheckpoint) -> None:
        if checkpoint.step == 2:
            shutil.rmtree(checkpoint.path) if how == "deleted" else (Path(checkpoint.path) / "index.json").write_text(
                ""
            )

    with Checkpointer(str(tmp_path), on_commit={"mine": lose}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
    assert f"on_commit mine deleted or changed {tmp_path}/step-00000002" in caplog.text
    assert f"The newest valid checkpoint is step 1, in {tmp_path}." in caplog.text
    state = {"x": 0}
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore(state) == state["x"] == 1


def test_close_waits_for_calls_and_no_longer_than_that(tmp_path: Path, held: Held, caplog: Any) -> None:
    done: list[int] = []

    def slow(checkpoint: CommittedCheckpoint) -> None:
        threading.Event().wait(0.3)
        done.append(checkpoint.step)

    with Checkpointer(str(tmp_path / "a"), keep=9, on_commit=[slow]) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
    assert done == [1, 2]
    checkpointer = Checkpointer(str(tmp_path / "b"), on_commit=[held])
    checkpointer.save(1, {"x": 1})
    assert held.called.wait(LIMIT_S)
    checkpointer._calls.limit_s = 2.0
    checkpointer.close()
    assert "was aborted, since" in caplog.text


@pytest.mark.parametrize("given", [3, "wandb", Held, ["command"], {"x": object()}, [print, 1]])
def test_what_is_no_component_is_refused_at_once(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"on_commit=\.\.\.\): .* must be an on_commit component"):
        Checkpointer(str(tmp_path / "c"), on_commit=given)
    assert not (tmp_path / "c").exists()


def test_switched_off_it_is_never_called(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), enable=False, on_commit=[raises]) as checkpointer:
        checkpointer.save(1, {"x": 1})
    assert checkpointer.stats.on_commit_calls == 0


def two_ranks(rank: int, world_size: int, root: str) -> int:
    called: list[int] = []
    with Checkpointer(root, preemption=Preemption(None), on_commit=lambda c: called.append(c.step)) as checkpointer:
        checkpointer.save(1, {"x": 1})
    return len(called)


def test_it_is_called_on_rank_0_alone(tmp_path: Path) -> None:
    assert run_ranks(two_ranks, args=(str(tmp_path),)) == [1, 0]


PROGRAM = """
import datetime, os, signal, sys, threading, time
import stagereg

def hangs(checkpoint):
    print("called", checkpoint.step, flush=True)
    threading.Event().wait(100)

def waits(checkpoint):
    if checkpoint.step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(100)

how, root = sys.argv[1:]
calls = {"late": waits, "exits": lambda c: sys.exit(3), "leaves": lambda c: os._exit(4)}
limit = datetime.timedelta(seconds=30 if how in ("preempted", "late") else 5)
failure = stagereg.Failure(timeout=limit)
with stagereg.Checkpointer(root, every=1, failure=failure, on_commit=[calls.get(how, hangs)]) as checkpointer:
    for step in range(1, 4):
        if how == "preempted" and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.maybe_save(step, {"x": step})
        checkpointer.wait()
        while how in ("exits", "late") and step < 3 and checkpointer._calls._callers[0].busy:
            time.sleep(0.01)  # a call that has not ended keeps its checkpoint from being deleted
"""


@pytest.mark.parametrize(
    ("how", "code", "saved"),
    [
        ("hangs", 0, [1, 2, 3]),
        ("exits", 0, [2, 3]),
        ("preempted", 75, [1, 2, 3]),
        pytest.param("late", 0, [2, 3], marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_that_of_the_run(tmp_path: Path, how: str, code: int, saved: list[int]) -> None:
    ran = run_forked(PROGRAM, how, tmp_path, timeout_s=60)
    assert (ran.returncode, steps(tmp_path)) == (code, saved), ran.stderr
    if how == "preempted":
        assert "on_commit 0 (hangs) was aborted, since the run is preempted" in ran.stderr
        assert "on_commit is not called for step 3: the run is preempted" in ran.stderr
    if how == "late":
        assert "was aborted, since the run ends" in ran.stderr
    assert "the grace period" not in ran.stderr


def test_a_process_that_a_call_ends_has_its_checkpoint(tmp_path: Path) -> None:
    assert run_forked(PROGRAM, "leaves", tmp_path, timeout_s=60).returncode == 4
    state = {"x": 0}
    with Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.restore(state) == state["x"] >= 1


def test_a_config_makes_a_mapping_a_list_or_one(tmp_path: Path) -> None:
    made = {"_target_": f"{Noted.__module__}.Noted", "note": "a"}
    stagereg.register("on_commit", "noted_for_tests")(Noted)
    for given, names in ((made, ["0 (Noted)"]), ([made, made], ["0 (Noted)", "1 (Noted)"]), ({"t": made}, ["t"])):
        config = {"_target_": "stagereg.assembly.Checkpointer", "dir": str(tmp_path), "on_commit": given}
        with stagereg.instantiate(config) as checkpointer:
            assert [caller._name for caller in checkpointer._calls._callers] == names
    wrong = {"_target_": "stagereg.stagers.blocking.BlockingStager"}
    for given in (wrong, [wrong], {"t": wrong}):
        with pytest.raises(ConfigError, match="takes an on_commit, not stager/blocking"):
            stagereg.instantiate({**config, "on_commit": given})


class Noted:
    """A component of a config.

    Args:
        note: anything.
    """

    def __init__(self, note: str) -> None:
        self.note = note

    def committed(self, checkpoint: CommittedCheckpoint) -> None:
        logging.getLogger(__name__).info(self.note)
