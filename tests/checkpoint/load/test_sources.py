"""A restore tries the candidates of all sources in one order, and calls the extensions that accompany it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.options as options
import stagereg.checkpoint.store.foreign as foreign
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.extension import Candidate, CheckpointSource, Rejection, RestoreExtension, RestoreRequest
from stagereg.checkpoint.load.store_source import StoreSource
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError

ASLEEP = Rejection("asleep", "clock", "it sleeps", "Wake it.", "Wake the newest.\n")


class Elsewhere(StoreSource):
    """Another directory, tried before the run's own; a path that ends in ``mine`` is its own."""

    name = "elsewhere"

    def __init__(self, request: RestoreRequest, root: str, calls: list[str]) -> None:
        super().__init__(request)
        self._root, self._calls = root, calls

    def claims(self, path: str) -> bool:
        return path.endswith("mine")

    def survey(self) -> bool:
        self._calls.append("survey")
        return True

    def insert(self, listed: list[Candidate], resume: str) -> list[Candidate]:
        self._calls.append(f"{resume}: {[each.step for each in listed]}")
        there, _ = open_store(self._root).checkpoints()
        found = [open_store(self._root).look(each.path) for each in there]
        return [*(Candidate(each, self.name) for each in found), *listed]

    def lease(self, candidate: Candidate) -> AbstractContextManager[None]:
        self._calls.append(f"lease {candidate.step}")
        return super().lease(candidate)

    def corrupt(self, candidate: Candidate) -> None:
        self._calls.append(f"corrupt {candidate.step}")

    def restored(self, candidate: Candidate, files: CheckpointFiles) -> None:
        assert "x" in files.index.state
        self._calls.append(f"read {candidate.step}")


class Watching(RestoreExtension):
    """Notes how it is called, and rejects the steps in ``asleep``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.calls: list[str] = []
        self.asleep: set[int] = set()

    def sources(self, request: RestoreRequest) -> Sequence[CheckpointSource]:
        return [Elsewhere(request, self._root, self.calls)]

    def candidates(self, request: RestoreRequest, listed: list[Candidate]) -> list[Candidate]:
        return [replace(each, rejections=(ASLEEP,)) if each.step in self.asleep else each for each in listed]

    def restoring(self, request: RestoreRequest, candidate: Candidate) -> None:
        self.calls.append(f"restoring {candidate.step} of {candidate.source}, x={request.state['x']}")

    def restored(self, request: RestoreRequest, candidate: Candidate | None) -> None:
        step = None if candidate is None else candidate.step
        self.calls.append(f"restored {step}, x={request.state['x']}")

    def refused(self, error: CheckpointError) -> None:
        self.calls.append("refused")


@pytest.fixture
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watching:
    """The run's directory has step 1, the other one step 5; ``x`` is the step."""
    for folder, step in (("own", 1), ("other", 5)):
        with Checkpointer(str(tmp_path / folder), save_last=False) as checkpointer:
            checkpointer.save(step, {"x": step})
    found = Watching(str(tmp_path / "other"))
    monkeypatch.setattr(restoring, "installed", lambda: iter([found]))
    return found


def corrupt(checkpoint: Path) -> None:
    [data] = checkpoint.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def restored(folder: Path, resume: str = "auto", x: int = 0) -> int | None:
    with Checkpointer(str(folder / "own"), resume=resume, save_last=False) as checkpointer:
        return checkpointer.restore({"x": x})


def test_candidates_of_all_sources_are_tried_in_one_order(tmp_path: Path, watching: Watching) -> None:
    assert restored(tmp_path) == 5
    assert watching.calls == [
        *("survey", "auto: [1]", "lease 5", "restoring 5 of elsewhere, x=0", "read 5", "restored 5, x=5")
    ]
    watching.calls.clear()
    assert restored(tmp_path, "latest") == 5
    assert watching.calls[1] == "auto: [1]", "another source has a newest one"


def test_a_corrupt_candidate_is_reported_to_its_source_and_the_next_one_is_tried(
    tmp_path: Path, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    corrupt(tmp_path / "other" / "step-00000005")
    assert restored(tmp_path) == 1
    assert watching.calls[2:] == [
        *("lease 5", "restoring 5 of elsewhere, x=0", "corrupt 5", "restoring 1 of store, x=0", "restored 1, x=1")
    ]
    assert "step-00000005 is corrupt and was skipped:\n" in caplog.text
    with pytest.raises(CheckpointError, match=r"latest: .*step-00000005 is not a complete checkpoint"):
        restored(tmp_path, "latest")


def test_a_corrupt_checkpoint_of_the_directory_does_not_count_as_one_that_is_kept(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), save_last=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": step})
    corrupt(tmp_path / "step-00000002")
    with Checkpointer(str(tmp_path), keep=2, save_last=False) as checkpointer:
        assert checkpointer.restore({"x": 0}) == 1
        checkpointer.save(3, {"x": 3})
    assert (tmp_path / "step-00000001").exists()


def test_a_rejected_candidate_is_skipped_with_the_reason_and_the_hint_of_its_extension(
    tmp_path: Path, watching: Watching, caplog: pytest.LogCaptureFixture
) -> None:
    watching.asleep = {5}
    assert restored(tmp_path) == 1
    assert "step-00000005 is asleep and was skipped:\n  clock: it sleeps\n  Wake it." in caplog.text
    assert "instead of step 5: 4 steps are repeated." in caplog.text
    assert not [each for each in watching.calls if "restoring 5" in each or "corrupt" in each]
    watching.asleep, watching.calls[:] = {1, 5}, []
    with pytest.raises(CheckpointError, match=r"(?s)none of them is valid.*clock: it sleeps\nWake the newest\.\n"):
        restored(tmp_path)
    assert watching.calls[-1] == "refused"


def test_a_path_that_a_source_claims_is_read_by_that_source_alone(tmp_path: Path, watching: Watching) -> None:
    assert restored(tmp_path, str(tmp_path / "own" / "mine")) == 5
    assert watching.calls[:2] == ["survey", f"{tmp_path / 'own' / 'mine'}: []"]


def test_extensions_hear_that_there_is_nothing_to_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watching = Watching(str(tmp_path / "none"))
    monkeypatch.setattr(restoring, "installed", lambda: iter([watching]))
    caplog.set_level(logging.INFO)
    assert restored(tmp_path) is None
    assert watching.calls[-1] == "restored None, x=0"


def no_modules(name: str) -> Iterator[object]:
    return iter(())


def test_what_torch_wrote_is_refused_with_the_extension_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    monkeypatch.setattr(foreign, "providers", no_modules)
    monkeypatch.setattr(restoring, "providers", no_modules)
    with (
        Checkpointer(str(tmp_path / "run"), resume=str(tmp_path / "plain"), save_last=False) as checkpointer,
        pytest.raises(CheckpointError, match=r"torch wrote .*plain, and reading it needs .*/interop, which"),
    ):
        checkpointer.restore({"x": torch.zeros(3)})


def test_reading_once_is_refused_without_the_extension_that_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "has", lambda name: name != "buckets")
    with pytest.raises(ConfigError, match=r"once.*needs stagereg/extensions/buckets"):
        Restore(read="once")
    Restore()
