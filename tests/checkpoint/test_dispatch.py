"""Every method of an extension is called when it should be, and an extension that fails harms nothing else."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from stagereg.base.followers import followers
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.extension import Candidate, CheckpointExtension, Due, RestoreRequest, Saves, Setup
from stagereg.checkpoint.format.manifest import Checkpoint
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import RESUME_CODE, CheckpointError, ConfigError
from stagereg.testing import run_ranks

Call = tuple[Any, ...]

REACHES = ("targets", "start", "due", "exit", "sources", "candidates", "restoring", "restored", "refused")
LOGGED = (
    *("given", "end_step", "begin_save", "capturing", "inspect", "locked", "urges", "leaving", "manifest_fields"),
    *("committed", "ending", "ended", "completed", "outlook", "close"),
)
OF_RANKS = ("follow", "idle")


class Probe(CheckpointExtension):
    """Notes each call, and whether it is on the training thread; fails in one method; asks for what is due."""

    def __init__(
        self, name: str, log: list[Call], fails: Sequence[str] = (), due: Mapping[int, Due] | None = None
    ) -> None:
        self.name, self.log, self.fails, self.answers = name, log, fails, due or {}
        self.setup: Setup | None = None
        self.idled = threading.Event()

    def note(self, method: str, *arguments: Any) -> None:
        thread = "training" if threading.current_thread() is threading.main_thread() else "save"
        self.log.append((self.name, thread, method, *arguments))
        if method in self.fails:
            raise ValueError(f"planted in {method}")

    def targets(self, setup: Setup) -> Sequence[SaveTarget]:
        self.note("targets", setup.every, setup.resume, setup.stores)
        return ()

    def start(self, setup: Setup, saves: Saves) -> None:
        self.setup = setup
        self.note("start", len(saves.targets), saves.newest)

    def locked(self) -> None:
        self.note("locked")

    def due(self, step: int) -> Due:
        self.note("due", step)
        return self.answers.get(step, Due.NO)

    def urges(self) -> bool:
        self.note("urges")
        return self.name == "b"

    def leaving(self) -> None:
        self.note("leaving")

    def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
        self.note("exit", step, failure, resume)

    def follow(self, over: bool) -> None:
        self.note("follow", over)

    def idle(self) -> None:
        self.idled.set()
        self.note("idle")

    def manifest_fields(self, step: int) -> Mapping[str, Any]:
        self.note("manifest_fields", step)
        return {"lost": {"0": []}} if self.name == "b" else {"metrics": {self.name: float(step)}}

    def committed(self, step: int, where: str, checkpoint: Checkpoint | None) -> None:
        self.note("committed", step, where, checkpoint and checkpoint.manifest.step)

    def ending(self, error: BaseException | None) -> None:
        self.note("ending", error)

    def ended(self) -> None:
        self.note("ended")

    def completed(self) -> None:
        self.note("completed")

    def outlook(self) -> str:
        self.note("outlook")
        return f"The extension {self.name} looks ahead."

    def close(self, in_time: bool) -> None:
        self.note("close", in_time)

    def sources(self, request: RestoreRequest) -> Sequence[Any]:
        self.note("sources", request.resume)
        return ()

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        self.note("candidates", [each.step for each in listed])
        return listed

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        self.note("restoring", candidate.step)

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        self.note("restored", candidate and candidate.step)

    def refused(self, error: CheckpointError) -> None:
        self.note("refused", type(error).__name__)

    def given(self, state: Mapping[str, Any]) -> None:
        self.note("given", state["x"])

    def end_step(self, step: int, state: MutableMapping[str, Any] | None) -> None:
        self.note("end_step", step, state and state["x"])

    def begin_save(self, step: int, state: Mapping[str, Any] | None, targets: Sequence[SaveTarget]) -> None:
        self.note("begin_save", step, state and state["x"], len(targets))

    def capturing(
        self, state: Mapping[str, Any], captured: Mapping[str, Any]
    ) -> Callable[[dict[str, Any]], object] | None:
        self.note("capturing", state["x"], captured["x"])
        return lambda copy: self.note("inspect", copy["x"])


def methods() -> set[str]:
    """Return the names of all methods that the core may call."""
    return {name for each in CheckpointExtension.__mro__ for name in vars(each) if callable(getattr(each, name))}


def train(
    root: Path, extensions: Sequence[CheckpointExtension], until: int = 5, between: Callable[[Any], object] = id
) -> None:
    """Restore, take the steps after, of which the multiples of 4 are saved, and end; each save ends before a step."""
    with Checkpointer(str(root), every=4, keep=9, extensions=extensions) as checkpointer:
        between(checkpointer)
        state = {"x": 0}
        first = (checkpointer.restore(state) or 0) + 1
        for step in range(first, until + 1):
            state["x"] = step
            checkpointer.maybe_save(step, state)
            checkpointer.wait()


def probes(log: list[Call], **more: Any) -> list[Probe]:
    return [Probe("a", log, **more), Probe("b", log, **more)]


def of_both(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of both probes, each in their order."""
    return [(name, *call) for call in calls for name in "ab"]


def saving(step: int) -> list[Call]:
    """Return the calls of a save in the directory."""
    return [
        ("training", "given", step),
        ("training", "begin_save", step, step, 1),
        ("training", "capturing", step, step),
        ("save", "inspect", step),
        ("save", "manifest_fields", step),
        ("save", "committed", step, "store", step),
    ]


BEGIN: list[Call] = [
    ("training", "targets", 4, "auto", True),
    ("training", "start", 1, None),
]
RESTORE: list[Call] = [
    ("training", "given", 0),
    ("training", "sources", "auto"),
    ("training", "locked"),  # the same command has saved there
    ("training", "candidates", [2]),
    ("training", "restoring", 2),
    ("training", "restored", 2),
]


def step_of(step: int) -> list[Call]:
    return [("training", "end_step", step, step), ("training", "due", step)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with step 2."""
    with Checkpointer(str(tmp_path), every=2) as checkpointer:
        checkpointer.save(2, {"x": 2})
    return tmp_path


def saved(root: Path) -> list[int]:
    return sorted(int(each.name[5:]) for each in root.glob("step-*"))


def test_each_method_is_called_once_when_it_should_be(root: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    log: list[Call] = []
    train(root, probes(log))
    end: list[Call] = [
        ("training", "ending", None),
        ("training", "ended"),
        *saving(5),
        ("training", "completed"),
        ("training", "close", True),
        ("training", "outlook"),
    ]
    calls = [*BEGIN, *RESTORE, *step_of(3)]
    assert log == of_both([*calls, *step_of(4), *saving(4), *step_of(5), *end])
    assert caplog.records[-1].getMessage().endswith("The extension a looks ahead. The extension b looks ahead.")
    assert saved(root) == [2, 4, 5]


def test_the_fields_of_all_extensions_are_in_the_manifest(root: Path) -> None:
    train(root, probes([]), until=4)
    manifest = json.loads((root / "step-00000004" / "manifest.json").read_text())
    assert (manifest["metrics"], manifest["lost"]) == ({"a": 4.0}, {"0": []})


@pytest.mark.parametrize("other", [Due.NO, Due.SAVE])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_one_extension_wants_is_saved(root: Path, other: Due, first: bool) -> None:
    log: list[Call] = []
    extensions = [Probe("a", log, due={3: Due.SAVE}), Probe("b", log, due={3: other})]
    train(root, extensions if first else extensions[::-1], until=3)
    assert saved(root) == [2, 3]
    assert [call[0] for call in log if call[2:] == ("due", 3)] == ["a", "b"][:: 1 if first else -1]
    assert [call[2:] for call in log if call[2] == "committed"] == 2 * [("committed", 3, "store", 3)]


@pytest.mark.parametrize("other", [Due.NO, Due.SAVE, Due.LEAVE])
def test_the_ranks_leave_once_also_if_two_extensions_want_to(root: Path, other: Due) -> None:
    log: list[Call] = []
    with pytest.raises(SystemExit) as left:
        train(root, [Probe("a", log, due={3: Due.LEAVE}), Probe("b", log, due={3: other})])
    assert left.value.code == RESUME_CODE
    end: list[Call] = [
        ("training", "leaving"),
        *saving(3),
        ("training", "exit", 3, None, "auto"),
        ("training", "ending", left.value),
        ("training", "close", True),
        ("training", "outlook"),
    ]
    assert log == of_both([*BEGIN, *RESTORE, *step_of(3), *end])
    assert saved(root) == [2, 3]


def test_the_first_extension_that_raises_system_exit_says_how_the_ranks_exit(root: Path) -> None:
    class Leaves(Probe):
        def exit(self, step: int, failure: CheckpointError | None, resume: str | None) -> None:
            super().exit(step, failure, resume)
            raise SystemExit(self.name)

    log: list[Call] = []
    with pytest.raises(SystemExit, match="b"):
        train(root, [Probe("a", log), *(Leaves(name, log, due={3: Due.LEAVE}) for name in "bc")])
    assert [call[0] for call in log if call[2] == "exit"] == ["a", "b"]


def test_a_step_that_is_saved_without_asking_is_asked_about_then(root: Path) -> None:
    log: list[Call] = []
    with (
        pytest.raises(SystemExit),
        Checkpointer(str(root), every=4, extensions=probes(log, due={3: Due.LEAVE})) as checkpointer,
    ):
        checkpointer.save(3, {"x": 3})
    assert [call for call in log if call[2] in ("due", "exit")] == of_both(
        [("training", "due", 3), ("training", "exit", 3, None, None)]
    )


def test_the_lock_is_announced_once_when_the_first_save_takes_it(tmp_path: Path) -> None:
    log: list[Call] = []
    with Checkpointer(str(tmp_path), every=1, extensions=probes(log)) as checkpointer:
        assert "locked" not in [call[2] for call in log]
        checkpointer.maybe_save(1, {"x": 1})
        checkpointer.maybe_save(2, {"x": 2})
    assert [call for call in log if call[2] in ("locked", "due")] == of_both(
        [("training", "locked"), ("training", "due", 1), ("training", "due", 2)]
    )


def test_a_block_that_raises_is_neither_ended_nor_completed(root: Path) -> None:
    log: list[Call] = []
    error = KeyError("of the program")

    def fails(checkpointer: Any) -> None:
        raise error

    with pytest.raises(KeyError):
        train(root, probes(log), between=fails)
    assert log == of_both([*BEGIN, ("training", "ending", error), ("training", "close", True)])


def test_a_restore_of_nothing_and_one_that_fails_are_told(tmp_path: Path) -> None:
    log: list[Call] = []
    with Checkpointer(str(tmp_path), every=4, extensions=probes(log)) as checkpointer:
        assert checkpointer.restore({"x": 0}) is None
        with pytest.raises(CheckpointError):
            checkpointer.restore({"x": 0}, source=tmp_path / "step-00000009")
    told = [call for call in log if call[2] in ("restoring", "restored", "refused")]
    assert told == of_both([("training", "restored", None), ("training", "refused", "CorruptCheckpointError")])


def test_an_extension_learns_whether_some_extension_wants_to_leave(tmp_path: Path) -> None:
    extensions = probes([])
    with Checkpointer(str(tmp_path), extensions=extensions):
        setup = extensions[0].setup
        assert setup is not None
        assert setup.is_urged()
        extensions[1].name = "c"
        assert not setup.is_urged()


def test_what_is_switched_off_tells_extensions_of_steps_alone(tmp_path: Path) -> None:
    log: list[Call] = []
    with Checkpointer(str(tmp_path), enable=False, extensions=probes(log)) as checkpointer:
        assert not checkpointer.maybe_save(1, {"x": 1})
    assert log == of_both([("training", "end_step", 1, None)])


def test_the_tests_of_failures_know_each_method() -> None:
    public = {name for name in methods() if not name.startswith("_")}
    assert public == {*REACHES, *LOGGED, *OF_RANKS} - {"inspect"}
    assert public <= {*vars(Probe)}


def attempt(root: Path, extensions: list[Probe], method: str) -> None:
    """Train so that a method is called."""
    leaves = method in ("leaving", "exit")
    extensions[-1].answers = {4: Due.LEAVE} if leaves else {}

    def also(checkpointer: Checkpointer) -> None:
        setup = extensions[-1].setup
        assert setup is not None
        assert setup.is_urged()
        if method == "refused":
            checkpointer.restore({"x": 0}, source=root / "step-00000009")

    try:
        train(root, extensions, 4 if leaves else 5, also)
    except SystemExit:
        assert leaves


@pytest.mark.parametrize("method", REACHES)
def test_an_error_of_what_all_ranks_do_together_reaches_the_program(root: Path, method: str) -> None:
    with pytest.raises((ValueError, CheckpointError), match=f"planted in {method}"):
        attempt(root, [Probe("bad", [], fails=[method]), Probe("b", [])], method)


@pytest.mark.parametrize("method", LOGGED)
def test_an_error_of_anything_else_is_logged_and_harms_nothing(root: Path, method: str, caplog: Any) -> None:
    log: list[Call] = []
    extensions = [Probe("bad", log, fails=[method]), Probe("b", log)]
    attempt(root, extensions, method)
    called = [call[0] for call in log if call[2] == method]
    assert called
    assert called == ["bad", "b"] * (len(called) // 2)
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    where = "capturing" if method == "inspect" else method
    text = f"stagereg: {where}() of the extension bad failed, but will be called again as usual: ValueError: planted in"
    assert [each.getMessage()[: len(text)] for each in errors] == [text]
    assert saved(root) == ([2, 4] if method == "leaving" else [2, 4, 5])
    state = {"x": 0}
    assert Checkpointer(str(root)).restore(state) == state["x"] == saved(root)[-1]


@pytest.mark.parametrize(
    "fields", [None, {"nothing": 1}, {"world_size": 9}, {"storage": "x"}, {"command": "x"}, {"metrics": {"x": "y"}}]
)
def test_fields_that_no_manifest_can_have_fail_no_save(root: Path, fields: Any, caplog: Any) -> None:
    class Wrong(Probe):
        def manifest_fields(self, step: int) -> Any:
            return fields

    train(root, [Wrong("wrong", []), *probes([])], until=4)
    assert "manifest_fields() of the extension wrong failed" in caplog.text
    assert json.loads((root / "step-00000004" / "manifest.json").read_text())["metrics"] == {"a": 4.0}


def test_a_field_that_two_extensions_give_keeps_the_first_value_and_is_reported(root: Path, caplog: Any) -> None:
    class Also(Probe):
        def manifest_fields(self, step: int) -> Any:
            return {"metrics": {"a": -1.0}}

    train(root, [*probes([]), Also("also", [])], until=4)
    assert "manifest_fields() of the extension also failed" in caplog.text
    assert "an earlier extension already provides metrics" in caplog.text
    assert json.loads((root / "step-00000004" / "manifest.json").read_text())["metrics"] == {"a": 4.0}


def construct(rank: int, size: int, root: str, chosen: Sequence[Sequence[str]]) -> str:
    """Return why a checkpointer with the extensions of this rank cannot be constructed."""
    with pytest.raises(ConfigError) as refused:
        Checkpointer(f"{root}/{'-'.join(map(str, chosen))}", extensions=[Probe(name, []) for name in chosen[rank]])
    return str(refused.value)


def refusals(rank: int, size: int, root: str) -> list[str]:
    return [construct(rank, size, root, chosen) for chosen in (["ab", "a"], ["ab", "ba"], ["", "a"])]


def test_extensions_that_differ_between_ranks_are_refused_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(refusals, 2, args=(str(tmp_path),))
    assert first == second
    has = ["rank 0 has ['a', 'b'], rank 1 has ['a']", "rank 0 has ['a', 'b'], rank 1 has ['b', 'a']"]
    begin = "The extensions of the checkpointer are not the same on all ranks: "
    for text, values in zip(first, [*has, "rank 0 has [], rank 1 has ['a']"], strict=True):
        assert text.startswith(f"{begin}{values}. Use the same extensions in the same order")


def follows(rank: int, size: int, root: str, fails: Sequence[str]) -> tuple[list[Call], list[str]]:
    """Return the calls on a rank that idles, and then leaves a loop that another rank is in; and what was logged."""
    log: list[Call] = []
    texts: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("stagereg").addHandler(handler)
    probe = Probe("b", log)
    with Checkpointer(root, every=4, extensions=[Probe("bad", log, fails), probe]) as checkpointer:
        assert probe.idled.wait(30)
        for each in list(followers):
            each.follow()
            each.loop_ended()
        dist.barrier()  # else a rank follows the save of the other one
        checkpointer.save(1, {"x": rank})
        checkpointer.wait()
        assert checkpointer.restore({"x": 0}) == 1
    return [call for call in log if call[2] in OF_RANKS], texts


@pytest.mark.parametrize("fails", [(), OF_RANKS])
def test_a_rank_that_idles_or_has_left_a_loop_calls_all_extensions(tmp_path: Path, fails: Sequence[str]) -> None:
    for calls, texts in run_ranks(follows, 2, args=(str(tmp_path), fails)):
        followed = [call for call in calls if call[2] == "follow"]
        told = [("training", "follow", False), ("training", "follow", True)]
        assert followed == [(name, *call) for call in told for name in ("bad", "b")]
        idled = [call for call in calls if call[2] == "idle"]
        assert idled[:2] == [("bad", "save", "idle"), ("b", "save", "idle")]
        named = [text.split(" failed, but")[0] for text in texts]
        assert sorted(named) == [f"stagereg: {each}() of the extension bad" for each in fails]
