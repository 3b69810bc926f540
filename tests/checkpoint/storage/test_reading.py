"""What was saved is read back, with its types, into the tensors that are there where that is safe; else it is named."""

from __future__ import annotations

import collections
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.format.index as index
import stagereg.checkpoint.state.rng as rng
import stagereg.checkpoint.storage.reading as reading
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.format.encoding import Leaf, decode, encode
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.storage.reading import CheckpointFiles, Transfer
from stagereg.errors import CheckpointError
from stagereg.registry import build
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

from ...support.examples import examples


def saved(root: Path, state: dict[str, Any]) -> Checkpointer:
    checkpointer = Checkpointer(str(root), stager=BlockingAsyncStager())
    checkpointer.save(1, state)
    checkpointer.wait()
    return checkpointer


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_of_any_shape_and_order_make_the_tensor(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=3))
    whole = torch.arange(torch.Size(sizes).numel(), dtype=torch.int32).reshape(sizes)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in sizes]
    content, chunks = bytearray(), []
    for box in data.draw(st.permutations(list(itertools.product(*map(itertools.pairwise, cuts))))):
        part = whole[tuple(slice(begin, end) for begin, end in box)]
        order = data.draw(st.permutations(range(part.ndim)))
        packed = part.permute(order).contiguous()
        strides = packed.permute([order.index(i) for i in range(part.ndim)]).stride()
        content += bytes(data.draw(st.integers(0, 3)))
        place = [[begin for begin, _ in box], list(part.shape), list(strides)]
        chunks.append([0, len(content), part.nbytes, *place])
        content += packed.numpy().tobytes()
    root = tmp_path_factory.mktemp("chunks")
    index = {"format": 1, "files": ["x"], "tensors": {"x": ["int32", sizes, chunks]}, "objects": {}, "state": {"x": {}}}
    files = {"x": bytes(content), INDEX: json.dumps(index).encode()}
    for name, text in files.items():
        (root / name).write_bytes(text)
    marks = {name: FileDigest(len(text), crc32(text)) for name, text in files.items()}
    with CheckpointFiles.of(Checkpoint(str(root), Manifest(1, 1, 1, marks)), build("storage", "dcp")) as files_read:
        leaf = files_read.structure("x")
        files_read.read([leaf])
        # What one of other ranks has of it.
        start = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
        sub = whole[tuple(slice(at, data.draw(st.integers(at + 1, n))) for at, n in zip(start, sizes, strict=True))]
        part, entry = torch.empty_like(sub), files_read.index.find("x")
        assert entry is not None
        transfer = Transfer(files_read.file)
        transfer.add_tensor(part, start, entry, "x")
        transfer.run()
    assert isinstance(leaf, Leaf)
    assert torch.equal(leaf.value, whole)
    assert torch.equal(part, sub)


def test_state_goes_into_the_memory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_BYTES", 8)  # so that most tensors have several

    def run(**more: Any) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        return {
            "model": model,
            "optimizer": optimizer,
            "x": [torch.randn(5), {"y": torch.randn(2, requires_grad=True), **more}],
        }

    def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
        inner = [part for each in state["optimizer"].state.values() for part in each.values()]
        return [*state["model"].state_dict().values(), *inner, state["x"][0], state["x"][1]["y"]]

    before, after = run(new=1), run(stale=1)
    containers = after["x"], after["x"][1]
    addresses = [x.data_ptr() for x in tensors(after)]
    versions = [x._version for x in tensors(after)]
    with saved(tmp_path, before) as checkpointer:
        checkpointer.restore(after)
    assert [x.data_ptr() for x in tensors(after)] == addresses
    assert after["x"] is containers[0]
    assert after["x"][1] is containers[1]
    assert list(containers[1]) == ["y", "new"]
    assert all(map(torch.equal, tensors(after), tensors(before)))
    assert all(x._version > version for x, version in zip(tensors(after), versions, strict=True))


class Tolerant(torch.nn.Linear):
    """Loads in a way of its own."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({key: state_dict[key] for key in ("weight", "bias")}, *args, **kwargs)


def restore_into_different_kinds(rank: int, world_size: int, root: str) -> None:
    """What was saved has one parameter too many for a plain module, not for one that loads in a way of its own."""
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    model.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        checkpointer.save(1, {"model": model})
    model = Tolerant(2, 2) if rank == 0 else torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with Checkpointer(root, stager=BlockingAsyncStager()) as checkpointer:
        with pytest.raises(
            CheckpointError, match=r"rank 1: 'model' does not accept .* 1 in the checkpoint but not here"
        ):
            checkpointer.restore({"model": model})
        assert torch.equal(model.weight, before)
        model = Tolerant(2, 2)
        assert checkpointer.restore({"model": model}) == 1
        assert model.weight.min() == 1


def test_one_rank_that_takes_less_keeps_all_from_restoring(tmp_path: Path) -> None:
    run_ranks(restore_into_different_kinds, nproc=2, args=(str(tmp_path),))


class Counts:
    """Begins anew before it takes its state."""

    def __init__(self, total: float) -> None:
        self.total = torch.full((3,), total)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total.zero_()
        self.total += state["total"]


class Halved(torch.nn.Linear):
    """Changes what it is given."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.weight.data.zero_()
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_objects_that_do_more_than_copy_get_tensors_of_their_own(tmp_path: Path) -> None:
    halved = Halved(2, 2)
    hooked = torch.nn.Linear(2, 2)
    saved_weight = halved.weight.detach().clone()
    with saved(tmp_path, {"counts": Counts(7), "halved": halved, "hooked": hooked}) as checkpointer:
        counts, other, third = Counts(1), Halved(2, 2), torch.nn.Linear(2, 2)
        third.register_load_state_dict_pre_hook(lambda module, state, *_: module.weight.data.zero_())
        checkpointer.restore({"counts": counts, "halved": other, "hooked": third})
    assert counts.total.tolist() == [7, 7, 7]
    assert torch.equal(other.weight, saved_weight / 2)
    assert torch.equal(third.weight, hooked.weight)


def test_other_shapes_dtypes_and_strides_are_taken_as_before(tmp_path: Path) -> None:
    with saved(
        tmp_path, {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2), "z": torch.ones(3)}
    ) as checkpointer:
        turned = torch.zeros(3, 2).t()
        state: dict[str, Any] = {"x": turned, "y": torch.zeros(2, dtype=torch.float64), "z": torch.zeros(5)}
        checkpointer.restore(state)
    assert state["x"] is turned
    assert turned.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (state["y"].dtype, state["z"].tolist()) == (torch.float32, [1, 1, 1])


LAZY = {
    "conjugate": lambda: torch.zeros(4, 3, dtype=torch.cfloat).conj(),
    "negative": lambda: torch._neg_view(torch.zeros(4, 3)),
    "both": lambda: torch._neg_view(torch.zeros(4, 3, dtype=torch.cfloat).conj()),
    "imaginary part": lambda: torch.zeros(4, 3, dtype=torch.cfloat).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.cfloat).conj()),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("storage", ["dcp", "safetensors", "torch_dcp"])
def test_tensors_that_torch_conjugates_or_negates_lazily_get_the_saved_values(
    kind: str, storage: str, tmp_path: Path
) -> None:
    x = LAZY[kind]()
    values = torch.randn(4, 3, dtype=x.dtype)
    with torch.no_grad():
        x.copy_(values)
    module = torch.nn.Module()
    module.register_parameter("x", torch.nn.Parameter(x))
    module.register_buffer("y", x.clone())
    with Checkpointer(str(tmp_path), storage=build("storage", storage)) as checkpointer:
        checkpointer.save(1, {"plain": x, "module": module})
        with torch.no_grad():
            x.zero_()
            module.y = LAZY[kind]().detach()
        state = {"plain": LAZY[kind](), "module": module}
        checkpointer.restore(state)
    for found in (state["plain"], module.x, module.y):
        assert torch.equal(found, values)


@pytest.mark.parametrize("kind", LAZY)
def test_a_shard_that_torch_conjugates_or_negates_lazily_gets_its_rows(kind: str, tmp_path: Path) -> None:
    x = LAZY[kind]().detach()
    values = torch.randn(6, 3, dtype=x.dtype)
    with saved(tmp_path, {"x": values}) as checkpointer:
        checkpoint = checkpointer._store.latest()
        assert checkpoint is not None
        with CheckpointFiles.of(checkpoint, build("storage", "dcp")) as files:
            transfer = Transfer(files.file)
            transfer.add_tensor(x, (1, 0), files.structure("x").stored, "x")
            transfer.run()
    assert torch.equal(x, values[1:5])


def test_a_file_that_ends_too_early_is_an_error_that_names_it(tmp_path: Path) -> None:
    with saved(tmp_path, {"x": torch.ones(100_000)}) as checkpointer:
        checkpointer.restore_options = Restore(verify="fast")
        real = CheckpointFiles.open_for

        def cut(files: CheckpointFiles, leaves: Any) -> Any:
            found = real(files, leaves)
            os.truncate(tmp_path / "step-00000001" / "__0_0.distcp", 100_000)  # behind the random numbers
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointFiles, "open_for", cut)
            with pytest.raises(
                CheckpointError, match=r"__0_0.distcp ends at byte.* The objects have changed in part\. "
            ):
                checkpointer.restore({"x": torch.zeros(100_000)})


def test_a_random_state_that_is_none_is_refused_before_any_object_changes(tmp_path: Path) -> None:
    x, text = torch.zeros(3), "its states of the random number generators are invalid"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rng, "_json", lambda state: b"[3, [1], null]".ljust(8192))
        checkpointer = saved(tmp_path, {"x": torch.ones(3)})
    with checkpointer:
        assert text in refused(checkpointer, {"x": x})
    assert x.tolist() == [0, 0, 0]


def refused(checkpointer: Checkpointer, state: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as seen:
        checkpointer.restore(state)
    return str(seen.value)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
def test_a_meta_tensor_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    trained = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(trained.parameters())
    trained(torch.ones(2)).sum().backward()
    adam.step()
    with saved(tmp_path, {"model": trained, "adam": adam, "x": [torch.ones(2)]}) as c:
        model = torch.nn.Linear(2, 2, device="meta")
        assert "'model.weight' is on the meta device" in refused(c, {"model": model})
        adam = torch.optim.Adam(model.parameters())
        assert "'adam.state.0.exp_avg' is on the meta device" in refused(c, {"adam": adam})
        assert "'x.0' is on the meta device" in refused(c, {"x": [torch.ones(2, device="meta")]})
        model.to_empty(device="cpu")
        assert c.restore({"model": model}) == 1
        assert torch.equal(model.weight, trained.weight)


def test_a_model_may_replace_its_meta_tensors_in_load_state_dict(tmp_path: Path) -> None:
    class Assigned(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
            return super().load_state_dict(state_dict, strict, assign)

    trained, model = torch.nn.Linear(2, 2), Assigned(2, 2, device="meta")
    with saved(tmp_path, {"model": trained}) as checkpointer:
        assert checkpointer.restore({"model": model}) == 1
    assert torch.equal(model.weight, trained.weight)


def test_a_missing_name_is_reported_with_the_saved_names(tmp_path: Path) -> None:
    with saved(tmp_path / "own", {"loader.rank0": {"at": 3}}) as checkpointer:
        assert "was saved per rank: restore it into per_rank(loader)" in refused(checkpointer, {"loader": {}})
        assert "Did you mean 'loader.rank0'?" in refused(checkpointer, {"loader.rank1": {}})
    with saved(tmp_path / "none", {}) as checkpointer:
        assert "The checkpoint has no 'x', only an empty state" in refused(checkpointer, {"x": 1})
    with saved(tmp_path / "many", {f"part{number:03}": number for number in range(500)}) as checkpointer:
        assert "part009, and 490 more" in refused(checkpointer, {"x": 1})


flat = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
keys = st.recursive(flat, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)
plain = st.recursive(
    flat | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(collections.Counter)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """A value with the types of all its parts, in which equal floats have equal bits."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(typed, value)))
    return type(value), repr(value)


@settings(max_examples=examples(300), deadline=None)
@given(plain)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    encoded = encode(value, "x")
    assert encoded.objects == []
    assert typed(decode(json.loads(encoded.text), "x")) == typed(value)


def test_numbers_of_numpy_keep_their_types() -> None:
    numpy = pytest.importorskip("numpy")
    numbers = [numpy.dtype(name).type(3) for name in "?bBhHiIlLefd"]
    value = {"best": numbers, "pair": (numpy.float32(0.1), 1), "nan": numpy.float16("nan"), numpy.int8(2): "key"}
    tree = json.loads(encode(value, "x").text)
    assert repr(decode(tree, "x")) == repr(value)
    for dtype, number in (("object", 1), ("int8", 300), ("float32", "1"), ("datetime64", 1)):
        with pytest.raises(CheckpointError, match=r"the structure of .* is invalid"):
            decode({"type": f"numpy.{dtype}", "value": number}, "x")
    for other in (numpy.longdouble(3), numpy.timedelta64(1, "ns"), numpy.ones(2)):
        with pytest.raises(CheckpointError, match="would not load back"):
            encode({"x": other}, "x")


def test_versions_of_modules_are_kept() -> None:
    ordered = collections.OrderedDict({"y": {"z": [1, {}]}})
    ordered._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    found = decode(json.loads(encode({"o": ordered}, "x").text), "x")
    assert found["o"]._metadata == ordered._metadata
    with pytest.raises(CheckpointError, match=r"a collections.defaultdict; save dict\(x\) instead"):
        encode(collections.defaultdict(list), "x")


def test_more_plain_values_than_are_read_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_BYTES", 100_000)
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"small": 1, "tensor": torch.ones(100_000)})
        checkpointer.save(2, {"small": 1, "large": "x" * 100_000})
        with pytest.raises(CheckpointError, match=r"100,000 are read back.* is 'large', with 100,002 bytes"):
            checkpointer.wait()
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]
