"""``stagereg convert``: one file, from a checkpoint of any number of ranks, with the bits that were saved."""

from __future__ import annotations

import collections
import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from stagereg.assembly import Checkpointer
from stagereg.base.machine import memory
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.storage.reading import CheckpointFiles
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.cli import main
from stagereg.extensions.interop.safetensors import DTYPES
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from .checkpoint_directories import flip
from .conftest import Command


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


def load_file(file: Path) -> dict[str, torch.Tensor]:
    return pytest.importorskip("safetensors.torch").load_file(file)


def save_sharded(rank: int, world_size: int, root: str) -> dict[str, Any] | None:
    """Save the same training under ZeRO and under FSDP2; return what is in them on rank 0, as torch sees it."""
    zero, fsdp2 = network(), network()
    fully_shard(fsdp2, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.Adam, lr=0.1)
    trainings = {"zero": (zero, optimizer), "fsdp2": (fsdp2, torch.optim.Adam(fsdp2.parameters(), lr=0.1))}
    for name, (model, stepping) in trainings.items():
        scheduler = torch.optim.lr_scheduler.MultiStepLR(stepping, [2])
        for number in (1, 2):
            step(model, stepping, number)
            scheduler.step()
        with Checkpointer(f"{root}/{name}", stager=BlockingAsyncStager()) as checkpointer:
            checkpointer.save(2, {"model": model, "optimizer": stepping, "scheduler": scheduler})
    optimizer.consolidate_state_dict(0)
    whole = {name: x.full_tensor() for name, x in fsdp2.state_dict().items() if hasattr(x, "full_tensor")}
    return {"model": zero.state_dict(), "optimizer": optimizer.state_dict(), "fsdp2": whole} if rank == 0 else None


Sharded = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Sharded:
    """Checkpoints of three ranks, and what is in them."""
    root = tmp_path_factory.mktemp("sharded")
    return root, run_ranks(save_sharded, nproc=3, args=(str(root),))[0]


def named(state: dict[int, Any]) -> dict[str, Any]:
    """The state of an optimizer by the names of its parameters."""
    names = [name for name, _ in network().named_parameters()]
    return {names[number]: part for number, part in state.items()}


def test_torch_loads_the_file_of_a_zero_run(sharded: Sharded, tmp_path: Path, command: Command) -> None:
    root, whole = sharded
    assert "step 2" in command("convert", root / "zero", tmp_path / "all.pt").out
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert sorted(found) == ["model", "optimizer", "scheduler"]
    assert bits(dict(found["model"])) == bits(dict(whole["model"]))
    assert bits(found["optimizer"]["state"]) == bits(named(whole["optimizer"]["state"]))
    assert len(found["optimizer"]["state"]) == 6
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_sharded_tensors_are_whole_in_the_file(sharded: Sharded, tmp_path: Path, command: Command) -> None:
    root, whole = sharded
    for name in ("model.pt", "model.safetensors"):
        command("convert", root / "fsdp2" / "latest", tmp_path / name, "--only", "model")
    for found in (torch.load(tmp_path / "model.pt", weights_only=True), load_file(tmp_path / "model.safetensors")):
        network().load_state_dict(found)
        assert {name: bits(x) for name, x in found.items() if name in whole["fsdp2"]} == bits(whole["fsdp2"])


def test_safetensors_has_tensors_by_name_and_names_the_rest(sharded: Sharded, tmp_path: Path, command: Command) -> None:
    root, whole = sharded
    out = tmp_path / "all.safetensors"
    shown = command("convert", root / "zero", out, "--json").json
    expected = {f"model.{name}": x for name, x in whole["model"].items()}
    for of, part in named(whole["optimizer"]["state"]).items():
        expected |= {f"optimizer.state.{of}.{name}": x for name, x in part.items()}
    assert bits(load_file(out)) == bits(expected)
    assert (shown["names"], shown["bytes"]) == (["model", "optimizer"], out.stat().st_size)
    assert {"optimizer.param_groups.0.lr", "scheduler.last_epoch"} <= set(shown["left_out"])
    assert not set(shown["left_out"]) & set(expected)


def save(root: Path, *states: dict[str, Any]) -> Path:
    with Checkpointer(str(root), keep=9, stager=BlockingAsyncStager()) as checkpointer:
        for number, state in enumerate(states, start=1):
            checkpointer.save(number, state)
    return root


def test_the_library_reads_tensors_of_every_kind(tmp_path: Path, command: Command) -> None:
    tied = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"tied": tied, "tied too": tied, "transposed": tied.t(), "one": tied[1, 2], "none": tied[:, :0]}
    root = save(tmp_path / "run", {"x": tensors, "number": 3})
    for name in ("all.safetensors", "all.pt"):
        command("convert", root, tmp_path / name)
    assert bits(load_file(tmp_path / "all.safetensors")) == bits({f"x.{name}": x for name, x in tensors.items()})
    assert bits(torch.load(tmp_path / "all.pt", weights_only=True)) == bits({"number": 3, "x": tensors})
    with pytest.importorskip("safetensors").safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}


def test_tensors_that_safetensors_cannot_hold_are_named(tmp_path: Path, command: Command) -> None:
    state = {"x": {"wide": torch.ones(2, dtype=torch.complex128)}, "y": {"__metadata__": torch.ones(2)}, "z": 3}
    root = save(tmp_path / "run", state)
    for name, tensor in (("x", "'wide' of dtype torch.complex128"), ("y", "'__metadata__' of dtype torch.float32")):
        wrong = command("convert", root, tmp_path / "x.safetensors", "--only", name, code=2).err
        assert f"safetensors does not support {tensor}. Write a .pt instead." in wrong
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    command("convert", root, tmp_path / "x.pt")


def test_a_pt_file_has_only_types_that_torch_loads(tmp_path: Path, command: Command) -> None:
    numpy = pytest.importorskip("numpy")
    state = {
        "best": numpy.float64(0.25),
        "seen": (numpy.int64(7), [numpy.bool_(True)], {"some": b"\xff"}),
        "count": collections.Counter("aab"),
        "model": torch.nn.BatchNorm1d(2),
    }
    command("convert", save(tmp_path / "run", state), tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["best"] == 0.25
    assert found["seen"] == (7, [True], {"some": b"\xff"})
    assert {type(found["best"]), type(found["seen"][0]), type(found["seen"][1][0])} == {float, int, bool}
    assert (found["count"], type(found["count"])) == (state["count"], collections.Counter)
    assert found["model"]._metadata == state["model"].state_dict()._metadata


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_full_disk_and_an_interruption_leave_nothing(
    tmp_path: Path, name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() > 20_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    opened = Path.open

    def on_a_full_disk(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return Full(path, mode) if mode == "xb" else opened(path, mode, *rest, **named)

    root, out = save(tmp_path / "run", {str(i): torch.ones(5000) for i in range(4)}), tmp_path / name
    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", on_a_full_disk)
        shown = command("convert", root, out, code=2).err
    assert "cannot write" in shown
    assert shown.endswith(f"{name}: [Errno 28] No space left on device\n")
    monkeypatch.setattr(CheckpointFiles, "read", interrupted)
    command("convert", root, out, code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_of_a_directory_the_newest_good_one_is_converted(tmp_path: Path, command: Command) -> None:
    root, out = save(tmp_path / "run", *({"x": torch.full((99,), n)} for n in range(3))), tmp_path / "x.pt"
    flip(root / "step-00000003" / "__0_0.distcp")
    shown = command("convert", root, out).err
    assert torch.load(out)["x"][0] == 1
    assert "Skipping" in shown
    assert "step-00000003: __0_0.distcp: CRC-32 mismatch" in shown
    out.unlink()
    assert "no valid checkpoint" in command("convert", root / "step-00000003", out, code=2).err
    assert not out.exists()


def test_a_checkpoint_deleted_while_it_is_read_is_no_damage(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = save(tmp_path / "run", {"x": torch.zeros(9)}, {"x": torch.ones(9)}), tmp_path / "x.pt"
    newer, read = (root / "step-00000002").rename(tmp_path / "newer"), CheckpointStore.contents

    def contents(store: CheckpointStore, path: str, names: Any) -> Any:
        if newer.exists():
            newer.rename(root / "step-00000002")
            shutil.rmtree(root / "step-00000001")
        return read(store, path, names)

    def gone(store: CheckpointStore, path: str, names: Any) -> Any:
        found = read(store, path, names)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(CheckpointStore, "contents", contents)
    assert "Skipping" not in command("convert", root, out).err
    assert torch.load(out)["x"].sum() == 9
    monkeypatch.setattr(CheckpointStore, "contents", gone)
    shown = command("convert", root, out, "--force", code=2).err
    assert "If a run has just deleted this checkpoint, a newer checkpoint exists: try again." in shown


def test_nothing_is_replaced_unless_forced(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    root, out = save(tmp_path / "run", {"x": torch.ones(3)}), tmp_path / "x.pt"
    read = CheckpointFiles.read

    def meanwhile(*arguments: Any) -> None:
        read(*arguments)
        out.write_text("mine")

    with monkeypatch.context() as another:
        another.setattr(CheckpointFiles, "read", meanwhile)
        for _ in range(2):  # it is made while the checkpoint is read, and then it is there from the start
            assert "already exists. Pass --force to replace it" in command("convert", root, out, code=2).err
    assert out.read_text() == "mine"
    command("convert", root, out, "--force")
    assert bits(torch.load(out)["x"]) == bits(torch.ones(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.pt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x.bin"], "Use one of .pt, .pth, .safetensors"),
        (["run", "nowhere/x.pt"], "nowhere/x.pt: the directory "),
        (["run", "x.pt", "--only", "modle"], "Did you mean 'model'?"),
        (["run", "x.safetensors", "--only", "names"], "'names' has no tensors. Write a .pt instead of a .safetensors."),
        (["run", "x.pt"], "torch.load(weights_only=True) rejects this export"),
        (["none", "x.pt"], "There is no checkpoint in"),
        (["run", "x.pt", "--dtype", "float16"], "--dtype and --max-shard-size require an output file OUT.safet"),
        (["run", "x.safetensors", "--dtype", "int8"], "argument --dtype: invalid choice"),
        (["run", "x.safetensors", "--max-shard-size", "0"], "must be above 0, for example 5GB"),
        (["run", "x.safetensors", "--max-shard-size", "5 apples"], "no valid unit of bytes"),
        (["plain", "x.pt", "--only", "modle"], "Did you mean 'model'?"),
        (["old", "x.pt"], "has no index.json"),
    ],
)
def test_what_gives_no_file_is_refused(
    arguments: list[str], message: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", {"model": torch.nn.Linear(2, 2), "names": frozenset("ab")})
    dcp.save({"model": torch.ones(2)}, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    older = save(tmp_path / "old", {"x": 1}) / "step-00000001"
    (older / "index.json").unlink()  # of a version that wrote none
    manifest = Manifest.loads((older / "manifest.json").read_text())
    del manifest.files["index.json"]
    (older / "manifest.json").write_text(manifest.dumps())
    shown = command("convert", *arguments, code=2)
    assert message in shown.err
    assert shown.out == ""
    assert not list(tmp_path.glob("*x.*"))


def test_names_and_types_in_a_file_cannot_control_the_terminal(tmp_path: Path, command: Command) -> None:
    root = save(tmp_path / "run", {"\x1b[2Jx": torch.ones(2), "n\x1b[2J": {"a\n": 3}})
    for name in ("x.pt", "x.safetensors"):
        shown = command("convert", root, tmp_path / name)
        assert "\x1b" not in shown.out + shown.err
        assert r"'\x1b[2Jx'" in shown.out


# -- safetensors in several files, with other dtypes and names


def index_of(out: Path) -> Any:
    return json.loads(Path(f"{out}.index.json").read_text())


def test_a_large_export_is_several_files_with_an_index(tmp_path: Path, command: Command) -> None:
    state = {f"x{i}": torch.arange(250, dtype=torch.float32) + i for i in range(5)}
    state["wide"] = torch.arange(2000)
    state["n"] = 3
    out = tmp_path / "model.safetensors"
    shown = command("convert", save(tmp_path / "run", state), out, "--max-shard-size", "2KB", "--json").json
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert [Path(each).name for each in shown["files"]] == [*names, "model.safetensors.index.json"]
    assert shown["file"] == shown["files"][-1]
    assert shown["bytes"] == sum(Path(each).stat().st_size for each in shown["files"])
    assert not out.exists()
    index = index_of(out)
    assert index["metadata"] == {"total_size": 5 * 1000 + 16000}
    divided = [load_file(tmp_path / name) for name in names]
    assert {name: file for file, each in zip(names, divided, strict=True) for name in each} == index["weight_map"]
    assert [len(each) for each in divided] == [1, 2, 2, 1]  # the large one, which comes first, has a file of its own
    expected = {name: x for name, x in state.items() if name != "n"}
    assert bits(divided[0] | divided[1] | divided[2] | divided[3]) == bits(expected)


def test_several_files_replace_one_and_others_as_a_whole(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = save(tmp_path / "run", {f"x{i}": torch.full((50,), i) for i in range(4)}), tmp_path / "m.safetensors"
    kept = tmp_path / "m-1-of-2.safetensors"
    kept.write_text("mine")
    several = {f"m-0000{i}-of-00002.safetensors" for i in (1, 2)} | {"m.safetensors.index.json"}

    def made(*arguments: str, code: int = 0) -> set[str]:
        shown = command("convert", root, out, *arguments, code=code).err
        assert ("already exists. Pass --force to replace it" in shown) == bool(code)
        return {path.name for path in tmp_path.iterdir()} - {"run", kept.name}

    assert made() == {"m.safetensors"}
    assert made("--max-shard-size", "800", code=2) == {"m.safetensors"}
    assert made("--max-shard-size", "800", "--force") == several
    assert made("--max-shard-size", "800", code=2) == made(code=2) == several
    assert made("--force") == {"m.safetensors"}
    assert len(made("--max-shard-size", "400", "--force")) == 5
    assert made("--max-shard-size", "800", "--force") == several
    with monkeypatch.context() as broken:  # in the middle of the renames: no index says that it is complete
        broken.setattr(Path, "replace", interrupted)
        command("convert", root, out, "--max-shard-size", "800", "--force", code=130)
    assert [path for path in tmp_path.iterdir() if "index" in path.name or path.suffix == ".tmp"] == []
    assert made("--max-shard-size", "1MB", "--force") == {"m.safetensors"}
    assert kept.read_text() == "mine"


def test_a_dtype_is_that_of_floating_point_tensors_alone(tmp_path: Path, command: Command) -> None:
    model = network().double()
    state = {"model": model, "count": torch.arange(3), "small": torch.ones(2).to(torch.float8_e5m2)}
    out = tmp_path / "x.safetensors"
    command("convert", save(tmp_path / "run", state), out, "--dtype", "bfloat16")
    found = load_file(out)
    floats = {f"model.{name}": x for name, x in model.state_dict().items() if x.is_floating_point()}
    assert bits({name: found[name] for name in floats}) == bits({name: x.bfloat16() for name, x in floats.items()})
    others = {name: x.dtype for name, x in found.items() if name not in floats}
    integer = torch.int64
    assert others == {"count": integer, "small": torch.float8_e5m2, "model.1.num_batches_tracked": integer}


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path, command: Command) -> None:
    state = {"x": torch.tensor([1.0, torch.inf]), "y": torch.tensor([1e6])}
    root, out = save(tmp_path / "run", state), tmp_path / "x.safetensors"
    wrong = command("convert", root, out, "--dtype", "float16", code=2).err
    assert "'y' has values that are too large for torch.float16; use another dtype" in wrong
    assert not out.exists()
    command("convert", root, out, "--dtype", "float16", "--only", "x")  # what is infinite stays so


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory by way of Linux")
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    small, large = ({str(i): torch.ones(n) for i in range(12)} for n in (5, 1 << 22))
    roots = [str(save(tmp_path / name, state)) for name, state in (("small", small), ("large", large))]
    peaks = run_ranks(peak_of_export, nproc=1, args=(roots, str(tmp_path / "x.safetensors")))
    assert peaks[0] < 4 * large["0"].nbytes


def peak_of_export(rank: int, world_size: int, roots: list[str], out: str) -> int:
    """The memory that converting the last one takes, in bytes."""
    rest = ["--dtype", "bfloat16", "--max-shard-size", "20MB"]
    for root in roots:  # the first time it imports what it needs
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        assert main(["convert", root, out, *rest, "--force"]) == 0
    return memory("VmHWM") - before


def test_transformers_takes_the_files(tmp_path: Path, command: Command) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    root = save(tmp_path / "run", {"net": model.state_dict(), "step": 1})
    config.save_pretrained(tmp_path / "hf")
    out = tmp_path / "hf" / "model.safetensors"
    command("convert", root, out, "--only", "net", "--max-shard-size", "20KB", "--dtype", "bfloat16")
    assert len(set(index_of(out)["weight_map"].values())) > 2
    found, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(report.values()), report
    assert bits(dict(found.state_dict())) == bits({name: x.bfloat16() for name, x in model.state_dict().items()})
    command("convert", root, out, "--only", "net", "--force", "--max-shard-size", "5GB")  # in one, and with all bits
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(whole(tokens).logits, model(tokens).logits)


def test_a_directory_of_plain_torch_is_converted(tmp_path: Path, command: Command) -> None:
    plain, out = tmp_path / "plain", tmp_path / "x.pt"
    state = {"model": network().state_dict(), "values": {"lr": 0.1, "list": [torch.ones(2), {"a": (1, "b")}]}}
    dcp.save(state, checkpoint_id=str(plain), no_dist=True)
    command("convert", plain, out)
    found = torch.load(out, weights_only=True)
    assert bits(found["model"]) == bits(dict(state["model"]))
    ones, others = found["values"]["list"]
    assert (found["values"]["lr"], ones.tolist(), others) == (0.1, [1, 1], {"a": (1, "b")})
    assert "Entries: model\n" in command("convert", plain, out, "--only", "model", "--force").out
    assert bits(torch.load(out, weights_only=True)) == bits(found["model"])
    shown = command("convert", plain, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() > {f"model.{name}" for name in found["model"]}
    assert "Left out, because these values are not tensors: values.list.1.a, values.lr\n" in shown.out


@pytest.mark.parametrize(
    ("what", "message"), [("value", "'y' was not read"), ("mesh", "'y' was not read"), ("cut", "truncated: 100 of ")]
)
def test_plain_torch_runs_nothing_damage_is_named(what: str, message: str, tmp_path: Path, command: Command) -> None:
    plain = tmp_path / "plain"
    values = {"value": Fires(), "mesh": MakesMesh()}
    dcp.save({"x": torch.ones(9), "y": values.get(what, 1)}, checkpoint_id=plain, no_dist=True)
    if what == "cut":
        (data,) = plain.glob("*.distcp")
        os.truncate(data, 100)
    assert message in command("convert", plain, tmp_path / "x.pt", code=2).err
    assert not (tmp_path / "x.pt").exists()


class MakesMesh:
    """Becomes a device mesh, which initializes the process group."""

    def __reduce__(self) -> Any:
        return DeviceMesh, ("cpu", [0])


class Fires:
    """Becomes a call when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was run",)
