"""What adapters share: they replace and delete only what stagereg wrote, and ranks agree. Needs no trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagereg
import stagereg.integrations.written as written
from stagereg.errors import CheckpointError
from stagereg.integrations.agreed import agreed
from stagereg.integrations.named import NamedCheckpoints, delete
from stagereg.testing import run_ranks


def write(final: Path, text: str) -> None:
    beside = written.begin(str(final))
    Path(beside, "model.safetensors").write_text(text)
    written.commit(beside, str(final))


def test_a_directory_of_ours_is_replaced_and_deleted_and_no_other(tmp_path: Path) -> None:
    write(tmp_path / "best-1", "first")
    left = Path(written.begin(str(tmp_path / "best-1")))  # and its run is killed
    write(tmp_path / "best-1", "second")
    assert (tmp_path / "best-1" / "model.safetensors").read_text() == "second"
    assert not left.exists()
    (tmp_path / "best-2").mkdir()
    (tmp_path / "best-2" / "notes").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"best-2 exists and was not written by stagereg.*\. Move it away, or save"
    ):
        write(tmp_path / "best-2", "third")
    written.remove(str(tmp_path / "best-2"))
    (tmp_path / "best-3").symlink_to(tmp_path / "best-2")
    write(tmp_path / "best-3", "third")
    assert not (tmp_path / "best-3").is_symlink()
    assert (tmp_path / "best-2" / "notes").read_text() == "mine"
    written.remove(str(tmp_path / "best-1"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["best-2", "best-3"]


def test_what_a_user_has_beside_named_checkpoints_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = NamedCheckpoints(str(tmp_path), True, {})
    (tmp_path / ".stagereg" / "step-00000002").mkdir()
    (tmp_path / ".stagereg" / "step-00000002" / "notes").write_text("mine")
    for name in ("one.ckpt", "two.ckpt"):
        named.save({"name": name}, named.begin(name))
        named.checkpointer.wait()
    named.close()
    assert (tmp_path / ".stagereg" / "step-00000002" / "notes").read_text() == "mine"
    [two] = (tmp_path / "two.ckpt").iterdir()
    assert stagereg.open_checkpoint(str(two)).entry("name") == "two.ckpt"
    (tmp_path / "two.ckpt" / "notes\x1b[2J").write_text("mine")
    for name in ("one.ckpt", "two.ckpt"):
        delete(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".ckpt"] == ["two.ckpt"]
    assert [each.name for each in (tmp_path / "two.ckpt").iterdir()] == ["notes\x1b[2J"]
    assert r"two.ckpt, because it also contains notes\x1b[2J" in caplog.text, "fit to be printed"


def decided(rank: int, world_size: int) -> tuple[object, str, list[bool]]:
    """What a rank gets of a decision, and of one that fails, and which of the two it was asked for."""
    asked = []

    def decide(fails: bool) -> str:
        asked.append(fails)
        if fails:
            raise OSError("no space")
        return f"rank {rank}"

    found = agreed(lambda: decide(False))
    with pytest.raises(CheckpointError) as raised:
        agreed(lambda: decide(True))
    return found, str(raised.value), asked


def test_rank_0_decides_for_all_and_all_raise_its_error() -> None:
    first = "rank 0", "OSError: no space", [False, True]
    assert decided(0, 1) == first, "without a process group"
    assert run_ranks(decided, nproc=2) == [first, (*first[:2], [])]
