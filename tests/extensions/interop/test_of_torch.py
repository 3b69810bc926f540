"""Directories that ``DcpWriter`` and plain torch wrote are listed, verified and restored as what they are."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.cli import main
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.object_store import ObjectStore
from stagereg.stagers.blocking import BlockingAsyncStager
from tests.checkpoint.state.test_optimizer_carries import Odd, nets

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = "__0_0.distcp"
BEGAN = 1_700_000_000


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(40.0) + step}


def save(root: Path, writer: str, step: int, name: str = "") -> Path:
    """Save a step with the ``Checkpointer`` (``own``), ``DcpWriter`` (``ours``) or plain torch."""
    path = root / (name or f"step-{step}")
    if writer == "own":
        with Checkpointer(str(root), resume="never", keep=9, stager=BlockingAsyncStager()) as checkpointer:
            checkpointer.save(step, state(step))
        return root / f"step-{step:08d}"
    if writer == "ours":
        dcp.save(state(step), storage_writer=stagereg.DcpWriter(path), no_dist=True)
    else:
        dcp.save(state(step), checkpoint_id=path, no_dist=True)
    return path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(each) for each in arguments]) == code, capsys.readouterr()
        return "".join(capsys.readouterr())

    return run


def rows(printed: str) -> dict[str, str]:
    """The end of each row of a table, from its state on, by its step."""
    lines = itertools.takewhile(bool, (" ".join(line.split()) for line in printed.splitlines()[3:]))
    state = re.compile("valid|no checksums|not verified|corrupt")
    return {line.split()[0]: line[found.start() :] for line in lines if (found := state.search(line))}


def test_each_writer_s_checkpoint_is_called_what_it_is(tmp_path: Path, command: Command) -> None:
    for writer, step in (("own", 10), ("ours", 20), ("torch", 30)):
        save(tmp_path, writer, step)
    assert rows(command("ls", tmp_path)) == {"30": "no checksums", "20": "not verified", "10": "not verified latest"}
    for asked in (tmp_path, *tmp_path.glob("step-*")):
        printed = command("verify", asked)
        assert "corrupt" not in printed
    printed = command("verify", tmp_path)
    assert rows(printed) == {"30": "no checksums", "20": "valid", "10": "valid"}
    assert "Read the content of every file: 2 checkpoints, all valid." in printed
    assert "1 saved by plain torch, without checksums" in printed


@pytest.mark.parametrize(
    ("writer", "change", "what"),
    [
        ("ours", lambda path: flip(path / DATA), f"{DATA}: CRC-32 mismatch"),
        ("ours", lambda path: (path / DATA).unlink(), f"{DATA}: missing"),
        ("ours", lambda path: (path / ".metadata").unlink(), ".metadata: missing"),
        ("ours", lambda path: (path / "checksums.json").write_text("{}"), "checksums.json: corrupt"),
        ("torch", lambda path: (path / DATA).unlink(), f"{DATA}: missing"),
        ("torch", lambda path: os.truncate(path / DATA, 9), f"{DATA}: truncated: 9 of "),
        ("torch", lambda path: (path / ".metadata").write_bytes(b"no pickle"), ".metadata: corrupt"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_file_that_is_missing_or_changed_is_named(
    tmp_path: Path, command: Command, writer: str, change: Callable[[Path], Any], what: str
) -> None:
    change(path := save(tmp_path, writer, 20))
    save(tmp_path, "torch", 5)
    for asked in (tmp_path, path):
        assert rows(command("verify", asked, code=1))["20"].startswith(f"corrupt {what}")
    with pytest.raises(CheckpointError, match=what.partition(":")[0]):
        stagereg.open_checkpoint(path, verify=writer == "ours")
    loaded = {"w": torch.zeros(40)}
    with Checkpointer(str(tmp_path), stager=BlockingAsyncStager(), save_last=False) as checkpointer:
        assert checkpointer.restore(loaded) == 5, "the damaged one is skipped"
    assert torch.equal(loaded["w"], state(5)["w"])


def test_a_metadata_file_that_names_code_runs_nothing(tmp_path: Path, command: Command) -> None:
    path = save(tmp_path, "torch", 20)
    code = f"cos\nmkdir\n(S'{tmp_path}/ran'\ntR."
    (path / ".metadata").write_bytes(f"{code}torch.distributed.checkpoint.metadata".encode())
    assert "names os.mkdir" in command("verify", tmp_path, code=1)
    assert not (tmp_path / "ran").exists()


def test_what_is_not_metadata_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02}r\0\0\0\1.")
    program = (
        "import sys, stagereg\n"
        "try: stagereg.open_checkpoint(sys.argv[1])\n"
        "except stagereg.StageregError as error: print('torch' in sys.modules, error)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False ")
    assert "not torch metadata" in done.stdout


def test_directories_of_any_name_are_listed_and_one_of_them_is_to_be_named(tmp_path: Path, command: Command) -> None:
    save(tmp_path, "torch", 3, "epoch-3")
    save(tmp_path, "ours", 4, "best")
    printed = command("verify", tmp_path)
    assert [printed.count(each) for each in ("no checksums", "valid\n", "all valid")] == [1, 1, 1]
    message = f"No checkpoint in {tmp_path} is named step-N. Give one of the directories there: best, epoch-3"
    with pytest.raises(CheckpointError) as refused:
        stagereg.open_checkpoint(tmp_path)
    assert message in str(refused.value)
    scratch = Checkpointer(str(tmp_path / "run"), save_last=False, stager=BlockingAsyncStager())
    with scratch as checkpointer, pytest.raises(CheckpointError, match="is named step-N"):
        checkpointer.restore(state(0), source=tmp_path)
    assert torch.equal(stagereg.open_checkpoint(tmp_path / "best", verify=True)["w"], state(4)["w"])


@pytest.mark.parametrize("order", [("own", "ours", "torch"), ("torch", "own", "ours"), ("ours", "torch", "own")])
def test_the_newest_is_the_one_that_was_written_last_whoever_wrote_it(tmp_path: Path, order: tuple[str, ...]) -> None:
    paths = [save(tmp_path, writer, step) for writer, step in zip(order, (30, 20, 10), strict=True)]
    set_times(tmp_path, paths)
    loaded = {"w": torch.zeros(40)}
    read = Checkpointer(str(tmp_path / "other"), save_last=False, stager=BlockingAsyncStager())
    with read as checkpointer:
        assert checkpointer.restore(loaded, source=tmp_path) == 10
    assert torch.equal(loaded["w"], state(10)["w"])
    assert torch.equal(stagereg.open_checkpoint(tmp_path)["w"], state(10)["w"])
    shutil.rmtree(paths[2])
    with Checkpointer(str(tmp_path), save_last=False, stager=BlockingAsyncStager()) as checkpointer:
        assert checkpointer.restore(loaded) == 20


def set_times(root: Path, paths: list[Path]) -> None:
    """Have the checkpoints be written one after the other, an hour apart."""
    for hours, path in enumerate(paths):
        at = BEGAN + 3600 * hours
        for name in ("manifest.json", "checksums.json"):
            if (path / name).exists():
                manifest = Manifest.loads((path / name).read_bytes())
                (path / name).write_text(replace(manifest, time=at).dumps())
        for file in path.iterdir():
            os.utime(file, (at, at))


def test_a_run_never_deletes_or_replaces_them(tmp_path: Path) -> None:
    paths = [save(tmp_path, "torch", 1, "step-00000001"), save(tmp_path, "ours", 2, "step-00000002")]
    before = {file: file.read_bytes() for path in paths for file in path.iterdir()}
    with Checkpointer(str(tmp_path), keep=1, stager=BlockingAsyncStager()) as checkpointer:
        loaded = state(0)
        assert checkpointer.restore(loaded) == 2
        for step in (2, 3, 4):
            checkpointer.save(step, loaded)
            checkpointer.wait()
    assert {file: file.read_bytes() for path in paths for file in path.iterdir()} == before
    assert (tmp_path / "step-00000004" / "manifest.json").exists()


def test_what_plain_torch_wrote_is_restored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for writer, warned in (("torch", True), ("ours", False)):
        save(root := tmp_path / writer, writer, 7)
        caplog.clear()
        with Checkpointer(str(root), save_last=False, stager=BlockingAsyncStager()) as checkpointer:
            assert checkpointer.restore(state(0)) == 7
        assert ("step-7 has no checksums, since plain torch wrote it" in caplog.text) == warned


def test_a_follower_takes_them_too_and_reports_a_corrupt_one(tmp_path: Path, command: Command) -> None:
    for writer, step in (("own", 10), ("ours", 20), ("torch", 30), ("ours", 40)):
        save(tmp_path, writer, step)
    flip(tmp_path / "step-40" / DATA)
    printed = command("follow", tmp_path, "--idle", "0", "--", "true", code=1)
    assert printed.count(": the command succeeded") == 3
    assert "step-40 is corrupt and was skipped: " in printed


def test_in_a_bucket_they_are_listed_and_to_be_copied_for_a_restore(tmp_path: Path, command: Command) -> None:
    root, path = f"memory://{tmp_path.name}/of-torch", save(tmp_path, "ours", 20)
    objects = ObjectStore(root)
    for file in path.iterdir():
        objects.put(f"{root}/step-20/{file.name}", file.read_bytes())
    assert "1 checkpoint, all valid" in command("verify", root)
    with pytest.raises(CheckpointError, match=r"from a URL.*Copy it to a local disk"):
        stagereg.open_checkpoint(root)
    checkpointer = Checkpointer(root, save_last=False, stager=BlockingAsyncStager())
    with checkpointer, pytest.raises(CheckpointError, match=r"from a URL.*Copy it to a local disk"):
        checkpointer.restore(state(0))
    objects.put(f"{root}/step-00000300.0123456789ab/.metadata", b"a save on its way")
    assert "being written" not in command("verify", root), "a save under way is none of torch's"


# -- other formats


def torch_save(path: Path, **how: Any) -> None:
    torch.save(torch.nn.Linear(3, 2).state_dict(), path, **how)


def safetensors(path: Path) -> None:
    pytest.importorskip("safetensors.torch").save_file(torch.nn.Linear(3, 2).state_dict(), path)


def hugging_face(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    safetensors(path / "model.safetensors")


FORMATS: dict[str, tuple[Callable[[Path], None], str]] = {
    "zip": (torch_save, "is a file that torch.save wrote, not"),
    "legacy": (
        lambda path: torch_save(path, _use_new_zipfile_serialization=False),
        "is a file that torch.save wrote in its format before torch 1.6, not",
    ),
    "safetensors": (safetensors, "is a safetensors file, not"),
    "hf": (hugging_face, "is a model directory of Hugging Face, not"),
    "pickle": (lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n.") and None, "is a pickle, which may run code"),
    "text": (lambda path: path.write_text("hello") and None, "is a file, not"),
    "empty": (lambda path: path.touch(), "is a file, not"),
    "pipe": (os.mkfifo, "is not a directory, not"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_path_in_another_format_is_called_what_it_is(tmp_path: Path, command: Command, kind: str) -> None:
    make, message = FORMATS[kind]
    make(path := tmp_path / "given")
    for asked in ("ls", "verify"):
        assert f"given {message}" in command(asked, path, code=2)
    for ask in (
        lambda: stagereg.open_checkpoint(path),
        lambda: restored(tmp_path / "run", {}, path),
        lambda: restored(tmp_path / "run", {"resume": str(path)}, None),
    ):
        with pytest.raises(CheckpointError) as refused:
            ask()
        assert f"given {message}" in str(refused.value)


def restored(root: Path, options: dict[str, Any], source: Path | None) -> None:
    reading = Checkpointer(str(root), save_last=False, stager=BlockingAsyncStager(), **options)
    with reading as checkpointer:
        checkpointer.restore(state(0), source=source)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_the_two_lines_that_the_message_gives_load_the_model(tmp_path: Path, kind: str) -> None:
    FORMATS[kind][0](path := tmp_path / "it's.pt")
    with pytest.raises(CheckpointError) as refused:
        stagereg.open_checkpoint(path)
    lines = [line.strip() for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert len(lines) == 2
    known: dict[str, Any] = {"torch": torch, "model": (model := torch.nn.Linear(3, 2))}
    if kind == "safetensors":
        exec("import safetensors.torch", known)
    before = model.weight.clone()
    exec("\n".join(lines), known)
    assert torch.equal(model.weight, known["saved"]["weight"])
    assert not torch.equal(model.weight, before)


def test_a_run_that_starts_from_scratch_next_to_a_file_of_weights_logs_lines_that_load_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**options: Any) -> list[str]:
        caplog.clear()
        restored(tmp_path, options, None)
        return [text for each in caplog.records if "starts from scratch, since" in (text := each.getMessage())]

    assert said() == []
    for kind, name in {"pickle": "a.ckpt", "text": "data.bin", "hf": "model.pt", "zip": "log.txt"}.items():
        FORMATS[kind][0](tmp_path / name)
    assert said() == []
    torch_save(tmp_path / "old.pt")
    os.utime(tmp_path / "old.pt", (1, 1))
    torch_save(path := tmp_path / "ckpt.pth")
    [text] = said()
    assert "It has ckpt.pth, which is a file that torch.save wrote. To begin with these weights, write before" in text
    assert "old.pt" not in text
    known: dict[str, Any] = {"torch": torch, "model": (model := torch.nn.Linear(3, 2))}
    exec("\n".join(line.strip() for line in text.splitlines()[1:]), known)
    assert torch.equal(model.weight, torch.load(path)["weight"])

    assert said(resume="never") == []
    ours = Checkpointer(str(tmp_path), save_last=False, stager=BlockingAsyncStager())
    with ours as checkpointer:
        checkpointer.save(1, state(0))
    assert said() == []


def test_a_source_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=f"There is no checkpoint in {source}"):
            restored(tmp_path / "run", {}, source)


def test_what_an_optimizer_has_beside_its_parameters_comes_back(tmp_path: Path) -> None:
    model, other = nets(1, 2)
    optimizer = Odd([{"params": [*model.parameters()]}, {"params": [], "lr": 0.5}])
    optimizer.state["global"], optimizer.beside = {"n": 3}, {"count": 4}
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "torch", no_dist=True)
    plain = Odd([{"params": [*other.parameters()]}, {"params": []}])
    with Checkpointer(str(tmp_path / "none"), resume=str(tmp_path / "torch")) as checkpointer:
        checkpointer.restore({"optimizer": plain})
    assert dict(plain.state["global"]) == {"n": 3}
    assert plain.beside == {"count": 4}
