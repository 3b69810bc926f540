"""Directories of plain torch whose ``.metadata`` is malformed, or holds odd states, are read or refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from stagereg.assembly import Checkpointer
from stagereg.cli import main
from stagereg.errors import CheckpointError
from stagereg.extensions.interop.opening import open_checkpoint
from stagereg.stagers.blocking import BlockingAsyncStager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain(path: Path, state: dict[str, Any], change: Callable[[Any], Any] = lambda metadata: None) -> Path:
    """A directory that plain torch wrote, with a change in its metadata."""
    dcp.save(state, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize("content", [b"", b"\x80\x04}", pickle.dumps(7), b"\x80\x02)" + b"\x85" * 1_000_000 + b"."])
def test_a_listing_calls_other_pickles_corrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "step-3"
    path.mkdir()
    (path / ".metadata").write_bytes(content)
    assert main(["ls", str(path)]) == 0
    assert "corrupt" in capsys.readouterr().out


def storage(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"]


def way(*keys: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update(w=keys)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a tensor of many dimensions": lambda metadata: vars(entry(metadata)).update(size=torch.Size([1] * 65), chunks=[]),
    "more parts than are stored": lambda metadata: entry(metadata).chunks.extend(entry(metadata).chunks * 20_000),
    "a place in many lists": way("a", *[10_000] * 150),
    "a place far out": way("a", 1 << 40),
    "a deep place": way(*(f"k{i}" for i in range(3_000))),
    "a deep place of one long key": way(*["y" * 20_000] * 190),
    "a place in front": way("a", -1),
    "no place": way(),
    "a place in no dict": way(0, "a"),
    "a place that is true": way("a", True),
    "a place at half": way("a", 1.5),
    "a place in another one": way("b", "w"),
    "a size of text": lambda m: setattr(entry(m), "size", "3"),
    "a list of sizes": lambda m: setattr(entry(m), "size", [2]),
    "sizes below zero": lambda m: setattr(entry(m), "size", torch.Size((-2,))),
    "sizes without end": lambda m: setattr(entry(m), "size", torch.Size((1 << 62, 1 << 62))),
    "a dtype of text": lambda m: setattr(entry(m).properties, "dtype", "float32"),
    "a quantized tensor in parts": lambda m: (
        setattr(entry(m).properties, "dtype", torch.qint8),
        entry(m).chunks.extend(entry(m).chunks),
    ),
    "no chunks": lambda m: setattr(entry(m), "chunks", None),
    "an offset that is not a number": lambda m: setattr(storage(m), "offset", float("nan")),
    "an offset of 2^70": lambda m: setattr(storage(m), "offset", 1 << 70),
    "a length that is true": lambda m: setattr(storage(m), "length", True),
    "a file that is a number": lambda m: setattr(storage(m), "relative_path", 3),
    "a file outside": lambda m: setattr(storage(m), "relative_path", "../__0_0.distcp"),
    "a shape of another size": lambda m: setattr(entry(m), "size", torch.Size([8])),
    "a hole": lambda m: setattr(entry(m), "size", torch.Size([4])),
    "a chunk twice": lambda m: (setattr(entry(m), "size", torch.Size([4])), entry(m).chunks.extend(entry(m).chunks)),
    "no storage": lambda m: setattr(m, "storage_data", None),
    "names that are numbers": lambda m: m.state_dict_metadata.update({3: entry(m)}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_malformed_metadata_is_a_checkpoint_error_of_every_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], Any]
) -> None:
    path = plain(tmp_path / "step-3", {"w": torch.ones(2), "b": torch.ones(3)}, change)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
    with (
        Checkpointer(str(tmp_path / "run"), resume=str(path), stager=BlockingAsyncStager()) as checkpointer,
        pytest.raises(CheckpointError),
    ):
        checkpointer.restore({"w": torch.zeros(2)})
    for command in (["ls", str(path)], ["verify", str(path)], ["convert", str(path), str(tmp_path / "x.pt")]):
        assert main(command) in (0, 1, 2)
    assert "Traceback" not in "".join(capsys.readouterr())
    assert not (tmp_path / "x.pt").exists()


def test_many_lists_with_one_tensor_each_are_read(tmp_path: Path) -> None:
    """Also with gaps, of which nothing is saved."""
    lists = [[[torch.full((1,), n)]] for n in range(300)] + [{}] * 9_000 + [{"a": torch.ones(1)}]
    with open_checkpoint(plain(tmp_path / "x", {"lists": lists})) as checkpoint:
        found = checkpoint.entry("lists")
    assert [int(inner[0][0]) for inner in found[:300]] == [*range(300)]
    assert found[-1]["a"].tolist() == [1]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_tensor_is_read_as_an_object(tmp_path: Path) -> None:
    """Its scale is in its archive alone, so it can be read there, and the rest of the directory too."""
    given = torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.5, 1, torch.quint8)
    with open_checkpoint(plain(tmp_path / "x", {"q": given, "w": torch.ones(2)})) as checkpoint:
        assert repr(checkpoint.entry("q")) == repr(given)
        assert checkpoint["w"].tolist() == [1, 1]


def test_an_optimizer_without_groups_is_read_as_torch_saves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"optim": {"state": {}, "param_groups": []}, "w": torch.ones(2)}
    path, saved = plain(tmp_path / "step-3", state), {"param_groups": []}  # torch saves no empty dict
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.entry("optim") == saved
        assert checkpoint["w"].tolist() == [1, 1]
    assert main(["ls", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["state"] == "no checksums"
    assert main(["convert", str(path), str(tmp_path / "x.pt")]) == 0
    assert torch.load(tmp_path / "x.pt")["optim"] == saved
    loaded: dict[str, Any] = {"optim": None, "w": torch.zeros(2)}
    with Checkpointer(str(tmp_path / "run"), resume=str(path), stager=BlockingAsyncStager()) as checkpointer:
        assert checkpointer.restore(loaded) == 3
        assert loaded["optim"] == saved
        weight = torch.nn.Linear(1, 1)
        with pytest.raises(CheckpointError, match="'optim'"):
            checkpointer.restore({"optim": torch.optim.SGD(weight.parameters(), lr=0.1)}, source=path)


def test_options_that_hold_one_another_are_refused_before_they_are_shown(tmp_path: Path) -> None:
    nested: Any = []
    for _ in range(60):
        nested = [nested, nested]
    groups = [{"lr": 0.1, "more": (nested,), "params": [0]}]
    path = plain(tmp_path / "x", {"optim": {"state": {0: {"step": torch.ones(1)}}, "param_groups": groups}})
    with pytest.raises(CheckpointError, match=r"the optimizer option .* is too large"):
        open_checkpoint(path)
