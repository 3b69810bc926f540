"""A save of a 70B model by thousands of ranks, simulated: what they plan, send, and have in the index.

``make scale`` prints the table of docs/benchmarks.md. A few ranks do in one process what the checkpointer does, with
what torch's own ``DTensor`` says that they have, on the meta device. What the others send is written down from shapes
and offsets; of some of them, with uneven shards and at the ends, it is compared with what torch plans. Messages are
pickled as the exchanges do it, and rank 0 takes all of them. Left out are copying, writing, checksums of contents, the
saves in which replicas begin to share, and the network.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import marshal
import pickle
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

import stagereg.extensions.replicas.comparing as comparing
import stagereg.extensions.replicas.shares as shares
from stagereg.bench.measure import in_own_process
from stagereg.checkpoint.format.encoding import walk
from stagereg.checkpoint.format.index import INDEX, ArchiveResult, TensorResult
from stagereg.checkpoint.format.manifest import Checkpoint, FileDigest, Manifest
from stagereg.checkpoint.ranks.merging import Asked, Sent
from stagereg.checkpoint.ranks.unchanged import pack, unpack
from stagereg.checkpoint.save.committing import ExchangeCache, _Prepared, _RankFiles, _Work
from stagereg.checkpoint.save.staged_copy import Request, StagedCopy, Write
from stagereg.checkpoint.save.store_target import StoreTarget
from stagereg.checkpoint.storage.files import FileStorage
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.checkpoint.targets import ReplicaSave
from stagereg.extensions.replicas.comparing import Compared, EntryContents, HeldTensor, Kind
from stagereg.extensions.replicas.shares import ReplicaShards
from stagereg.kernel.copier import no_collection
from tests.support.memory_backend import MemoryBackend

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 80, 8192, 28672, 64, 8, 128256
SHARDS, STAGES = 8, 8


def shapes(layers: Sequence[int] = range(LAYERS), ends: bool = True) -> dict[str, list[int]]:
    """Names and shapes of the parameters of Llama 3 70B, or of some of its layers."""
    kv = HIDDEN // HEADS * KV_HEADS
    found = {"embed_tokens.weight": [VOCAB, HIDDEN]} if ends else {}
    for number in layers:
        of = {f"self_attn.{x}_proj": [kv if x in "kv" else HIDDEN, HIDDEN] for x in "qkvo"}
        of |= {"mlp.gate_proj": [FFN, HIDDEN], "mlp.up_proj": [FFN, HIDDEN], "mlp.down_proj": [HIDDEN, FFN]}
        of |= {"input_layernorm": [HIDDEN], "post_attention_layernorm": [HIDDEN]}
        found |= {f"layers.{number}.{name}.weight": shape for name, shape in of.items()}
    return found | ({"norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]} if ends else {})


class Place(NamedTuple):
    """What a rank has: the names and shapes of its stage, and its shard of how many."""

    of: dict[str, list[int]]
    shard: int
    shards: int


def fsdp2(ranks: int, layers: int = LAYERS) -> list[Place]:
    """All ranks shard the whole."""
    whole = shapes(range(layers))
    return [Place(whole, rank, ranks) for rank in range(ranks)]


def quarter(ranks: int) -> list[Place]:
    """As many ranks as memory has room for in another way: with a quarter of the layers."""
    return fsdp2(ranks, LAYERS // 4)


def hsdp(ranks: int) -> list[Place]:
    """Groups of eight ranks shard the whole, and are replicas of each other."""
    whole = shapes()
    return [Place(whole, rank % SHARDS, SHARDS) for rank in range(ranks)]


def pipeline(ranks: int) -> list[Place]:
    """Eight stages, each sharded over an eighth of the ranks."""
    stages, each = [], LAYERS // STAGES
    for stage in range(STAGES):
        of = shapes(range(stage * each, (stage + 1) * each), ends=False)
        first = {"embed_tokens.weight": [VOCAB, HIDDEN]} if stage == 0 else {}
        last = {"norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]} if stage == STAGES - 1 else {}
        stages.append(first | of | last)
    shards = ranks // STAGES
    return [Place(stages[rank // shards], rank % shards, shards) for rank in range(ranks)]


SPLITS: dict[str, tuple[Callable[[int], list[Place]], list[int]]] = {
    "HSDP, 8 shards": (hsdp, [64, 256, 1024, 4096]),
    "pipeline, 8 stages": (pipeline, [64, 256, 1024, 4096]),
    "FSDP2": (fsdp2, [64, 256, 1024]),
    "FSDP2, 20 of 80 layers": (quarter, [1024, 4096]),
}


def rows(place: Place, size: int) -> tuple[int, int]:
    """The first row of the rank's shard of a tensor of so many, and how many it has."""
    most = -(-size // place.shards)
    begin = min(place.shard * most, size)
    return begin, min(most, size - begin)


def state(place: Place, rank: int, step: int, mesh: Any) -> dict[str, Any]:
    """What the checkpointer stages of it: model, Adam, a schedule, and what is of one rank."""

    def sharded(shape: list[int]) -> DTensor:
        local = torch.empty(compute_local_shape_and_global_offset(shape, mesh, [Shard(0)])[0], device="meta")
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    names = list(place.of)
    group = {"lr": 3e-4 / step, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    group |= {"maximize": False, "foreach": None, "capturable": False, "fused": True, "params": names}
    moments = {
        name: {"step": torch.tensor(0.0), "exp_avg": sharded(shape), "exp_avg_sq": sharded(shape)}
        for name, shape in place.of.items()
    }
    return {
        "model": {name: sharded(shape) for name, shape in place.of.items()},
        "optimizer": {"state": moments, "param_groups": {names[0]: group}},
        "schedule": {"last_epoch": step, "_last_lr": [3e-4 / step]},
        "stagereg.step": step,
        "stagereg.world_size": 4096,
        f"stagereg.rng.rank{rank}": {"python": marshal.dumps(""), "torch": b"x" * 5056, "numpy": marshal.dumps("")},
    }


class Clock:
    """Processor seconds of some parts of a save."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, act: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.process_time()
        found = act(*arguments)
        self.seconds += time.process_time() - begun
        return found


class OfAllRanks(MemoryBackend):
    """Has the files of so many ranks in each directory."""

    ranks = 0

    def list(self, path: str, files: Iterable[str] = ()) -> dict[str, int | str | None]:
        return super().list(path) | {f"__{rank}_0.distcp": 10**13 for rank in range(self.ranks)}


class Nowhere(CheckpointStore):
    """Keeps what is put there, and commits nothing."""

    def __init__(self, ranks: int) -> None:
        backend = OfAllRanks("/nowhere")
        backend.ranks = ranks
        backend.in_place = True  # has files of all ranks from the beginning
        super().__init__(backend)

    def publish(self, written: str, manifest: Manifest, keep: Any) -> Checkpoint:
        return Checkpoint("", manifest)


class StorageWithoutFiles(FileStorage):
    """Says where ``dcp`` would have put everything, and makes ``.metadata``."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def _write_metadata(self) -> None:
        pass

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        self._marks[f"__{rank}_0.distcp"] = FileDigest(10**13, 10**13)
        return results(items, rank)


def results(items: Sequence[WriteItem], rank: int) -> list[WriteResult]:
    """Where ``dcp`` would have put it."""
    found: list[WriteResult] = []
    begin, name = 0, f"__{rank}_0.distcp"
    for item in items:
        data = item.tensor_data
        if data is None:
            found.append(ArchiveResult(item.index, 1600, _StorageInfo(name, begin, 1600)))
            begin += 1600
        else:
            length = data.chunk.sizes.numel() * data.properties.dtype.itemsize + 1600
            found.append(TensorResult(item.index, length, _StorageInfo(name, begin, length), begin + 800, None))
            begin += length
    return found


def contents(entries: dict[str, Any], buffers: Any, objects: Any, known: Any = ()) -> dict[Kind, EntryContents]:
    """As ``comparing.contents``, without bytes to take checksums of."""
    found: dict[Kind, EntryContents] = {}
    for name in ("model", "optimizer"):
        for path, x in walk(entries[name], name):
            is_compared = isinstance(x, torch.Tensor) and ".".join(map(str, path)) not in known
            part = comparing._part(x, str(path)) if is_compared else None
            if part is not None:
                local, parts = x.to_local() if isinstance(x, DTensor) else x, comparing._parts_of(x)
                each = found.setdefault((name, parts == 1), EntryContents([], []))
                nbytes = part.whole.numel() * local.dtype.itemsize // parts
                each.pieces.append(HeldTensor(path, part, local.shape, local.dtype, nbytes, len(each.pieces)))
                each.checksums.append(0)
    return found


class Real:
    """A rank that does what the checkpointer does, with what torch says that it has."""

    def __init__(self, place: Place, rank: int, ranks: int) -> None:
        group: Any = SimpleNamespace(rank=rank, size=ranks, number=rank, numbers=range(ranks))
        self.target = StoreTarget(Nowhere(ranks), 1, StorageWithoutFiles(), group, "0" * 12)
        self.cache = ExchangeCache(self.target.repeats)
        self.place, self.rank, self.ranks = place, rank, ranks

    def prepare(self, step: int, compares: bool, clock: Clock) -> Any:
        """Return what it sends first."""
        first = self.rank // self.place.shards * self.place.shards
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
        entries = state(self.place, self.rank, step, DeviceMesh("cpu", torch.arange(first, first + self.place.shards)))
        replicas = ReplicaSave()
        if compares:
            replicas = ReplicaShards(0, True).begin_save()
            replicas._buffers = ()
        copy = StagedCopy(request := Request(step), replicas)
        copy.put(entries)
        copy.settled.set()
        self.work = _Work(Write(request, copy, self.target), self.cache)
        self.work._path, _ = self.target.begin(step)
        found = clock(self.work.prepare)
        dist.destroy_process_group()
        return found

    def prepare_shares(self, compared: Compared, clock: Clock) -> Any:
        """Return what it sends when it has heard what others have as well."""
        return clock(self.work._take_shards, compared)

    def write(self, answer: Any, clock: Clock) -> Any:
        """Return what it sends when it has written."""
        self.work.take_answer(answer)
        return clock(self.work.write)


class Derived:
    """A rank of which it is written down what it sends, from what another one of its stage has sent."""

    def __init__(self, place: Place, rank: int, template: Real) -> None:
        self._place, self._rank, self.template = place, rank, template

    def _named(self, name: str) -> str:
        return name.replace(f".rank{self.template.rank}", f".rank{self._rank}")

    def _data(self, data: TensorWriteData) -> TensorWriteData:
        begin, own = rows(self._place, data.size[0])
        start = torch.Size([begin] + [0] * (len(data.size) - 1))
        return dataclasses.replace(data, chunk=ChunkStorageMetadata(start, torch.Size([own, *data.size[1:]])))

    def plan(self, plan: SavePlan) -> SavePlan:
        """What it plans where the other one has planned this."""
        items = []
        for item in plan.items:
            index, data = dataclasses.replace(item.index, fqn=self._named(item.index.fqn)), item.tensor_data
            if item.type is WriteItemType.SHARD:
                data = self._data(data)
                index = dataclasses.replace(index, offset=data.chunk.offsets)
            items.append(WriteItem(index, item.type, tensor_data=data))
        paths = {self._named(name): (self._named(path[0]), *path[1:]) for name, path in plan.planner_data.items()}
        return SavePlan(items, planner_data=paths)

    def prepared(self, sent: _Prepared) -> _Prepared:
        """What it sends first, beside its plan or the names of its tensors."""
        place = comparing.digest((self._place.shard, self.template.rank))  # another shard has other bytes
        contents = {
            (name, place if layout else b""): place if layout else content
            for (name, layout), content in (sent.post.digests if sent.post else {}).items()
        }
        post = sent.post and sent.post._replace(digests=contents, differing=())
        return sent._replace(post=post, digests={self._named(name): each for name, each in sent.digests.items()})

    def written(self, asked: Asked) -> _RankFiles:
        """What it sends when it has written, beside the places in its file."""
        there = {self._named(name): each for name, each in self.template.work.own.structures.items()}
        sent: Sent = {name: there[name] for name in asked}
        return _RankFiles({f"__{self._rank}_0.distcp": FileDigest(10**13, 10**13)}, sent, {})


class Messages:
    """Those of one of the two exchanges of a save, as the bytes that go over the network."""

    def __init__(self) -> None:
        self._sent = dict[int, int]()

    def post(self, rank: int, act: Any) -> bytes:
        """What a rank sends; ``act`` without more than a first part if that is as before."""
        if len(act) == 1:
            return pickle.dumps(((act[0], None), None))
        value, lasting, more = act
        packed = pack(lasting, 2)
        same, self._sent[rank] = hash(tuple(packed)) == self._sent.get(rank), hash(tuple(packed))
        return pickle.dumps(((value, None if same else [*packed, *pack(more, 2)]), None))

    @no_collection()
    def answers(self, posts: Sequence[bytes], answer: Callable[..., Any]) -> list[bytes]:
        """What each rank gets."""
        values, parts = zip(*(pickle.loads(post)[0] for post in posts), strict=True)
        assert len({part is None for part in parts}) == 1, "ranks must send all"
        found = answer(values, None if parts[0] is None else unpack(parts, 2))
        return [pickle.dumps((each, {})) for each in found]


class Simulation:
    """The saves of all ranks, one after the other."""

    def __init__(self, split: str, ranks: int) -> None:
        self.places = SPLITS[split][0](ranks)
        templates: dict[int, int] = {}  # of each stage its first rank
        for rank, place in enumerate(self.places):
            templates.setdefault(id(place.of), rank)
        edges = {
            size // -(-size // shards) for size in (VOCAB, FFN, HIDDEN, 1024) for shards in [self.places[0].shards]
        }
        sampled = {1, ranks // 2 + 1, ranks - 1, *templates.values(), *edges, *(edge - 1 for edge in edges)}
        self.reals = {rank: Real(self.places[rank], rank, ranks) for rank in sorted(sampled) if rank < ranks}
        self.derived = [
            Derived(place, rank, self.reals[templates[id(place.of)]]) for rank, place in enumerate(self.places)
        ]
        self.plans, self.results = Messages(), Messages()

    def save(self, step: int) -> dict[str, float]:
        """Return what a save has cost."""
        gc.collect()
        gc.freeze()  # what stands for the ranks is not in rank 0's memory
        clocks = {rank: Clock() for rank in range(len(self.places))}
        zero, row = Clock(), Counter[str]()
        sent = {rank: real.prepare(step, step == 1, clocks[rank]) for rank, real in self.reals.items()}

        def exchange(through: Messages, acts: Iterator[Any], answer: Callable[..., Any]) -> list[Any]:
            posts = [clocks[rank](through.post, rank, act) for rank, act in enumerate(acts)]
            answers = zero(through.answers, posts, answer)
            row.update(sent=max(map(len, posts[1:])), received=sum(map(len, posts[1:])), got=max(map(len, answers[1:])))
            return [pickle.loads(each)[0] for each in answers]

        zeroth = self.reals[0].work
        if step == 1:
            named = (
                sent.get(rank) or (each.prepared(sent[each.template.rank][0]), *sent[each.template.rank][1:])
                for rank, each in enumerate(self.derived)
            )
            compared = exchange(self.plans, named, zeroth.share_out)
            sent = {rank: real.prepare_shares(compared[rank], clocks[rank]) for rank, real in self.reals.items()}
            assert not any(each.differing for rank, each in enumerate(compared) if rank not in self.reals)
        answers = exchange(self.plans, (self.first(rank, sent, step) for rank in clocks), zeroth.share_out)
        wrote = {rank: real.write(answers[rank], clocks[rank]) for rank, real in self.reals.items()}
        exchange(self.results, (self.second(rank, sent, wrote, answers[rank]) for rank in clocks), zeroth.commit)
        files = self.reals[0].target.store.backend.files  # type: ignore[attr-defined]
        row["index"] = next(len(data) for path, data in reversed(files.items()) if path.endswith(INDEX))
        seconds = statistics.median(clocks[rank].seconds for rank in self.reals if rank)
        return {**row, "seconds": seconds, "seconds of rank 0": zero.seconds + clocks[0].seconds}

    def first(self, rank: int, sent: dict[int, Any], step: int) -> Any:
        """What a rank sends first; that of a sampled one is held against what is written down of it."""
        derived = self.derived[rank]
        prepared, (*plans, kinds), _ = sent[derived.template.rank]
        if step > 1:
            return sent.get(rank) or (derived.prepared(prepared),)
        act = derived.prepared(prepared), (*map(derived.plan, plans), kinds), ()
        if rank not in sent:
            return act
        for one, other in zip(act[1][0].items, sent[rank][1][0].items, strict=True):
            if one != other:
                raise SystemExit(f"Rank {rank} plans {other}, and not {one}, as is written down of it.")
        if act[1] != sent[rank][1] or act[0].digests != sent[rank][0].digests:
            raise SystemExit(f"Rank {rank} has other entries than is written down of it.")
        return sent[rank]

    def second(self, rank: int, sent: dict[int, Any], wrote: dict[int, Any], answer: Any) -> Any:
        """What a rank sends when it has written."""
        if rank in wrote:
            return wrote[rank]
        derived, (dealt, asked) = self.derived[rank], answer
        if dealt is None:
            return (derived.written(asked),)
        items = [item for plan in sent[derived.template.rank][1][:-1] for item in derived.plan(plan).items]
        return derived.written(asked), (tuple(results([items[number] for number in dealt.items], rank)),), ()


def simulate(split: str, ranks: int) -> dict[str, dict[str, float]]:
    """Return what a first save and a warm one cost."""
    simulation, found = Simulation(split, ranks), {}
    with mock.patch.object(shares, "contents", contents):
        for step, kind in ((1, "first"), (2, "warm")):
            found[kind] = simulation.save(step)
            found[kind]["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


HEADER = """\
| split | ranks | save | a rank sends | rank 0 receives | rank 0 | a rank | `index.json` | peak memory |
|---|---|---|---|---|---|---|---|---|"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", help="those of the page if not given")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS))
    asked = parser.parse_args()
    print(HEADER)
    for split in asked.splits:
        for ranks in asked.ranks or SPLITS[split][1]:
            for kind, row in in_own_process(simulate, split, ranks).items():
                index, peak = (f"{row[name] / 1e6:,.1f} MB" for name in ("index", "peak"))
                sizes = f"{row['sent']:,.0f} bytes | {row['received'] / 1e3:,.0f} kB"
                seconds = f"{row['seconds of rank 0']:.2f} s | {row['seconds']:.2f} s"
                print(f"| {split} | {ranks:,} | {kind} | {sizes} | {seconds} | {index} | {peak} |", flush=True)
