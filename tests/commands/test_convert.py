"""``stagereg convert``: one file, from a checkpoint of any number of ranks, with the bits that were saved."""

from __future__ import annotations

import collections
import errno
import io
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from stagereg import cli
from stagereg.checkpoint.checkpointer import Checkpointer
from stagereg.checkpoint.manifest import Manifest
from stagereg.checkpoint.store.local_store import LocalStore
from stagereg.errors import CheckpointError
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

NAMES = ["model", "optimizer", "scheduler"]


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1))


def step(model: Any, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(6, 5)).square().mean().backward()
    optimizer.step()


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    return {key: bits(item) for key, item in value.items()} if isinstance(value, dict) else value


def save_sharded(rank: int, world_size: int, root: str) -> dict[str, Any] | None:
    """Save the same training under ZeRO and under FSDP2, and return rank 0's ZeRO run as torch puts it together."""
    whole = None
    for kind in ("zero", "fsdp2"):
        model: Any = network()
        if kind == "zero":
            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
        for number in (1, 2):
            step(model, optimizer, number)
            scheduler.step()
        with Checkpointer(f"{root}/{kind}", stager=BlockingAsyncStager()) as checkpointer:
            checkpointer.save(2, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        if kind == "zero":
            optimizer.consolidate_state_dict(0)
            if rank == 0:
                whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        else:
            model = {name: x.full_tensor() for name, x in model.state_dict().items() if hasattr(x, "full_tensor")}
            if rank == 0:
                torch.save(model, f"{root}/fsdp2.reference")
        dist.barrier()
    return whole


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of three ranks, and what is in the one of ZeRO."""
    root = tmp_path_factory.mktemp("sharded")
    whole, *_ = run_ranks(save_sharded, nproc=3, args=(str(root),))
    return root, whole


def test_torch_loads_the_file_of_a_zero_run_into_model_and_adam(
    sharded: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, whole = sharded
    assert cli.main(["convert", str(root / "zero"), str(tmp_path / "all.pt")]) == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert sorted(found) == NAMES
    assert bits(dict(found["model"])) == bits(dict(whole["model"]))
    assert bits(found["optimizer"]["state"]) == bits(whole["optimizer"]["state"])
    assert len(found["optimizer"]["state"]) == 6

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_sharded_tensors_are_whole_in_the_file(sharded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = sharded
    expected = torch.load(root / "fsdp2.reference")
    for name in ("model.pt", "model.safetensors"):
        assert cli.main(["convert", str(root / "fsdp2" / "latest"), str(tmp_path / name), "--only", "model"]) == 0
    from safetensors.torch import load_file

    for found in (torch.load(tmp_path / "model.pt", weights_only=True), load_file(tmp_path / "model.safetensors")):
        network().load_state_dict(found)
        assert {name: bits(x) for name, x in found.items() if name in expected} == bits(expected)


def test_safetensors_has_tensors_by_name_and_names_the_rest(
    sharded: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, whole = sharded
    out = tmp_path / "all.safetensors"
    assert cli.main(["convert", str(root / "zero"), str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    from safetensors.torch import load_file

    found = load_file(out)
    expected = {f"model.{name}": x for name, x in whole["model"].items()}
    for number, part in whole["optimizer"]["state"].items():
        expected |= {f"optimizer.state.{number}.{name}": x for name, x in part.items()}
    assert bits(found) == bits(expected)
    assert (shown["names"], shown["bytes"]) == (["model", "optimizer"], out.stat().st_size)
    assert {"optimizer.param_groups.0.lr", "scheduler.last_epoch"} <= set(shown["left_out"])
    assert not set(shown["left_out"]) & set(expected)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["convert", *map(str, arguments)]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    return seen.err


def save(root: Path, *states: dict[str, Any]) -> Path:
    with Checkpointer(str(root), keep=9, stager=BlockingAsyncStager()) as checkpointer:
        for number, state in enumerate(states, start=1):
            checkpointer.save(number, state)
    return root


def test_the_library_reads_tensors_of_every_kind(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    from stagereg.checkpoint.storage.safetensors import DTYPES

    tied = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"tied": tied, "tied too": tied, "transposed": tied.t(), "one": tied[1, 2], "none": tied[:, :0]}
    root = save(tmp_path / "run", {"x": tensors, "number": 3})
    for name in ("all.safetensors", "all.pt"):
        assert cli.main(["convert", str(root), str(tmp_path / name)]) == 0
    assert bits(load_file(tmp_path / "all.safetensors")) == bits({f"x.{name}": x for name, x in tensors.items()})
    assert bits(torch.load(tmp_path / "all.pt", weights_only=True)) == bits({"number": 3, "x": tensors})
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}


def test_tensors_that_safetensors_cannot_hold_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"x": {"wide": torch.ones(2, dtype=torch.complex128)}, "y": {"__metadata__": torch.ones(2)}, "z": 3}
    root = save(tmp_path / "run", state)
    for name, message in (
        ("x", "cannot hold 'wide', which is torch.complex128; write a .pt"),
        ("y", "cannot hold '__metadata__', which is torch.float32; write a .pt"),
    ):
        assert message in refused(capsys, root, tmp_path / "x.safetensors", "--only", name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert cli.main(["convert", str(root), str(tmp_path / "z.safetensors"), "--only", "z"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["In it: nothing", "Not in it, being no tensors: z"]
    assert cli.main(["convert", str(root), str(tmp_path / "x.pt")]) == 0


def test_a_pt_file_has_only_types_that_torch_loads(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    state = {
        "best": numpy.float64(0.25),
        "seen": (numpy.int64(7), [numpy.bool_(True)], {"some": b"\xff"}),
        "count": collections.Counter("aab"),
        "model": torch.nn.BatchNorm1d(2),
    }
    root = save(tmp_path / "run", state)
    assert cli.main(["convert", str(root), str(tmp_path / "x.pt")]) == 0
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["best"] == 0.25
    assert found["seen"] == (7, [True], {"some": b"\xff"})
    assert {type(found["best"]), type(found["seen"][0]), type(found["seen"][1][0])} == {float, int, bool}
    assert (found["count"], type(found["count"])) == (state["count"], collections.Counter)
    assert found["model"]._metadata == state["model"].state_dict()._metadata


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_full_disk_and_an_interruption_leave_nothing(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stagereg.checkpoint.reading import CheckpointFiles

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() > 20_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    opened = Path.open

    def on_a_full_disk(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return Full(path, mode) if mode == "xb" else opened(path, mode, *rest, **named)

    root, arguments = save(tmp_path / "run", {str(i): torch.ones(5000) for i in range(4)}), str(tmp_path / name)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", on_a_full_disk)
        assert cli.main(["convert", str(root), arguments]) == 2
    assert capsys.readouterr().err.endswith(f"{name} was not written: [Errno 28] No space left on device\n")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(CheckpointFiles, "read", interrupted)
        assert cli.main(["convert", str(root), arguments]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_of_a_directory_the_newest_good_one_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = save(tmp_path / "run", *({"x": torch.full((99,), n)} for n in range(3))), tmp_path / "x.pt"
    flip(root / "step-00000003" / "__0_0.distcp")
    assert cli.main(["convert", str(root), str(out)]) == 0
    assert torch.load(out)["x"][0] == 1
    assert "Passing over" in (shown := capsys.readouterr().err)
    assert "step-00000003: __0_0.distcp: flipped bits" in shown
    out.unlink()
    assert cli.main(["convert", str(root / "step-00000003"), str(out)]) == 2
    assert "no good checkpoint" in capsys.readouterr().err
    assert not out.exists()


def test_a_checkpoint_deleted_while_it_is_read_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = save(tmp_path / "run", {"x": torch.zeros(9)}, {"x": torch.ones(9)}), tmp_path / "x.pt"
    newer, read = (root / "step-00000002").rename(tmp_path / "newer"), LocalStore.contents

    def contents(store: LocalStore, path: str, names: Any) -> Any:
        if newer.exists():
            newer.rename(root / "step-00000002")
            shutil.rmtree(root / "step-00000001")
        return read(store, path, names)

    def gone(store: LocalStore, path: str, names: Any) -> Any:
        found = read(store, path, names)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(LocalStore, "contents", contents)
    assert cli.main(["convert", str(root), str(out)]) == 0
    assert torch.load(out)["x"].sum() == 9
    assert "Passing over" not in capsys.readouterr().err
    monkeypatch.setattr(LocalStore, "contents", gone)
    assert cli.main(["convert", str(root), str(out), "--force"]) == 2
    assert "If a run has just deleted it, there is a newer one: try again." in capsys.readouterr().err


def test_nothing_is_replaced_unless_it_is_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stagereg.checkpoint.export import Export
    from stagereg.checkpoint.index import Index
    from stagereg.checkpoint.reading import CheckpointFiles

    root, out = save(tmp_path / "run", {"x": torch.ones(3)}), tmp_path / "x.pt"
    out.write_text("mine")
    assert cli.main(["convert", str(root), str(out)]) == 2
    assert "is there already; --force replaces it" in capsys.readouterr().err
    empty = {"format": 1, "files": [], "tensors": {}, "objects": {}, "state": {}}
    export = Export(CheckpointFiles(str(root), Index(empty, {})), {})
    with pytest.raises(CheckpointError, match="there already"):
        export.write(out, replace=False)  # as if the file had been created meanwhile
    assert out.read_text() == "mine"
    assert cli.main(["convert", str(root), str(out), "--force"]) == 0
    assert bits(torch.load(out)["x"]) == bits(torch.ones(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.pt"]


def test_a_wrong_argument_is_reported_on_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", {"model": torch.nn.Linear(2, 2)})
    for arguments, message in (
        (["run", "x.bin"], "use one of .pt, .pth, .safetensors"),
        (["run", "nowhere/x.pt"], "or there is none to write it to"),
        (["run", "x.pt", "--only", "modle"], "Did you mean 'model'?"),
        (["none", "x.pt"], "There is no checkpoint in"),
    ):
        assert message in (shown := refused(capsys, *arguments))
        assert len(shown.splitlines()) < 5


def test_names_and_types_in_a_file_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(str(tmp_path / "run"), stager=BlockingAsyncStager()) as checkpointer:
        checkpointer.save(1, {"\x1b[2Jx": torch.ones(2), "n\x1b[2J": {"a\n": 3}})
    for name in ("x.pt", "x.safetensors"):
        assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / name)]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert r"'\x1b[2Jx'" in shown.out


def test_a_directory_of_plain_torch_becomes_a_pt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = str(tmp_path / "plain"), str(tmp_path / "x.pt")
    state = {"model": network().state_dict(), "values": {"lr": 0.1, "list": [torch.ones(2), {"a": (1, "b")}]}}
    dcp.save(state, checkpoint_id=plain, no_dist=True)
    assert cli.main(["convert", plain, out]) == 0
    found = torch.load(out, weights_only=True)
    assert bits(found["model"]) == bits(dict(state["model"]))
    assert found["values"]["lr"] == 0.1
    assert found["values"]["list"][0].tolist() == [1, 1]
    assert found["values"]["list"][1] == {"a": (1, "b")}
    assert cli.main(["convert", plain, out, "--only", "model", "--force"]) == 0
    assert bits(torch.load(out, weights_only=True)) == bits(found["model"])
    assert "In it: model\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("metadata", "which is no metadata; nothing was imported"),
        ("value", "'y' was not read"),
        ("mesh", "'y' was not read"),
        ("cut", "was not read"),
        ("elsewhere", "'../_0.distcp', which is no file of the directory"),
        ("shape", "'x' has another shape or dtype"),
        ("hole", "the chunks of 'x' do not cover it once"),
        ("twice", "the chunks of 'x' do not cover it once"),
    ],
)
def test_plain_torch_runs_nothing_and_damage_is_one_line(
    what: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    values = {"value": Fires(), "mesh": MakesMesh()}
    dcp.save({"x": torch.ones(9), "y": values.get(what, 1)}, checkpoint_id=plain, no_dist=True)
    metadata, (data,) = plain / ".metadata", plain.glob("*.distcp")
    if what == "metadata":
        metadata.write_bytes(pickle.dumps(Fires()))
    elif what == "cut":
        data.write_bytes(data.read_bytes()[:100])
    elif what == "elsewhere":
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))
    elif what in ("shape", "hole", "twice"):
        described = pickle.loads(metadata.read_bytes())
        entry = described.state_dict_metadata["x"]
        entry.size = torch.Size([8 if what == "shape" else 18])
        entry.chunks = [replace(entry.chunks[0], sizes=torch.Size([8 if what == "shape" else 9]))]
        entry.chunks *= 2 if what == "twice" else 1
        metadata.write_bytes(pickle.dumps(described))
    shown = refused(capsys, plain, tmp_path / "x.pt")
    assert message in shown
    assert len(shown.splitlines()) < 12
    assert not (tmp_path / "x.pt").exists()


def test_what_gives_no_file_that_can_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run", {"x": torch.ones(2), "names": frozenset("ab")})
    assert "torch.load(weights_only=True) would refuse it" in refused(capsys, tmp_path / "run", tmp_path / "x.pt")
    older = save(tmp_path / "old", {"x": 1}) / "step-00000001"
    (older / "index.json").unlink()
    manifest = Manifest.loads((older / "manifest.json").read_text())
    del manifest.files["index.json"]
    (older / "manifest.json").write_text(manifest.dumps())
    assert "has no index.json" in refused(capsys, tmp_path / "old", tmp_path / "x.pt")
    assert not list(tmp_path.glob("*.pt*"))


class MakesMesh:
    """Becomes a device mesh, which initializes the process group."""

    def __reduce__(self) -> Any:
        return DeviceMesh, ("cpu", [0])


class Fires:
    """Becomes a call when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was run",)
