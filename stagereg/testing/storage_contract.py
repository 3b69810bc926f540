"""The contract of a storage, which defines the file format of checkpoints: a class of tests to inherit.

The tests save and restore small checkpoints with ``Checkpointer``, on one rank and on two, and compare every byte. They
do not test speed, or whether the storage can read files of its earlier versions.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import pickle
import resource
import shutil
import signal
import tempfile
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.index import INDEX
from stagereg.checkpoint.format.manifest import MANIFEST, step_name
from stagereg.checkpoint.options import Failure
from stagereg.checkpoint.storage.digests import digest
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError
from stagereg.testing.contract import Contract

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
_RARE = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex128)
_PLACES = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}
_LARGE = 1_200_000  # number of float32 elements; more bytes than any write buffer
_MOST_BYTES = 1 << 16  # maximum file size that simulates a full disk
_FAILURE = Failure(timeout=datetime.timedelta(seconds=15))  # less than the limit of a test, so that hangs are reported


class StorageContract(Contract):
    """Tests of a storage. Inherit this class, and override :meth:`make`.

    Define the subclass at module level, so that the ranks of a test can import it.
    """

    def make(self) -> Storage:
        """Return a new storage. Called at least once per test, also in other processes."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def test_every_value(self) -> None:
        """Tensors are restored bit for bit, with dtype and shape, including empty and large tensors and slices."""
        self._round_trip(_tensors())

    def test_rare_dtypes(self) -> None:
        """A tensor of a rare dtype is restored bit for bit, or the save raises an error that names the tensor."""
        for number, dtype in enumerate(_RARE):
            name = f"value{number}"
            try:
                self._round_trip({name: _random(dtype, 24)})
            except CheckpointError as error:
                if name not in str(error):
                    self.broken(f"its refusal of {dtype} does not name {name!r}: {error}")

    def test_ties(self) -> None:
        """Tensors that share memory, such as tied weights, transposed views and slices, are restored correctly."""
        x = torch.arange(35.0, dtype=torch.float32, device="cpu").reshape(5, 7)
        self._round_trip({"a": x, "tied": x, "turned": x.t(), "row": x[1], "column": x[:, 1], "slice": x[1:3, 2:]})

    def test_objects(self) -> None:
        """Containers, numbers, strings, and tuples that contain tensors are restored unchanged."""
        self._round_trip(_objects())

    def test_save_after_save(self) -> None:
        """One storage can write several checkpoints in sequence, even if keys, shapes and dtypes change."""
        states: list[dict[str, Any]] = [{"x": _ones(5), "n": (torch.zeros(1, dtype=torch.float32, device="cpu"), 1)}]
        states += [
            {"x": torch.arange(300, dtype=torch.int64, device="cpu"), "y": _ones(2)},
            {"x": torch.full((5,), 2.0, dtype=torch.float32, device="cpu")},
            *({"x": torch.full((_LARGE,), step, dtype=torch.float32, device="cpu")} for step in (4.0, 5.0)),
        ]
        with _folder() as folder:
            self._save(folder, *states)
            for step, state in enumerate(states, 1):
                self._expect_restored(folder, state, step)

    def test_no_arguments(self) -> None:
        """A storage constructed without arguments can read all files, because a checkpoint contains no arguments."""
        kind = type(self.make())
        try:
            built = kind()
        except TypeError as error:
            self.broken(f"{kind.__name__}() fails: {error}. Give each parameter a default")
        with _folder() as folder:
            self._save(folder, _tensors())
            self._expect_restored(folder, _tensors(), storage=built)

    def test_in_another_process(self) -> None:
        """Another process can restore a checkpoint, even if its directory was moved."""
        with _folder() as folder, _folder() as other:
            self._save(folder, {**_tensors(), **_objects()})
            shutil.copytree(f"{folder}/{step_name(1)}", f"{other}/{step_name(1)}")
            shutil.rmtree(folder)
            self._expect("in another process: ", self.on_ranks("", 1, _restore, type(self), other))

    def test_pickled(self) -> None:
        """A storage can be pickled before and after a save; after a save, the copy has the digests of its files."""
        state = {"x": torch.arange(5, dtype=torch.int64, device="cpu"), "n": 3}
        with _folder() as folder:
            storage = self._pickled(self.make())
            self._by_torch(save, dict(state), storage_writer=storage, checkpoint_id=f"{folder}/step")
            copy = self._pickled(storage)
            if isinstance(storage, Storage) and dict(copy.marks) != dict(storage.marks):
                self.broken("its unpickled copy has other digests")
            self._expect_loaded(copy, f"{folder}/step", state)

    def test_torch(self) -> None:
        """``torch.distributed.checkpoint`` saves with the storage and loads every value, not only tensors."""
        state = {**_tensors(), "n": 3, "text": "ü", "none": None, "list": [1, 2.5]}
        with _folder() as folder:
            self._by_torch(save, dict(state), storage_writer=self.make(), checkpoint_id=f"{folder}/step")
            self._expect_loaded(self.make(), f"{folder}/step", state)

    def test_two_ranks(self) -> None:
        """Two ranks can save and restore sharded tensors with uneven and empty shards, and per-rank values."""
        with _folder() as folder:
            self._expect("saved and restored on 2 ranks: ", self.on_ranks("", 2, _save_shards, type(self), folder))

    def test_another_world_size(self) -> None:
        """One rank can restore a checkpoint of two ranks, and two ranks can restore a checkpoint of one rank."""
        with _folder() as folder:
            self._expect("", self.on_ranks("", 2, _save_shards, type(self), folder, False))
            full = dict.fromkeys(_PLACES, _full()) | {"uneven": _full()[:1]}
            self._expect_restored(folder, {"sharded": full, "of.rank1": _ones(3)})
        with _folder() as folder:
            self._save(folder, {"sharded": full})
            self._expect("saved on 1 rank, restored on 2: ", self.on_ranks("", 2, _restore, type(self), folder, True))

    def test_corrupt_files(self) -> None:
        """The checksums detect each truncated, changed or missing file, and a restore from it raises an error."""
        with _folder() as folder:
            self._save(folder, _tensors())
            path = Path(folder, step_name(1))
            self._expect_verified(path, good=True, what="as it was saved")
            for file in (each for each in sorted(path.rglob("*")) if each.is_file()):
                if file.name in (MANIFEST, INDEX):  # written by the checkpointer, not by the storage
                    continue
                content = file.read_bytes()
                flipped = content[:-1] + bytes([content[-1] ^ 1]) if content else b"x"
                for what, changed in (("truncated", content[:-1]), ("changed", flipped), ("missing", None)):
                    file.write_bytes(changed) if changed is not None else file.unlink()
                    if changed != content:
                        self._expect_verified(path, good=False, what=f"with {file.relative_to(path)} {what}")
                    file.write_bytes(content)

    def test_full_disk(self) -> None:
        """If the disk is full, the save raises an error, and does not commit a checkpoint."""
        with _folder() as folder:
            self._expect("on a full disk, ", self.on_ranks("", 1, _fill_disk, type(self), folder))

    # -- helpers

    def _round_trip(self, state: dict[str, Any]) -> None:
        with _folder() as folder:
            self._save(folder, state)
            self._expect_restored(folder, state)

    def _save(self, folder: str, *states: dict[str, Any]) -> None:
        self.within(partial(_save, self.make(), folder, *states))

    def _expect_restored(self, path: str, state: dict[str, Any], step: int = 1, storage: Storage | None = None) -> None:
        found = self.within(partial(_restored, storage or self.make(), path, _blank(state), step))
        self._expect("", [difference(found, state)])

    def _expect_loaded(self, storage: Storage, path: str, state: Mapping[str, Any]) -> None:
        found = _blank(state)
        self._by_torch(load, found, storage_reader=storage.reader(path))
        self._expect("loaded by torch: ", [difference(found, state)])

    def _by_torch(self, do: Callable[..., object], state: dict[str, Any], **more: Any) -> None:
        try:
            with _quiet():
                self.within(partial(do, state, no_dist=True, **more))
        except CheckpointException as failed:  # a BaseException, so `except Exception` does not catch it
            error = next(iter(failed.failures.values()))[0]
            self.broken(f"torch.distributed.checkpoint.{do.__name__} fails: {type(error).__name__}: {error}")

    def _expect_verified(self, path: Path, good: bool, what: str) -> None:
        damages = open_store(str(path.parent)).look(str(path), content=True).damages
        if good != (not damages):
            self.broken(f"{what}, a checkpoint is {'corrupt: ' if damages else 'reported as valid'}{damages or ''}")
        if not good:
            with contextlib.suppress(CheckpointError):
                self.within(partial(_restored, self.make(), str(path.parent), _blank(_tensors()), 1))
                self.broken(f"{what}, a checkpoint is restored")

    def _expect(self, when: str, seen: list[str]) -> None:
        for rank, each in enumerate(seen):
            if each:
                self.broken(f"{when}{f'rank {rank}: ' if len(seen) > 1 else ''}{each}")

    def _pickled(self, storage: Storage) -> Storage:
        try:
            copy: Storage = pickle.loads(pickle.dumps(storage))
        except Exception as error:
            self.broken(f"it cannot be pickled: {type(error).__name__}: {error}")
        return copy


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Return where and how two states differ, or an empty string. Tensors are compared bit for bit."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"{path} is {found!r:.60}, not a tensor"
        found, expected = (x.to_local() if isinstance(x, DTensor) else x for x in (found, expected))
        have, wanted = ((x.dtype, [*x.shape]) for x in (found, expected))
        if have != wanted:
            return f"{path} is {have[0]} {have[1]}, not {wanted[0]} {wanted[1]}"
        return "" if digest(found) == digest(expected) else f"{path} has other values"
    if type(found) is not type(expected):
        return f"{path} is a {type(found).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, (dict, list, tuple)):
        if len(found) != len(expected) or (isinstance(expected, dict) and [*found] != [*expected]):
            return f"{path} has {[*found]!r:.200}, not {[*expected]!r:.200}"
        keys = expected if isinstance(expected, dict) else range(len(expected))
        inside = (difference(found[key], expected[key], f"{path}.{key}".lstrip(".")) for key in keys)
        return next(filter(None, inside), "")
    return "" if found == expected else f"{path} is {found!r:.60}, not {expected!r:.60}"


def _random(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a tensor of random bits, so that a conversion to another dtype changes at least one element."""
    seed, shape = torch.Generator().manual_seed(count), (count * dtype.itemsize,)
    return torch.randint(256, shape, dtype=torch.uint8, device="cpu", generator=seed).view(dtype)


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float32, device="cpu")


def _tensors() -> dict[str, Any]:
    values = {str(dtype).removeprefix("torch."): _random(dtype, 60) for dtype in (*_INTEGERS, *_FLOATS)}
    return {
        **values,
        "bool": torch.arange(60, dtype=torch.int64, device="cpu") % 3 == 0,
        "scalar": torch.tensor(-0.0, dtype=torch.float32, device="cpu"),
        "count": torch.tensor(2**53 + 1, dtype=torch.int64, device="cpu"),
        "empty": torch.empty(0, 3, dtype=torch.float32, device="cpu"),
        "nothing": torch.empty(0, dtype=torch.int64, device="cpu"),
        "large": _random(torch.float32, _LARGE),
        "matrix": _random(torch.bfloat16, 60).reshape(3, 4, 5),
        "transposed": _random(torch.float32, 60).reshape(6, 10).t(),
        "column": _random(torch.float32, 60).reshape(6, 10)[:, 3],
        "parameter": torch.nn.Parameter(_ones(3)),
    }


def _objects() -> dict[str, Any]:
    return {
        "pair": (torch.arange(3, dtype=torch.int64, device="cpu"), 1, b"x"),
        "deep": {1: {"a": (1, 2.5)}, "list": [_ones(2), {}, [], {"pair": (_ones(2), None)}]},
        "ordered": OrderedDict(b=1, a=_ones(1)),
        "counter": Counter({30: 1}),
        "text": "ü\n",
        "bytes": b"\0" * 100_000,
        "none": None,
        "numbers": [True, -1, 2**70, 0.1, float("inf")],
    }


def _full() -> torch.Tensor:
    return torch.arange(7 * 9.0, dtype=torch.float32, device="cpu").reshape(7, 9)


def _blank(value: Any) -> Any:
    """Return a state to restore into, with zeros instead of tensors and ``None`` instead of other values."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: _blank(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def _sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed: dict[str, Any] = {name: distribute_tensor(_full(), mesh, [each]) for name, each in _PLACES.items()}
    return {**placed, "uneven": distribute_tensor(_full()[:1], mesh, [Shard(0)])}  # empty on the last rank


def _save(storage: Storage, folder: str, *states: dict[str, Any]) -> None:
    with _quiet(), Checkpointer(folder, storage=storage, keep=9, resume="never", failure=_FAILURE) as saving:
        for step, state in enumerate(states, 1):
            saving.save(step, state)
            saving.wait()


def _restored(storage: Storage, folder: str, state: dict[str, Any], step: int) -> dict[str, Any]:
    with _quiet(), Checkpointer(folder, storage=storage, resume=f"{folder}/{step_name(step)}") as reading:
        reading.restore(state)
    return state


def _restore(rank: int, world_size: int, kind: type[StorageContract], folder: str, sharded: bool = False) -> str:
    state = {"sharded": _sharded()} if sharded else {**_tensors(), **_objects()}
    return difference(_restored(kind().make(), folder, _blank(state), 1), state)


def _save_shards(rank: int, world_size: int, kind: type[StorageContract], folder: str, restores: bool = True) -> str:
    own = torch.full((3,), float(rank), dtype=torch.float32, device="cpu")
    state = {"sharded": _sharded(), "same": _ones(4), f"of.rank{rank}": own}
    _save(kind().make(), folder, state)
    dist.barrier()
    return difference(_restored(kind().make(), folder, _blank(state), 1), state) if restores else ""


def _fill_disk(rank: int, world_size: int, kind: type[StorageContract], folder: str) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with contextlib.suppress(CheckpointError), Checkpointer(folder, storage=kind().make(), keep=9) as saving:
        saving.save(1, {"large": _ones(1)})
        saving.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        saving.save(2, {"large": _random(torch.float32, _LARGE)})
        saving.wait()
        return "the save raised no error"
    committed = sorted(each.name for each in Path(folder).glob("step-*"))
    return "" if committed == [step_name(1)] else f"the committed checkpoints are {committed}"


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="stagereg-") as parent:
        yield f"{parent}/checkpoints"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about the missing process group, and log messages below the level ERROR."""
    log = logging.getLogger("stagereg")
    with warnings.catch_warnings(), contextlib.ExitStack() as after:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        after.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        yield
