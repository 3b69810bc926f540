"""What every storage promises, to a checkpointer and to plain torch."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hydra import compose, initialize_config_dir
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_flatten

import stagereg
import stagereg.checkpoint.format.manifest as manifest
import stagereg.checkpoint.store.directory as local
from stagereg import registry
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.protocol import name_of, named
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.store.local_files import mark_file
from stagereg.errors import CheckpointError
from stagereg.registry import build
from stagereg.testing import run_ranks

from ...support.faulty_storage import FaultyStorage
from ...support.format_reader import FormatReader
from ...support.states import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STORAGES = ("dcp", *["safetensors"] * has("interop"))
each = pytest.mark.parametrize("storage", STORAGES)


def checkpointer(root: Path, storage: str, stager: str = "pinned_cached", **more: Any) -> Checkpointer:
    built = stagereg.build("stager", stager), stagereg.build("storage", storage)
    return Checkpointer(str(root), stager=built[0], storage=built[1], **more)


def values() -> dict[str, Any]:
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "int": 3,
        "text": "ü",
        "nested": {1: {"a": (1, 2.5)}, "list": [torch.ones(2), {}, []]},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({30: 1}),
        "pair": (torch.ones(2), 1, b"x"),
        "other": [None, 2j, torch.float32, torch.Size([2]), {1, 2}, b"x" * 100_000],
        "scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]).conj(),
        "bfloat16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "float8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "bools": torch.tensor([True, False]),
        "large": torch.arange(2_000_000, dtype=torch.int32),
        "column": torch.arange(60_000.0).reshape(-1, 3)[:, 1],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "tied": tied,
        "tie": tied,
        "turned": tied.t(),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(200, 200).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(200)
        self.head = torch.nn.Linear(200, 200)
        self.tied = torch.nn.Linear(200, 200, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.head(self.norm(self.base(x))))


def objects() -> dict[str, Any]:
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.randn(8, 200)).square().mean().backward()
    for name in ("optimizer", "schedule"):
        state[name].step()
    state["int"] += 1
    state["large"] += 1


def plain(state: dict[str, Any]) -> Any:
    """Something to compare with: the structure, and type and bytes of each leaf."""
    state = {name: x.state_dict() if hasattr(x, "state_dict") else x for name, x in state.items()}
    leaves, structure = tree_flatten(state)
    return structure, [form(x) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]


def form(x: torch.Tensor) -> Any:
    return x.dtype, x.shape, x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("storage", [*STORAGES, pytest.param("torch_dcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stager", KINDS)
def test_a_checkpoint_is_of_its_step_while_training_goes_on(tmp_path: Path, storage: str, stager: str) -> None:
    state, saved = {**values(), **objects()}, {}
    train(state)
    with checkpointer(tmp_path, storage, stager, keep=4) as saving:
        for step in range(4):
            saved[step] = plain(state)
            saving.save(step, state)
            train(state)
    for path in tmp_path.glob("step-*"):
        marks = manifest.Manifest.loads((path / manifest.MANIFEST).read_text()).files
        assert marks == {name: mark_file(path / name) for name in os.listdir(path) if name != manifest.MANIFEST}
    for step, expected in saved.items():  # by any other storage
        state = {**dict.fromkeys(values()), **objects()}
        with Checkpointer(str(tmp_path), resume=str(tmp_path / f"step-{step:08d}")) as restoring:
            assert restoring.restore(state) == step
        assert plain(state) == expected, step


@each
def test_files_are_flushed_before_the_commit_and_not_read_for_it(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    real, publish, mark = os.fsync, CheckpointStore.publish, local.mark_file

    def fsync(descriptor: int) -> None:
        real(descriptor)
        flushed.add(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).removesuffix(".tmp"))

    def check(store: CheckpointStore, written: str, *more: Any) -> str:
        assert set(os.listdir(written)) <= flushed
        return publish(store, written, *more)

    def mark_file(path: str, part: range) -> Any:
        if os.path.basename(path) not in ("index.json", ".metadata"):
            pytest.fail(f"{path} was read")
        return mark(path, part)

    monkeypatch.setattr(local, "mark_file", mark_file)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(CheckpointStore, "publish", check)
    with checkpointer(tmp_path, storage) as saving:
        saving.save(1, values())


@each
def test_torch_saves_with_it_again_and_again_in_any_process(tmp_path: Path, storage: str) -> None:
    writer = stagereg.build("storage", storage, path=tmp_path / "0")
    for step, keywords in (
        (0, {}),
        (1, {"checkpoint_id": tmp_path / "1"}),
        (2, {"checkpoint_id": str(tmp_path / "2")}),
    ):
        writer = pickle.loads(pickle.dumps(writer))
        dcp.save({"x": torch.full((5,), step), "n": step}, storage_writer=writer, no_dist=True, **keywords)
        writer = pickle.loads(pickle.dumps(writer))
        assert writer.marks == {path.name: mark_file(path) for path in (tmp_path / str(step)).iterdir()}
    for step in range(3):
        state = {"x": torch.zeros(5, dtype=torch.int64), "n": -1}
        dcp.load(state, storage_reader=writer.reader(tmp_path / str(step)), no_dist=True)
        assert (state["x"].tolist(), state["n"]) == ([step] * 5, step)


class Breaks(DefaultSavePlanner):
    """Has the first entries and not the last one."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn in ("x", "z"):
            raise ZeroDivisionError
        return super().resolve_data(write_item)


@each
def test_a_file_that_was_not_fully_written_has_no_mark(tmp_path: Path, storage: str) -> None:
    writer = stagereg.build("storage", storage, path=tmp_path)
    state = {"n": 1, "w": torch.ones(5), "x": torch.ones(5), "z": 2}
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.marks
    with pytest.raises(dcp.api.CheckpointException, match="ZeroDivisionError"):
        dcp.save(state, storage_writer=writer, planner=Breaks(), no_dist=True)
    assert writer.marks == {}


@each
def test_a_storage_without_a_directory_is_reported(storage: str) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=r"has no directory. Construct it with path="):
        dcp.save({"x": 1}, storage_writer=stagereg.build("storage", storage), no_dist=True)


def save_shards_everywhere(rank: int, world_size: int, root: str) -> dict[str, list[str]]:
    return {storage: save_shards(rank, world_size, f"{root}/{storage}", storage) for storage in STORAGES}


def save_shards(rank: int, world_size: int, root: str, storage: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.arange(3500.0).view(50, 70)

    placed = {name: distribute_tensor(full.clone(), mesh, [place]) for name, place in PLACEMENTS.items()}
    uneven = distribute_tensor(full[:1].clone(), mesh, [Shard(0)])  # nothing on the last rank
    with checkpointer(Path(root), storage) as saving:
        saving.save(1, {"sharded": placed, "uneven": uneven, f"own.rank{rank}": torch.ones(2)})
    dist.barrier()
    return sorted(os.listdir(os.path.join(root, "latest")))


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}


def test_other_programs_read_the_shards_of_two_ranks(tmp_path: Path) -> None:
    listings, others = run_ranks(save_shards_everywhere, nproc=2, args=(str(tmp_path),))
    assert listings == others
    for storage, names in listings.items():
        assert {".metadata", "__0_0.distcp", "index.json", "manifest.json"} <= set(names)
        if storage == "dcp":
            assert "__1_0.distcp" in names
        latest = tmp_path / storage / "latest"
        written = manifest.Manifest.loads((latest / manifest.MANIFEST).read_text())
        assert set(written.files) == set(names) - {manifest.MANIFEST}
        full = torch.arange(3500.0).view(50, 70)
        # Read by torch's own readers, and by another program.
        reader = dcp.FileSystemReader if storage == "dcp" else HuggingFaceStorageReader
        template = {f"sharded.{name}": torch.zeros(50, 70) for name in PLACEMENTS}
        dcp.load(template, storage_reader=reader(str(latest)), no_dist=True)
        found = FormatReader(latest).entry("sharded")
        for name in PLACEMENTS:
            assert torch.equal(template[f"sharded.{name}"], full), storage
            assert found[name].tolist() == full.tolist(), storage


class Foreign(FileSystemWriter):
    """A third party's storage: torch's protocol and a reader, and no optional member."""

    def __init__(self) -> None:
        super().__init__("")

    def reader(self, path: Any) -> FileSystemReader:
        return FileSystemReader(path)


def test_an_unregistered_storage_without_marks_reads_its_own(tmp_path: Path) -> None:
    state = {"x": torch.arange(3.0), "pair": (torch.ones(2), 1), "values": {1: "a", "nothing": {}}}
    found = {"x": torch.zeros(3), "pair": None, "values": None}
    tensor = found["x"]
    with Checkpointer(str(tmp_path), storage=Foreign()) as saving:
        saving.save(1, state)
        saving.wait()
        assert saving.restore(found) == 1
    assert found["x"] is tensor
    assert plain(found) == plain(state)
    path = tmp_path / "step-00000001"
    files = manifest.Manifest.loads((path / manifest.MANIFEST).read_text()).files
    assert files == {name: mark_file(path / name) for name in (".metadata", "__0_0.distcp", "index.json")}
    with Checkpointer(str(tmp_path)) as other, pytest.raises(CheckpointError, match=r"Foreign.*cannot be built"):
        other.restore({"x": 0})


def test_storage_is_a_group_with_dcp_as_its_default(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("defaults: [stagereg, _self_]\n")
    chosen = []
    for overrides in ([], *([f"storage={name}"] for name in STORAGES), ["storage=torch_dcp"], ["storage.direct=never"]):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            config = compose("app", [*overrides, f"checkpoint.dir={tmp_path}"])
        with stagereg.instantiate(config.checkpoint) as saving:
            saving.save(1, {"x": 1})
        chosen.append(json.loads((tmp_path / "latest" / manifest.MANIFEST).read_text())["storage"])
    assert chosen == ["dcp", *STORAGES, "torch_dcp", "dcp"]


@pytest.fixture
def claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another package announces a storage ``dcp``."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stagereg.plugins]\nstorage.dcp = theirs:Storage\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.REGISTRY._path = None
    yield
    monkeypatch.undo()
    registry.REGISTRY._path = None


@pytest.mark.usefixtures("claimed")
def test_a_storage_keeps_its_name_when_another_package_claims_it(recwarn: pytest.WarningsRecorder) -> None:
    assert "dcp@hydra-stagereg" in stagereg.names("storage")
    own = stagereg.build("storage", "torch_dcp")
    assert name_of(DcpStorage()) == "dcp"
    assert named("torch_dcp", own) is own
    assert type(named("dcp", own)) is DcpStorage
    assert not recwarn


def test_an_unknown_storage_is_reported_with_the_list() -> None:
    assert name_of(FaultyStorage(saves=())) == "dcp", "it wraps that one"
    with pytest.raises(CheckpointError, match=r"(?s)storage 'gone', which cannot be built.*Available: dcp, "):
        named("gone", DcpStorage())


def listed(value: Any) -> Any:
    """A value with each tensor, of torch or numpy, replaced by its elements."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list) else value


@each
def test_another_program_reads_what_was_saved(tmp_path: Path, storage: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    tied = torch.arange(6.0).reshape(2, 3)
    values = {1: (2, 3), "text": "ü\ud800", "inf": math.inf, "list": [1, None], "count": Counter("aab"), "bytes": b"x"}
    values["numpy"] = numpy.float32(0.1)
    state = {
        "model": model,
        "optimizer": optimizer,
        "values": values,
        "tensors": [tied, tied, tied.t(), tied[:, 1], torch.empty(0, 3), torch.tensor(True), torch.tensor(7)],
    }
    with Checkpointer(str(tmp_path), storage=build("storage", storage)) as checkpointer:
        checkpointer.save(3, state)
    reader = FormatReader(tmp_path / "step-00000003")
    assert reader.entry("stagereg.step") == reader.manifest["step"] == 3
    assert reader.entry("stagereg.rng.rank0")["torch"].tolist() == torch.get_rng_state().tolist()
    for name, value in state.items():
        saved = value.state_dict() if hasattr(value, "state_dict") else value
        if name == "optimizer":
            names = [of for of, _ in model.named_parameters()]
            [group] = saved["param_groups"]
            states = {of: saved["state"][number] for number, of in enumerate(names)}
            saved = {"state": states, "param_groups": {names[0]: group | {"params": names}}}
        assert listed(reader.entry(name)) == listed(dict(saved) if isinstance(saved, dict) else saved), name
