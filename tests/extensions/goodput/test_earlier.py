"""What rank 0's record has of a run's earlier attempts, however they ended and whatever is in the file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg.base import record
from stagereg.extensions.goodput.earlier import Earlier, size_of


class _Written:
    """A record, written by the recorder itself, whose times are its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / record.file_name(0)

    def attempt(
        self,
        *steps: int,
        error: str = "",
        killed: bool = False,
        origin: str | None = None,
        run: str = "mine.0",
        checkpoints: str = "/mine",
    ) -> None:
        """Take steps, after a restart from somewhere if that is told; then end, in one way or another."""
        recording = record.recording(self.path.parent, 0, 1, run)
        with contextlib.suppress(RuntimeError), pytest.MonkeyPatch.context() as patch, recording:
            if steps:
                kind = "begin" if origin is None else "restart"
                record.emit(kind, step=steps[0], origin=origin or "", dir=checkpoints)
            for step in steps:
                record.emit("step", step=step)
                record.log(step, loss=1.0)
            if killed:
                patch.setattr(record, "emit", lambda *args, **fields: None)
            if error:
                raise RuntimeError(error)

    def find(self, run: str = "mine", checkpoints: str = "/mine") -> Earlier | None:
        return Earlier.read(self.path, size_of(self.path), run, checkpoints)

    def read(self) -> Earlier:
        found = self.find()
        assert found is not None
        return found


@pytest.fixture
def written(tmp_path: Path) -> _Written:
    return _Written(tmp_path)


def test_nothing_came_before_the_first_attempt_or_one_that_completed(written: _Written) -> None:
    assert written.find() is None
    written.path.touch()
    assert written.find() is None
    written.attempt(1, 2)
    assert written.find() is None
    written.attempt(3, killed=True)
    assert (written.read().attempts, written.read().step) == (1, 3)


def test_attempts_of_other_runs_in_the_same_file_do_not_count(written: _Written) -> None:
    written.attempt(1, 2, error="theirs", run="their.0", checkpoints="/theirs")
    written.attempt(run="reader.0", error="an evaluation takes no step")
    assert written.find() is None, "no attempt of this run has failed"
    written.attempt(1, 2, killed=True, run="before.0")
    written.attempt(3, 4, killed=True, run="mine.0", origin="tier")
    size = size_of(written.path)
    written.attempt(700, error="theirs", run="their.1", checkpoints="/theirs", origin="store")
    written.attempt(run="reader.1")
    found = written.read()
    assert (found.step, found.attempts, found.failures) == (4, 2, 1), "by its run, and by its directory of checkpoints"
    assert found.failure == {"why": "its process was killed"}
    assert written.find("mine", "/moved") is not None
    assert written.find("new", "/moved") is None
    assert written.find("new", "") is None
    written.attempt(5, run="mine.1")
    assert Earlier.read(written.path, size, "mine", "/mine") == found, "what is recorded later is not earlier"


def test_an_attempt_that_was_killed_has_the_time_of_its_last_step(written: _Written) -> None:
    before = record.now()
    written.attempt(1, 2, 3, killed=True)
    found = written.read()
    assert before < found.began < found.last < record.now()
    assert (found.step, found.failure) == (3, {"why": "its process was killed"})


def test_an_attempt_that_took_no_step_leaves_the_last_one_of_those_before(written: _Written) -> None:
    written.attempt(1, 2, killed=True)
    between = record.now()
    written.attempt(killed=True)
    found = written.read()
    assert (found.step, found.attempts) == (2, 2)
    assert found.began < between < found.last


def test_an_error_is_a_failure_and_leaving_in_order_is_none(written: _Written) -> None:
    written.attempt(1, error="bad number")
    assert written.read().failure["why"] == "RuntimeError: bad number"
    assert written.read().last < written.read().failure["noticed"] < record.now()
    line = b'{"event":"start","t":1,"run":"mine.1"}\n{"event":"end","status":"preempted","t":9.5,"run":"mine.1"}\n'
    written.path.write_bytes(written.path.read_bytes() + line)
    assert written.read().failure == {"ended": 9.5}


def test_failures_are_counted_by_where_the_run_went_on_from(written: _Written) -> None:
    written.attempt(1, 2, killed=True)
    written.attempt(2, 3, killed=True, origin="tier")
    written.attempt(2, 3, killed=True, origin="store")
    written.attempt(2, 3, killed=True, origin="survivors")
    assert (written.read().failures, written.read().stored) == (3, 1)
    written.attempt(4)
    written.attempt(5, killed=True)
    assert (written.read().failures, written.read().attempts) == (0, 1), "these are of a run that has completed"


ODD = st.one_of(
    st.sampled_from([b'{"event":"start",', b'{"event":"step","step":"x","t":1}\n', b'{"event":"end",}\n']),
    st.sampled_from([b'{"event":"restart",7}\n', b'{"event":"start","t":null}\n', b"\n", b"\x00\xff"]),
    st.binary(max_size=20),
)


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 10**6), odd=ODD)
def test_a_file_with_anything_in_it_breaks_no_start(
    tmp_path_factory: pytest.TempPathFactory, cut: int, odd: bytes
) -> None:
    written = _Written(tmp_path_factory.mktemp("odd"))
    written.attempt(1, 2, killed=True)
    written.attempt(3, killed=True, origin="tier")
    text = written.path.read_bytes()
    cut %= len(text)
    written.path.write_bytes(text[:cut] + odd + text[cut:])
    found = written.find()
    assert found is None or found.attempts >= 1
    written.path.write_bytes(text[:cut])
    found = written.find()
    assert found is None or (found.step or 0) <= 3
