"""Nothing of the user's is deleted, emptied or overwritten, whatever lies under the names that stagereg uses.

Each operation runs once to record every name in its directories that it makes, replaces, renames, writes or deletes.
Then it runs once more for each of these names, with something of the user's under that name. Tokens are the same in all
runs, as if an attacker had guessed each of them.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import logging
import os
import random
import re
import secrets
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import stagereg
import stagereg.base.record as record
import stagereg.commands.scaffold as scaffold
import stagereg.integrations.written as written
import stagereg.sweep.render as render
from stagereg import cli
from stagereg.errors import StageregError
from stagereg.extensions.callbacks.copy_to import CopyTo
from stagereg.extensions.interop.huggingface import HuggingFaceExport
from stagereg.integrations.named import NamedCheckpoints
from stagereg.sweep.callback import Compare
from stagereg.sweep.plan import Plan
from stagereg.sweep.result import results
from stagereg.sweep.selection import Source, compared

from .support.samples import result, write_hydra, write_run

pytestmark = pytest.mark.filterwarnings("ignore")

GIVEN = {*map(Path, ("run", "hf", "copies", "tier"))}  # a user may give a link, and then new files come there
KILLED = "0123456789ab"  # the token of a save that was killed
LEFT = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")  # a directory of this name is of our making, so that
STARTS = ("start", "save_again", "tier", "trainer_starts", "copy_to", "read")  # a run that starts deletes it


# -- the operations: each prepares its directories, yields when a name may be planted, and acts


def tensors(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), value)}, "n": value}


def saving(root: Path, **options: Any) -> stagereg.Checkpointer:
    stager = stagereg.build("stager", "blocking")
    return stagereg.Checkpointer(str(root / "run"), stager=stager, save_last=False, **{"keep": 1, **options})


def saved(root: Path, *steps: int, **options: Any) -> None:
    with saving(root, **options) as checkpointer:
        checkpointer.restore(tensors(0))
        for step in steps:
            checkpointer.save(step, tensors(step))
            checkpointer.wait()


def start(root: Path) -> Iterator[None]:
    """A run starts where a killed one has left something, saves, and deletes what is no longer kept."""
    saved(root, 1)
    left = root / "run" / f".step-00000009.{KILLED}.tmp"
    shutil.copytree(root / "run" / "step-00000001", left)
    yield
    saved(root, 2, 3)


def save(root: Path) -> Iterator[None]:
    """A run that has started saves twice."""
    saved(root, 1)
    with saving(root) as checkpointer:
        checkpointer.save(2, tensors(2))
        checkpointer.wait()
        checkpointer._background.finish()  # deletes what is no longer kept
        yield
        for step in (3, 4):
            with contextlib.suppress(StageregError):
                checkpointer.save(step, tensors(step))
                checkpointer.wait()


def save_again(root: Path) -> Iterator[None]:
    """A run saves a step again that is there, and corrupt."""
    saved(root, 1, 2, keep=2)
    index = root / "run" / "step-00000002" / "index.json"
    index.write_bytes(index.read_bytes()[::-1])
    yield
    saved(root, 2, keep=1)


def tier(root: Path) -> Iterator[None]:
    """A run with a local tier starts again, after one that has left steps there."""

    def saved_to_both(*steps: int) -> None:
        saved(root, *steps, every=1, tier=stagereg.build("tier", "disk", dir=str(root / "tier"), every=1, copies=0))

    saved_to_both(1)
    yield
    saved_to_both(2, 3)


def dcp_writer(root: Path) -> Iterator[None]:
    """A checkpoint is replaced, and what killed saves have left is deleted."""
    for value in (1, 2):
        dcp.save(tensors(value), storage_writer=stagereg.DcpWriter(root / "a"), no_dist=True)
        if value == 1:
            for kind in ("tmp", "old"):
                (root / f".a.{KILLED}.{kind}").mkdir()
                (root / f".a.{KILLED}.{kind}" / "__0_0.distcp").write_bytes(b"killed")
            yield


def dcp_writer_by_two_renames(root: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctypes.CDLL", lambda *_, **__: None)
        yield from dcp_writer(root)


def trainer(root: Path) -> Iterator[None]:
    """Lightning saves to two paths, one of them again, and removes the other."""
    named = NamedCheckpoints(str(root), True, {"stager": stagereg.build("stager", "blocking")})
    try:
        named.save(tensors(1), named.begin("last.ckpt"))
        named.checkpointer.wait()
        yield
        for name in ("last.ckpt", "best.ckpt"):
            named.save(tensors(2), named.begin(name))
        named.checkpointer.wait()
        named.remove("best.ckpt")
    finally:
        named.close()


def trainer_starts(root: Path) -> Iterator[None]:
    (root / "last.ckpt").write_bytes(b"a file of Lightning")
    yield
    yield from itertools.islice(trainer(root), 1, None)


def export_for_trainer(root: Path) -> Iterator[None]:
    """As torchtitan's and the Hugging Face Trainer's: a directory is replaced, and an older one deleted."""
    for step in (5, 6, 5):
        if step == 6:
            yield
        beside = written.begin(str(root / f"best-{step}"))
        Path(beside, "model.safetensors").write_bytes(b"x")
        written.commit(beside, str(root / f"best-{step}"))
    written.remove(str(root / "best-6"))


def convert(root: Path) -> Iterator[None]:
    saved(root, 1)
    yield
    for out in ("out.pt", "out.safetensors"):
        assert cli.main(["convert", str(root / "run"), str(root / out), "--force"]) == 0


def huggingface(root: Path) -> Iterator[None]:
    saved(root, 1)
    (root / "pretrained").mkdir()
    (root / "pretrained" / "config.json").write_text("{}")
    (root / "hf").mkdir()
    yield
    component = HuggingFaceExport(str(root / "hf"), pretrained=str(root / "pretrained"))
    component.committed(SimpleNamespace(path=str(root / "run" / "step-00000001"), step=1))


def copy_to(root: Path) -> Iterator[None]:
    with saving(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, tensors(step))
            checkpointer.wait()
            checkpointer._background.finish()
            if step == 2:
                yield
            at = root / "run" / f"step-0000000{step}"
            CopyTo(str(root / "copies"), keep=1).committed(SimpleNamespace(path=str(at), step=step))


def read(root: Path) -> Iterator[None]:
    saved(root, 1)
    yield
    for command in ("ls DIR", "ls DIR --leftovers", "verify DIR"):
        cli.main(command.replace("DIR", str(root / "run")).split())
    with stagereg.open_checkpoint(str(root / "run")) as checkpoint:
        assert checkpoint["model.w"][0] == 1


def job(root: Path) -> Iterator[None]:
    result(root, returned=1).write()
    yield
    result(root, returned=2).write()


def sweep(root: Path) -> Iterator[None]:
    """A sweep leaves its plan and its report; then another sweeper clears that plan away."""
    write_run(root / "0")
    write_hydra(root / "0", ["a=1"], 0)
    result(root / "0", returned=1).write()
    Plan(root, (), "").write()
    yield
    render.write(compared([Source(root, tuple(results(root)), Plan(root, ()), None, 0)]), root)
    Plan(root, (), "").write()
    if (root / "sweep.json").is_file():
        Compare("loss")  # registers nothing
        Path(root / "sweep.json").unlink()


def recording(root: Path) -> Iterator[None]:
    for _ in range(2):
        with record.recording(root, 0, 1):
            record.emit("step", step=1)
        yield


def new(root: Path) -> Iterator[None]:
    yield
    scaffold.make("stager", "mine", root)


OPERATIONS: dict[str, Callable[[Path], Iterator[None]]] = {
    each.__name__: each
    for each in (
        start,
        save,
        save_again,
        tier,
        dcp_writer,
        dcp_writer_by_two_renames,
        trainer,
        trainer_starts,
        export_for_trainer,
        convert,
        huggingface,
        copy_to,
        read,
        job,
        sweep,
        recording,
        new,
    )
}


# -- which names an operation uses

_EVENTS = {  # of the audit hook: which of its arguments are paths
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.truncate": (0,),
    "shutil.rmtree": (0,),
}
_seen: list[set[str]] = []  # of the operation that is being recorded


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _seen:
        if event == "open" and isinstance(given[0], str | bytes) and isinstance(given[2], int):
            places = (0,) if given[2] & (os.O_WRONLY | os.O_RDWR) else ()
        else:
            places = _EVENTS.get(event, ())
        for at in places:
            if isinstance(given[at], str | bytes | os.PathLike):
                _seen[0].add(os.path.abspath(os.fsdecode(given[at])))


sys.addaudithook(_hook)  # for the rest of the process; it costs nothing while nothing is recorded


@contextlib.contextmanager
def guessed() -> Iterator[None]:
    """Every random name is the same each time the block runs."""
    count, chosen = itertools.count(), random.Random(7)

    def token(nbytes: int | None = None) -> bytes:
        return hashlib.sha256(b"%d" % next(count)).digest()[: nbytes or 32]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda nbytes=None: token(nbytes).hex())
        patch.setattr(secrets, "token_bytes", token)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=token(16)))
        patch.setattr("tempfile._RandomNameSequence.rng", property(lambda self: chosen))
        yield


BY_SYSTEM_CALL = {  # names that two directories exchange, of which the hook is not called
    "dcp_writer": ["a"],
    "trainer_starts": ["last.ckpt"],
    "export_for_trainer": ["best-5"],
}


def names_of(operation: Callable[[Path], Iterator[None]], root: Path) -> list[Path]:
    """Return the names in directories that were there before that the operation writes, replaces or deletes."""
    with guessed():
        acting = operation(root)
        next(acting)
        there = {os.path.abspath(folder) for folder, *_ in os.walk(root)}
        _seen.append(set())
        try:
            run(acting)
        finally:
            used = _seen.pop()
    inside = re.compile(r"/(\.?step-\d+\.?[^/]*|\.hydra)/")  # of a checkpoint, which is deleted as a whole
    found = {Path(each).relative_to(root) for each in used if os.path.dirname(each) in there}
    found |= {*map(Path, BY_SYSTEM_CALL.get(operation.__name__, ()))}
    return sorted(each for each in found if not inside.search(f"/{each}"))


def run(acting: Iterator[None]) -> None:
    """Have an operation act; it may fail, and must not harm anything."""
    with contextlib.suppress(StageregError, OSError, CheckpointException, AssertionError):
        for _ in acting:
            pass


# -- what is planted there

LONG = ("start", "save", "save_again", "tier")
KINDS = ("a link to a folder", "a link to a file", "a link to a checkpoint", "a folder")


def tree(path: Path) -> dict[str, bytes]:
    return {os.fspath(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def plant(kind: str, path: Path, home: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
    if kind == "a folder":
        shutil.copytree(home, path)
    else:
        to = {"a link to a folder": home, "a link to a file": home / "rc", "a link to a checkpoint": home / "archive"}
        path.symlink_to(to[kind])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user, with the checkpoint of another run."""
    home = tmp_path_factory.mktemp("home")
    (home / "docs").mkdir()
    (home / "docs" / "thesis").write_text("years of work")
    (home / "rc").write_text("exec zsh")
    saved(home, 1)
    (home / "run" / "step-00000001").rename(home / "archive")
    shutil.rmtree(home / "run")
    return home


MOST = [  # the names that others write through, and what a user has; the other kinds of links take as long again
    pytest.param(name, kind, marks=pytest.mark.slow if name in LONG and kind in KINDS[::2] else ())
    for name in OPERATIONS
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), MOST)
def test_what_the_user_has_under_a_name_of_ours_is_not_touched(
    name: str, kind: str, tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    operation, harmed, before = OPERATIONS[name], Counter[str](), tree(home)
    (tmp_path / "root").mkdir()
    names = names_of(operation, tmp_path / "root")
    assert names
    for number, each in enumerate(names):
        root, own = tmp_path / f"{number}" / "root", tmp_path / f"{number}" / "home"
        root.mkdir(parents=True)
        shutil.copytree(home, own)
        with guessed():
            acting = operation(root)
            next(acting)
            plant(kind, root / each, own)
            run(acting)
        wrong = before.items() ^ tree(own).items() if each not in GIVEN else before.items() - tree(own).items()
        if wrong:
            harmed[f"{each}: {sorted(wrong)[:3]}"[:300]] += 1
        lost = before.items() - tree(root / each).items()
        if kind == "a folder" and lost and not (LEFT.fullmatch(each.name) and name in STARTS):
            harmed[f"{each}: emptied, {sorted(lost)[:3]}"[:300]] += 1
    assert not harmed, "\n".join(harmed)


def test_each_module_that_deletes_or_replaces_something_is_known() -> None:
    """Add an operation above for a new one. It makes names with ``small_files.temporary``, and deletes only its own."""
    package = Path(stagereg.__file__).parent
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            match call.func:
                case ast.Attribute(value=ast.Name(id="os" | "shutil"), attr=name) if name in CHANGES:
                    pass
                case ast.Attribute(attr=name) if name in OF_PATHS:
                    pass
                case ast.Attribute(attr="replace" as name) if len(call.args) == 1 and not call.keywords:
                    pass  # of a path
                case ast.Name(id="discard" | "exchange" | "DiskFile" as name):
                    pass
                case ast.Name(id="open" as name) | ast.Attribute(attr="open" as name) if any(
                    isinstance(each, ast.Constant) and re.fullmatch("[wax]b?|r?b?[+]", str(each.value))
                    for each in call.args
                ):
                    pass
                case _:
                    continue
            found.setdefault(name, set()).add(file.relative_to(package).with_suffix("").as_posix())
    testing = {each for each in set().union(*found.values()) if each.startswith("testing/")}  # in folders of their own
    assert {name: sorted(modules - testing) for name, modules in found.items() if modules - testing} == KNOWN


CHANGES = {"rmtree", "unlink", "remove", "rename", "replace", "rmdir", "symlink", "link", "truncate", "copyfile"}
OF_PATHS = {"unlink", "rename", "rmdir", "symlink_to", "hardlink_to", "write_text", "write_bytes", "rmtree"}
KNOWN = {
    "DiskFile": ["checkpoint/store/local_files"],
    "discard": [
        "checkpoint/store/directory",
        "extensions/interop/dcp_writer",
        "extensions/tiers/folder",
        "extensions/tiers/server",
        "integrations/written",
    ],
    "exchange": ["extensions/interop/dcp_writer", "integrations/named", "integrations/written"],
    "link": ["checkpoint/store/directory"],
    "open": [
        "base/small_files",
        "commands/check_cases",
        "commands/checking",
        "commands/child",
        "commands/proving",
        "extensions/buckets/object_store",
        "extensions/callbacks/prove",
        "extensions/interop/export",
        "integrations/transformers",
    ],
    "rename": [
        "checkpoint/store/directory",
        "commands/scaffold",
        "extensions/interop/exchange",
        "extensions/prove/recording",
        "extensions/tiers/folder",
        "integrations/named",
    ],
    "replace": [
        "base/small_files",
        "checkpoint/store/directory",
        "extensions/interop/export",
        "extensions/tiers/server",
    ],
    "rmdir": ["checkpoint/save/store_target", "extensions/tiers/folder", "extensions/tiers/server"],
    "rmtree": ["base/small_files", "bench/stall", "commands/proving", "integrations/named", "integrations/torchtitan"],
    "symlink": ["checkpoint/store/directory"],
    "symlink_to": ["integrations/named"],
    "unlink": [
        "base/small_files",
        "checkpoint/store/directory",
        "checkpoint/store/lock",
        "extensions/callbacks/copy_to",
        "extensions/interop/export",
        "extensions/tiers/folder",
        "integrations/named",
        "sweep/callback",
        "sweep/interleaved",
        "sweep/render/__init__",
    ],
    "write_text": [
        "bench/command",
        "bench/measure",
        "commands/checking",
        "commands/child",
        "commands/proving",
        "commands/scaffold",
        "extensions/prove/recording",
    ],
}
