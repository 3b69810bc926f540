"""A save of a 70B model by thousands of ranks, simulated: what they plan, send, and have in the index.

``make scale`` prints the table of docs/benchmarks.md. Each split runs the functions of a save in one process: a few
ranks plan what torch's own ``DTensor`` says that they have, on the meta device; plans of the others are written down
from shapes and offsets, which nothing compares with torch's. What the exchanges would carry is pickled as they do it.
Left out are copying, writing, checksums of contents, the shares of replicas, and the network.
"""

# ruff: noqa: B023
from __future__ import annotations

import argparse
import dataclasses
import gc
import pickle
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import stagereg.checkpoint.merging as merging
import stagereg.checkpoint.sharing as sharing
from stagereg.bench.measure import in_own_process
from stagereg.checkpoint.encoding import walk
from stagereg.checkpoint.index import describe_tensors, make_index
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.merging import RankEntries
from stagereg.checkpoint.pending_save import _Prepared
from stagereg.checkpoint.sharing import EntryContents, HeldTensor
from stagereg.checkpoint.state_planner import StatePlanner, by_number, name_for_each
from stagereg.checkpoint.storage.files import FileStorage
from stagereg.checkpoint.storage.protocol import ArchiveResult, TensorResult
from stagereg.checkpoint.unchanged import Post, Unchanged

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


def fsdp2(ranks: int) -> list[Place]:
    """All ranks shard the whole."""
    whole = shapes()
    return [Place(whole, rank, ranks) for rank in range(ranks)]


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


SPLITS: dict[str, Callable[[int], list[Place]]] = {"fsdp2": fsdp2, "hsdp 8": hsdp, "pipeline 8": pipeline}


def state(place: Place, rank: int, step: int, mesh: Any) -> dict[str, Any]:
    """What the checkpointer stages of it: model, Adam, a schedule, and what is of one rank."""

    def sharded(shape: list[int]) -> DTensor:
        rows = -(-shape[0] // place.shards)
        own = max(0, min(rows, shape[0] - place.shard * rows))
        local = torch.empty([own, *shape[1:]], device="meta")
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
        f"stagereg.rng.rank{rank}": dict.fromkeys(("python", "torch", "accelerator"), b"x" * 5056),
    }


class Clock:
    """Processor seconds of one rank's parts of a save."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, act: Callable[[], Any]) -> Any:
        begun = time.process_time()
        found = act()
        self.seconds += time.process_time() - begun
        return found


def contents(entries: dict[str, Any]) -> dict[str, EntryContents]:
    """As ``sharing.contents``, without bytes to take checksums of."""
    found = {}
    for name in ("model", "optimizer"):
        pieces: list[HeldTensor] = []
        for path, x in walk(entries[name], name):
            part = sharing._part(x) if isinstance(x, torch.Tensor) else None
            if part is not None:
                local = x.to_local() if isinstance(x, DTensor) else x
                pieces.append(HeldTensor(path, part, local.shape, local.dtype, len(pieces)))
        found[name] = EntryContents(pieces, [0] * len(pieces))
    return found


class Real(NamedTuple):
    """What a rank has in the end, and the processor seconds that it took."""

    plan: SavePlan
    entries: RankEntries
    seconds: float


def real(place: Place, rank: int, ranks: int, step: int, compares: bool) -> Real:
    """Plan as the checkpointer does, on the rank."""
    first = rank // place.shards * place.shards
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    entries = state(place, rank, step, DeviceMesh("cpu", torch.arange(first, first + place.shards)))
    clock, planner = Clock(), StatePlanner()
    clock(lambda: planner.set_up_planner(entries, None, rank == 0))
    plan = clock(planner.create_local_plan)
    own = clock(lambda: RankEntries(entries, None))
    if compares:
        own.contents = clock(lambda: contents(entries))
    dist.destroy_process_group()
    return Real(plan, own, clock.seconds)


def derived(plan: SavePlan, place: Place, template: int, rank: int) -> SavePlan:
    """What another rank of the same stage plans."""
    before, after = (f"stagereg.rng.rank{each}" for each in (template, rank))
    rows: dict[tuple[Any, ...], TensorWriteData] = {}
    items = []
    for item in plan.items:
        name, data = item.index.fqn.replace(before, after), item.tensor_data
        if item.type is not WriteItemType.SHARD:
            items.append(dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=name)))
            continue
        if data.size not in rows:
            most = -(-data.size[0] // place.shards)
            begin = min(place.shard * most, data.size[0])
            own = min(most, data.size[0] - begin)
            chunk = ChunkStorageMetadata(
                torch.Size([begin] + [0] * (len(data.size) - 1)), torch.Size([own, *data.size[1:]])
            )
            rows[data.size] = dataclasses.replace(data, chunk=chunk)
        data = rows[data.size]
        items.append(
            WriteItem(MetadataIndex(name, data.chunk.offsets), item.type, tensor_data=dataclasses.replace(data))
        )
    paths = {
        name.replace(before, after): (path[0].replace(before, after), *path[1:])
        for name, path in plan.planner_data.items()
    }
    return SavePlan(items, planner_data=paths)


def results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Where ``dcp`` would have put it."""
    found: list[WriteResult] = []
    begin, name = 0, f"__{rank}_0.distcp"
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            found.append(ArchiveResult(item.index, 1600, _StorageInfo(name, begin, 1600)))
            begin += 1600
        else:
            nbytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize
            length = nbytes + 1600
            found.append(TensorResult(item.index, length, _StorageInfo(name, begin, length), begin + 800, None))
            begin += length
    return found


def simulate(split: str, ranks: int) -> dict[str, dict[str, float]]:
    """Return bytes and seconds of a first save, and of the next one."""
    places = SPLITS[split](ranks)
    order = list(range(ranks))
    templates: dict[int, int] = {}  # the first rank of each stage
    for rank in order:
        templates.setdefault(id(places[rank].of), rank)
    sampled = {0, 1, ranks // 2 + 1, ranks - 1, *templates.values()}
    compares = split != "pipeline 8"
    plans, written = Unchanged(True), Unchanged(True)
    digests: list[tuple[bytes, bytes]] = [(b"", b"")] * ranks
    described: list[Any] = []
    known: list[Any] = []
    entries: dict[Any, Any] = {}
    storage = FileStorageWithoutFiles()
    rows = {}
    for step, kind in ((1, "first"), (2, "next")):
        rank_seconds: dict[int, float] = {}
        reals = {}
        for rank in sampled:
            reals[rank] = real(places[rank], rank, ranks, step, compares and step == 1)
        own_plans: dict[int, SavePlan] = {}
        posts: list[bytes] = []
        clock = Clock()
        for rank in order:
            template = templates[id(places[rank].of)]
            one = reals.get(rank) or reals[template]
            summary = one.entries.digests()
            if rank not in reals:
                names = (f"stagereg.rng.rank{each}" for each in (template, rank))
                before, after = names
                summary = summary._replace(
                    structures={name.replace(before, after): crc for name, crc in summary.structures.items()}
                )
                plan = derived(one.plan, places[rank], template, rank) if step == 1 else None
            else:
                plan = one.plan
            varying = _Prepared(step, True, False, {}, summary, None)
            spent = Clock()
            if plan is None:
                post = Post(varying, digests[rank][0])
            else:
                post = spent(lambda: plans.post(varying, (plan, False), None))
                if step > 1:
                    assert post.digest == digests[rank][0], "the second plan is the same"
                    post = post._replace(packed=None)
            packed = spent(lambda: pickle.dumps((post, None)))
            digests[rank] = post.digest, digests[rank][1]
            rank_seconds[rank] = spent.seconds
            posts.append(packed)
            if rank in sampled:
                own_plans[rank] = plan
        requests: list[Any] = []
        metadata: list[Any] = []
        dealt_all: list[Any] = []

        def share_out(prepared: Any, lasting: Any) -> Any:
            requests[:] = merging.requests([each.digests for each in prepared], order)
            known[:] = [each.digests.known(of.structures, entries) for each, of in zip(prepared, requests, strict=True)]
            asked = [of.of_rank(there) for of, there in zip(requests, known, strict=True)]
            if lasting is None:
                return [(None, each) for each in asked]
            given = [plan for (plan, _), _ in lasting]
            made, about = StatePlanner().create_global_plan(given)
            metadata.append(about)
            dealt_all[:] = FileStorage.prepare_global_plan(storage, made)
            return list(zip(map(by_number, dealt_all, given), asked, strict=True))

        def answered(posts: list[bytes], unchanged: Unchanged, answer: Any) -> list[bytes]:
            with_all = [pickle.loads(post)[0] for post in posts]
            posts.clear()
            found = unchanged.reply(with_all, answer)
            assert None not in found
            return [pickle.dumps((each, {})) for each in found]

        row = rows[kind] = {}
        row["sent"], row["in"] = max(map(len, posts[1:])), sum(map(len, posts[1:]))
        answers = clock(lambda: answered(posts, plans, share_out))
        row["got"], row["out"] = max(map(len, answers[1:])), sum(map(len, answers[1:]))
        # -- the files are written; then the second exchange
        for rank in order:
            template = templates[id(places[rank].of)]
            one = reals.get(rank) or reals[template]
            request = requests[rank].of_rank(known[rank])
            names = {f"stagereg.rng.rank{rank}": f"stagereg.rng.rank{rank if rank in reals else template}"}
            sent = one.entries.answer(
                request._replace(structures={names.get(name, name): [] for name in request.structures})
            )
            sent = sent._replace(
                structures={name: sent.structures[names.get(name, name)] for name in request.structures}
            )
            varying = ({f"__{rank}_0.distcp": FileMark(10**9, 10**9)}, sent)
            spent = Clock()
            if step == 1:
                where = results(dealt_all[rank], rank)
                post = spent(lambda: written.post(varying, where, None))
                digests[rank] = digests[rank][0], post.digest
            else:
                post = Post(varying, digests[rank][1])
            posts.append(spent(lambda: pickle.dumps((post, None))))
            rank_seconds[rank] += spent.seconds
        dealt_all.clear()
        row["sent"] += max(map(len, posts[1:]))
        row["in"] += sum(map(len, posts[1:]))

        def commit(sent: Any, lasting: Any) -> Any:
            all_sent = [each.joined(there) for (_, each), there in zip(sent, known, strict=True)]
            entries.update(merging.entries_of(all_sent))
            state = merging.put_together(all_sent, requests, order, ())
            groups = [each.groups for each in all_sent]
            objects = {name for each in state.values() for name in each.objects}
            if lasting is not None:
                each = [one for one, _ in lasting]
                described[:] = [describe_tensors(metadata[0], each, objects)]
                name_for_each(metadata[0], each, groups)
                storage.finish(metadata[0], each)
            row["index"] = len(make_index(described[0], state))
            return [0] * ranks

        clock(lambda: answered(posts, written, commit))
        row["rank s"] = statistics.median(reals[rank].seconds + rank_seconds[rank] for rank in sampled)
        row["rank 0 s"] = clock.seconds
        row[".metadata"] = len(storage._metadata)
        metadata.clear()
        gc.collect()
    rows["first"]["GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return rows


class FileStorageWithoutFiles(FileStorage):
    """Makes ``.metadata``, and writes nothing."""

    def write_files(self, rank: int, items: list[WriteItem], planner: Any) -> list[WriteResult]:
        """Nothing."""
        return []

    def finish_again(self) -> None:
        """Nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--splits", nargs="+", default=list(SPLITS))
    asked = parser.parse_args()
    for split in asked.splits:
        for ranks in asked.ranks:
            found = in_own_process(simulate, split, ranks)
            for kind, row in found.items():
                print(split, ranks, kind, {key: round(value, 3) for key, value in row.items()}, flush=True)
