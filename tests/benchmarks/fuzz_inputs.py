"""Inputs of ``make fuzz``: of each kind a good sample, a seeded mutation of it, and everything that reads it.

A reading must end in the right value or in a ``StageregError``. :class:`Wrong` is another end; ``fuzz_watch.py`` sees
the rest.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf

import stagereg
from stagereg import cli
from stagereg.checkpoint.format.checksum import crc32
from stagereg.extensions.interop.opening import open_checkpoint

from .fuzz import PRIVATE
from .mutations import DEPTHS, NUMBERS, TEXTS, JsonMutant, Random, mutate_bytes, mutate_json, mutate_pickle, mutate_zip

for module in cli.BUILT_IN.values():  # else the first input of a command would be seen to write compiled files
    importlib.import_module(module)

JUNK = b"\xa5\x5a"  # what fresh and freed memory is filled with, see `fuzz.py`
_SENTINEL = 0xC3
_LARGEST = 64 << 20  # bytes of a file that a command may write
DATA, INDEX, MANIFEST = "__0_0.distcp", "index.json", "manifest.json"
Files = dict[str, bytes]
Action = tuple[str, Callable[[], Any]]


class Wrong(Exception):
    """A reading has ended with a wrong value, or with a wrong answer of a command: in short, and the details."""


# -- the state, and values


def state(step: int) -> dict[str, Any]:
    """Return a state of every form that checkpoints have; its values follow from the step."""
    torch.manual_seed(step)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    numbers = torch.arange(24.0) + 100 * step + 0.25
    tied = numbers[:5].clone()
    return {
        "model": model,
        "optimizer": optimizer,
        "w": numbers.reshape(6, 4).clone(),
        "t": (numbers + 1000).reshape(4, 6).t(),
        "v": (numbers[:4] + 2000).clone(),
        "half": (numbers[:8] * 3).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "octets": torch.arange(64, dtype=torch.uint8) + step,
        "tied": {"a": tied, "b": tied},
        "pair": (numbers[:3] + 3000, step),
        "list": [numbers[:2] + 4000, {"x": numbers[:3] + 5000}],
        "plain": {
            "n": step,
            4: "x",
            "nan": float("nan"),
            "raw": b"ab",
            "set": {1, 2},
            "tup": (1, "a"),
            "np": np.float32(step),
        },
        "counter": collections.Counter(a=step),
        "config": OmegaConf.create({"lr": 0.1, "of": "${lr}"}),
    }


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors in a value of any form, by the way to them."""
    found: dict[str, torch.Tensor] = {}
    left = [("", value)]
    while left:
        way, value = left.pop()
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        if isinstance(value, torch.Tensor):
            found[way] = value
        elif isinstance(value, dict):
            left += [(f"{way}.{key}", each) for key, each in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(f"{way}.{at}", each) for at, each in enumerate(value)]
    return found


def content(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's memory."""
    storage = tensor.detach().untyped_storage()
    if storage.nbytes() > _LARGEST:
        raise Wrong("a tensor is larger than its file", f"{storage.nbytes():,} bytes")
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def expect_of_files(name: str, tensor: torch.Tensor, files: bytes) -> None:
    """Raise ``Wrong`` if a tensor has bytes that are in no file of the input."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return
    data, size = content(tensor), tensor.dtype.itemsize
    if any(bytes([each]) * 8 in data and bytes([each]) * 8 not in files for each in JUNK):
        raise Wrong("a tensor has uninitialised memory", name)
    if data in files or size < 4:
        return
    elements = {data[at : at + size] for at in range(0, len(data), size)}
    if any(each not in files and each[::-1] not in files for each in elements):  # an archive may be big-endian
        raise Wrong("a tensor has bytes that are in no file", name)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and each.shape == other[name].shape and bool((each == other[name]).all())
        for name, each in one.items()
    )


def read_opened(path: Path | str, ways: Sequence[str] = ("tensor", "entry")) -> dict[str, Any]:
    """Return all that :func:`open_checkpoint` reads of a checkpoint; what is refused is left out."""
    found: dict[str, Any] = {}
    with open_checkpoint(path) as checkpoint:
        for way in ways:
            for name in checkpoint if way == "tensor" else checkpoint.entries:
                with contextlib.suppress(stagereg.StageregError):
                    found[f"{way} {name}"] = checkpoint[name] if way == "tensor" else checkpoint.entry(name)
    return found


# -- files


def files_of(folder: Path) -> Files:
    """Return the files below a folder; a link has its target behind ``link:``."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link:{os.readlink(path)}".encode()
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def lay(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(data[5:].decode()) if data.startswith(b"link:") else path.write_bytes(data)


def seal(files: Files, mutant: JsonMutant | None = None) -> None:
    """Write a manifest with right checksums, of the files or of a mutant of a manifest."""
    if mutant is None:
        mutant = JsonMutant(Random(0), json.loads(files[MANIFEST]))
        del mutant.value["crc32"]
        for name in mutant.value["files"]:
            mutant.value["files"][name] = {"bytes": len(files[name]), "crc32": crc32(files[name])}
    if isinstance(mutant.value, dict):
        with contextlib.suppress(ValueError, RecursionError):
            checked = json.dumps(json.loads(mutant.text()), sort_keys=True, separators=(",", ":"))
            mutant.value["crc32"] = crc32(checked.encode())
    files[MANIFEST] = mutant.text(indent=1).encode() + b"\n"


def checkpointer(root: Path | str, **how: Any) -> stagereg.Checkpointer:
    return stagereg.Checkpointer(str(root), stager=stagereg.BlockingAsyncStager(), **how)


def command(*arguments: Path | str, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """Run a command of ``stagereg``, and return its output. Raises: ``Wrong``."""
    out, err = io.StringIO(), io.StringIO()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST, limit[1]))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main([str(each) for each in arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    seen = out.getvalue() + err.getvalue()
    if code not in codes or "Traceback (most" in err.getvalue() or (code == 2 and "stagereg: " not in err.getvalue()):
        raise Wrong(f"exit code {code}", err.getvalue()[-1000:])
    if "MemoryError" in seen or "allocate memory" in seen or "File too large" in seen:
        raise Wrong("takes too much memory, or disk", seen[:1000])
    expect_printable(seen)
    if "--json" in arguments and code != 2:
        json.loads(out.getvalue())
    return out.getvalue()


def expect_printable(seen: str) -> None:
    """Raise ``Wrong`` if a text has commands for a terminal, or what is private."""
    if PRIVATE in seen:
        raise Wrong("shows what is private")
    if odd := sorted({each for each in seen if each not in "\n\t" and not each.isprintable()}):
        raise Wrong("prints control characters", ascii("".join(odd)), ascii(seen[-2000:]))


# -- kinds


class Kind:
    """One kind of inputs; :meth:`make` writes one into ``self.folder``, and :meth:`actions` read it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = self.folder = scratch
        self.values: dict[str, torch.Tensor] = {}  # that were read of the input

    def make(self, rng: Random) -> str:
        """Write an input, and return how it was mutated."""
        raise NotImplementedError

    def actions(self, rng: Random) -> Iterator[Action]:
        """Return what reads the input, one after the other."""
        raise NotImplementedError


class Manifests(Kind):
    """Manifests with a right checksum. The base of the kinds that mutate one of two checkpoints of this project."""

    exact = True  # whether what is read must be what was saved

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        home = scratch / f"sample-{type(self).__name__}"
        with checkpointer(home, keep=9) as saving:
            for step in (1, 2):
                saving.save(step, state(step))
                saving.wait()
        self.sample = files_of(home)
        for step in (1, 2):
            self.put(self.sample, step, self._in_parts(self.take(self.sample, step)))
        shutil.rmtree(home)
        lay(home, self.sample)
        self.opened = {step: tensors_of(read_opened(home / f"step-0000000{step}")) for step in (1, 2)}
        assert len(self.opened[1]) > 30
        shutil.rmtree(home)

    @staticmethod
    def take(files: Files, step: int) -> Files:
        """Return the files of a step."""
        start = f"step-0000000{step}/"
        return {name.removeprefix(start): data for name, data in files.items() if name.startswith(start)}

    @staticmethod
    def put(files: Files, step: int, changed: Files) -> None:
        files.update({f"step-0000000{step}/{name}": data for name, data in changed.items()})

    @staticmethod
    def _in_parts(files: Files) -> Files:
        """Have a tensor in two chunks, as ranks that hold shards write it."""
        index = json.loads(files[INDEX])
        file, at, length = index["tensors"]["w"][2][0][:3]
        half = [[file, at + i * length // 2, length // 2, [3 * i, 0], [3, 4]] for i in (0, 1)]
        index["tensors"]["w"][2] = half
        files[INDEX] = json.dumps(index).encode()
        seal(files)
        return files

    def change(self, rng: Random, files: Files) -> str:
        """Mutate the files of a checkpoint, and seal them."""
        data = json.loads(files[MANIFEST])
        del data["crc32"]
        mutant, how = mutate_json(rng, data)
        seal(files, mutant)
        return how

    def make(self, rng: Random) -> str:
        files = self.take(self.sample, 2)
        how = self.change(rng, files)
        every = dict(self.sample)
        self.put(every, 2, files)
        lay(self.folder / "runs", {**every, "private": PRIVATE.encode()})
        self.files = b"".join(data for data in every.values())
        return how

    def actions(self, rng: Random) -> Iterator[Action]:
        root = self.folder / "runs"
        step = root / "step-00000002"
        yield "open_checkpoint", lambda: self.read(step, rng)
        yield "restore", lambda: self.restore(*rng.choice(((root, "auto"), (root, str(step)))))
        commands: tuple[Action, ...] = (
            ("ls", lambda: command("ls", root, codes=(0,))),
            ("ls --json", lambda: self.expect_first(command("ls", root, "--json", codes=(0,)))),
            ("verify", lambda: command("verify", root, codes=(0, 1))),
        )
        yield rng.choice(commands)
        if rng.random() < 0.1:
            out = self.folder / f"out{rng.choice(('.pt', '.safetensors'))}"
            yield "convert", lambda: command("convert", step, out, codes=(0, 2))

    def read(self, path: Path, rng: Random) -> None:
        self.values = tensors_of(read_opened(path, [rng.choice(("tensor", "entry"))]))
        for name, tensor in self.values.items():
            if not self.exact:
                expect_of_files(name, tensor, self.files)
            elif not any(name in one and same({name: tensor}, {name: one[name]}) for one in self.opened.values()):
                raise Wrong("a tensor is not what was saved", name)

    def restore(self, root: Path, resume: str, **how: Any) -> None:
        given = state(0)
        tensors = tensors_of(given)
        for each in tensors.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(each.detach().untyped_storage())
            memory.fill_(0 if each.dtype is torch.bool else _SENTINEL)
        before = {name: each.detach().clone() for name, each in tensors.items()}
        with checkpointer(root, resume=resume, **how) as reading:
            try:
                step = reading.restore(given)
            except stagereg.StageregError as error:
                if "changed in part" not in str(error) and not same_bits(tensors_of(given), before):
                    raise Wrong("restore was refused and has changed the state", str(error)) from None
                raise
            if step is not None:
                self.expect_restored(given)
                self.after_restore(reading, step)

    def after_restore(self, reading: stagereg.Checkpointer, step: int) -> None:
        """Go on with a checkpointer that has restored."""

    def expect_restored(self, given: dict[str, Any]) -> None:
        found = tensors_of(given)
        if self.exact:
            if not any(same(found, tensors_of(state(step))) for step in (1, 2)):
                raise Wrong("what was restored is not what was saved")
            return
        for name, tensor in found.items():
            if tensor.numel() == 1:  # an optimizer makes tensors of plain numbers
                continue
            known = self.values.get(f".tensor {name[1:]}", self.values.get(f".entry {name[1:]}"))
            if known is None or known.shape != tensor.shape or not bool((known.to(tensor.dtype) == tensor).all()):
                expect_of_files(name, tensor, self.files)

    @staticmethod
    def expect_first(seen: str) -> None:
        """Raise ``Wrong`` if the listing lacks the good checkpoint."""
        states = {os.path.basename(each["path"]): each["damages"] for each in json.loads(seen)["checkpoints"]}
        if states.get("step-00000001") != []:
            raise Wrong("ls lacks the good checkpoint, or calls it corrupt")


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(name in one and content(one[name].detach().clone()) == content(each) for name, each in other.items())


class Indexes(Manifests):
    """The tables of an index, or its text."""

    exact = False
    under: tuple[str, ...] = ("tensors", "tensors", "objects", "")

    def change(self, rng: Random, files: Files) -> str:
        if rng.random() < 0.1:
            files[INDEX], how = mutate_bytes(rng, files[INDEX])
        else:
            mutant, how = mutate_json(rng, json.loads(files[INDEX]), rng.choice(self.under))
            files[INDEX] = mutant.text().encode()
        seal(files)
        return how


class Structures(Indexes):
    """The structures in an index."""

    under = ("state",)


class Zips(Manifests):
    """Archives as ``torch.save`` writes them: an object, a tensor, an entry of a directory of plain torch."""

    exact = False

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        numbers = torch.arange(16.0) + 0.5
        values: list[Any] = [
            (numbers[:4].clone(), 1),
            numbers[:4].clone(),
            {"a": numbers[::2], "b": [numbers, "x" * 40]},
        ]
        values += [
            (torch.nn.Parameter(numbers[:3].clone()), {1: b"raw"}, torch.Size((1, 2)), collections.OrderedDict(a=1))
        ]
        self.archives = [_saved(value) for value in values]
        self.plain = plain_sample(scratch / "sample-plain")

    def make(self, rng: Random) -> str:
        if rng.random() < 0.6:
            return super().make(rng)
        files, metadata = dict(self.plain), pickle.loads(self.plain[".metadata"])
        at = rng.choice(sorted(metadata.storage_data, key=str))
        archive, how = mutate_zip(rng, rng.choice(self.archives[:2]))
        info = metadata.storage_data[at]
        info.offset, info.length = len(files[DATA]), len(archive)
        files[DATA] += archive
        files[".metadata"] = pickle.dumps(metadata)
        lay(self.folder / "plain", files)
        self.files = files[DATA]
        return f"plain {at.fqn}: {how}"

    def change(self, rng: Random, files: Files) -> str:
        index = json.loads(files[INDEX])
        archive, how = mutate_zip(rng, rng.choice(self.archives))
        place = [0, len(files[DATA]), len(archive)]
        files[DATA] += archive
        if into_object := rng.random() < 0.6:
            index["objects"]["pair"] = place
        else:
            index["tensors"]["v"][2] = [[*place, [0], [4], rng.choice(("archive", "archive", "subclass"))]]
        files[INDEX] = json.dumps(index).encode()
        seal(files)
        return f"{'an object' if into_object else 'a tensor'}: {how}"

    def actions(self, rng: Random) -> Iterator[Action]:
        plain = self.folder / "plain"
        return read_plain(self, plain, rng) if plain.exists() else super().actions(rng)


def _saved(value: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return stream.getvalue()


class Metadata(Manifests):
    """``.metadata`` of plain torch: its instructions, or what it says."""

    exact = False

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.plain = plain_sample(scratch / "sample-plain")

    def make(self, rng: Random) -> str:
        files, data = dict(self.plain), self.plain[".metadata"]
        what = rng.choice(("instructions", "instructions", "instructions", "content", "content", "content", "bytes"))
        if what == "content":
            metadata = pickle.loads(data)
            how = "; ".join(_say_otherwise(rng, metadata) for _ in range(rng.choice((1, 1, 2))))
            changed = pickle.dumps(metadata, rng.choice((2, 4, 4)))
        else:
            changed, how = (mutate_bytes if what == "bytes" else mutate_pickle)(rng, data)
        files[".metadata"] = changed
        lay(self.folder / "plain", files)
        self.files = files[DATA]
        return f"{what}: {how}"

    def actions(self, rng: Random) -> Iterator[Action]:
        return read_plain(self, self.folder / "plain", rng)


def plain_sample(folder: Path) -> Files:
    """Return the files of a directory of plain torch."""
    given = state(1)
    whole = {name: given[name] for name in ("w", "t", "v", "half", "flags", "octets", "tied", "list", "pair", "plain")}
    whole |= {name: given[name].state_dict() for name in ("model", "optimizer")}
    dcp.save(whole, checkpoint_id=str(folder), no_dist=True)
    found = files_of(folder)
    shutil.rmtree(folder)
    return found


def read_plain(kind: Manifests, path: Path, rng: Random) -> Iterator[Action]:
    """Return what reads a directory of plain torch."""
    yield "open_checkpoint", lambda: kind.read(path, rng)
    yield "restore", lambda: kind.restore(path.parent / "own", str(path))
    name, *more = rng.choice((("ls",), ("ls", "--json"), ("verify",)))
    yield name, lambda: command(name, path, *more)
    if rng.random() < 0.1:
        yield "convert", lambda: command("convert", path, path.parent / "out.pt")


def _say_otherwise(rng: Random, metadata: Any) -> str:
    """Change one thing that metadata says."""
    odd = (*NUMBERS, *TEXTS, 0.5, None, True, b"raw", (), ("a",), [1])
    what = rng.choice(("way", "way", "place", "place", "size", "chunk", "properties", "drop", "rename", "kind"))
    names = sorted(metadata.state_dict_metadata, key=str)
    name = rng.choice(names)
    entry = metadata.state_dict_metadata[name]
    index = rng.choice(sorted(metadata.storage_data, key=str))
    if what == "way":
        depth, key = rng.choice((1, 2, 5, *DEPTHS[:7])), rng.choice(odd)
        way = rng.choice(
            ((key,), ("list", key), (key,) * depth, ("x", *[rng.choice((0, 1, 9999))] * depth), ("w", 1), odd)
        )
        metadata.planner_data[name] = rng.choice((way, list(way), way, key))
    elif what == "place":
        info = metadata.storage_data[index]
        field = rng.choice(("offset", "length", "relative_path"))
        is_known = isinstance(info.offset, int) and isinstance(info.length, int)  # else it was changed before
        near = (info.offset + 1, info.length - 1, info.length * 2) if is_known else ()
        if field == "relative_path":
            near = (info.relative_path,)
        setattr(info, field, rng.choice((*odd, *near)))
    elif what in ("size", "chunk", "properties") and hasattr(entry, "chunks"):
        sizes = [each for each in NUMBERS if abs(each) < 1 << 63]
        size = torch.Size(rng.choice(sizes) for _ in range(rng.choice((1, len(entry.size), len(entry.size), 65))))
        if what == "size":
            entry.size = rng.choice((size, size, rng.choice(odd)))
        elif what == "chunk":
            setattr(rng.choice(entry.chunks), rng.choice(("sizes", "offsets")), rng.choice((size, torch.Size((0,)))))
        else:
            entry.properties.dtype = rng.choice(
                (torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
            )
    elif what == "drop":
        del metadata.state_dict_metadata[name]
    elif what == "rename":
        metadata.state_dict_metadata[rng.choice(odd[:60])] = entry
    elif what == "kind":
        metadata.state_dict_metadata[name] = rng.choice((metadata.state_dict_metadata[rng.choice(names)], *odd))
    return f"{what} of {name}"
