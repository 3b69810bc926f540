"""An uncaught error that ends several ranks is printed once; whatever differs, or may be lost, is printed too."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import stagereg.base.uncaught as uncaught
from stagereg.errors import CheckpointError, StageregError


class Group:
    def __init__(self, is_gone: bool) -> None:
        self._store, self._is_gone, self.asked = HashStore(), is_gone, False

    def get_group_store(self) -> Any:
        self.asked = True
        if self._is_gone:
            raise RuntimeError("the store is gone")
        return self._store


class Ranks:
    """Ranks in threads whose uncaught errors go to hooks of one store."""

    def __init__(self, *, prints: bool = True, is_gone: bool = False) -> None:
        self.full: list[int] = []
        self._prints, self.group = prints, Group(is_gone)

    def _end(self, rank: int, error: BaseException) -> None:
        def print_traceback(*_: Any) -> None:
            self.full.append(rank)
            if not self._prints:
                raise SystemExit  # the process is killed before it has printed

        hook = uncaught._Hook(print_traceback)
        hook.group, hook.rank = weakref.ref(self.group), rank
        with contextlib.suppress(SystemExit):
            hook(type(error), error, None)

    def end(self, *errors: BaseException) -> list[int]:
        """End rank after rank, at almost the same time; return the ranks that have printed all."""
        threads = [threading.Thread(target=self._end, args=each) for each in enumerate(errors)]
        for each in threads:
            each.start()
            each.join(0.05)
        for each in threads:
            each.join(20)
        return sorted(self.full)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught, "_OWN_S", 0.3)
    monkeypatch.setattr(uncaught, "_PRINTED_S", 0.5)


def error(text: str, cause: BaseException | None = None) -> StageregError:
    found = CheckpointError(text)
    found.__cause__ = cause
    return found


def raised() -> BaseException:
    """Return an error with a traceback, as one that was raised on this rank."""
    try:
        raise OSError("no space")
    except OSError as found:
        return found


def test_one_rank_prints_an_error_and_each_other_rank_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    [rank] = Ranks().end(error("full"), error("full"), error("full"))
    lines = capsys.readouterr().err.splitlines()
    others = [each for each in range(3) if each != rank]
    text = "stagereg: rank {} exits with the CheckpointError that rank {} printed"
    assert sorted(lines) == [text.format(each, rank) for each in others]


def test_the_rank_that_has_the_traceback_of_the_cause_prints_it() -> None:
    assert Ranks().end(error("full", OSError("no space")), error("full", raised()), error("full")) == [1]


def test_errors_that_differ_are_all_printed() -> None:
    assert Ranks().end(error("rank 0 is full"), error("rank 1 is full")) == [0, 1]
    assert Ranks().end(CheckpointError("full"), StageregError("full")) == [0, 1]


def test_errors_of_the_program_are_left_to_python() -> None:
    ranks = Ranks()
    assert ranks.end(ValueError("a bug"), ValueError("a bug")) == [0, 1]
    assert not ranks.group.asked


def test_without_the_store_each_rank_prints_its_error() -> None:
    assert Ranks(is_gone=True).end(error("full"), error("full")) == [0, 1]


def test_a_rank_that_dies_before_it_has_printed_is_replaced() -> None:
    assert Ranks(prints=False).end(error("full"), error("full")) == [0, 1]
