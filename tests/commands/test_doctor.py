"""``stagereg doctor``: every defect is one row with its remedy, even if it kills the process that tries it."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.commands.doctor as doctor
from stagereg import cli
from stagereg.commands.child import call_in_child

from .conftest import Install

GOOD = """
class Good:
    should_synchronize_after_execute = True
    def __init__(self, slots: int = 2) -> None: ...
    def stage(self, state_dict): ...
    def synchronize_staging(self) -> None: ...
    def close(self) -> None: ...
"""


def examined(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> dict[str, dict[str, Any]]:
    assert cli.main(["doctor", "--json", *arguments]) == code
    seen = json.loads(capsys.readouterr().out)
    assert seen["broken"] == sum(one["verdict"] == "broken" for one in seen["findings"])
    for one in seen["findings"]:
        assert bool(one["do"]) == (one["verdict"] != "ok") or one["what"] == "accelerators"
    return {one["what"]: one for one in seen["findings"]}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for the child that asks torch, and for the one that loads all built-in components, which take long."""

    def instead(function: str, *arguments: str, limit_s: float) -> tuple[Any, str]:
        known = function.endswith("torch_findings") or len(arguments) > 1
        return ([], "") if known else call_in_child(function, *arguments, limit_s=limit_s)

    monkeypatch.setattr(doctor, "call_in_child", instead)


def test_a_healthy_machine_has_nothing_broken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = examined(capsys, 0, "--dir", str(tmp_path / "not" / "yet"))
    assert set(found) >= {
        *("python", "stagereg", "torch", "hydra-core", "omegaconf", "matplotlib", "safetensors"),
        *("cores", "memory", "accelerators", "collectives", "/dev/shm", "open files"),
        *(str(tmp_path), "built-in components"),
    }
    assert found["built-in components"]["verdict"] == "ok"
    assert list(tmp_path.iterdir()) == [], "it left something behind"


def test_a_harmful_plugin_is_one_row_and_the_others_are_reported(
    install: Install, capsys: pytest.CaptureFixture[str], without_torch: None, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    # It hangs with a child of its own, which must not outlive it, and without giving a signal a chance.
    hangs = f"""
import pathlib, signal, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Event().wait()
"""
    install("good_one", GOOD, {"stager.good": "Good"})
    install("unknown", "", {"stagr.x": "X"})
    bad = {
        "raises": ("raise ValueError('no licence')", "ValueError: no licence"),
        "leaves": ("raise SystemExit(7)", "SystemExit: 7"),
        "exits": ("import os\nprint('last', flush=True)\nos._exit(0)", "exit code 0; its last output: last"),
        "crashes": ("import ctypes\n\nctypes.string_at(0)", "crashed with SIGSEGV in <module> ({file}:3)"),
        "hangs": (hangs, "still running after 5 s: stuck in <module> ({file}:6)"),
        "lacking": ("class X: ...", "method 'stage' is missing"),
    }
    files = {name: install(name, source, {f"stager.{name}": "X"}) for name, (source, _) in bad.items()}
    found = examined(capsys, 1, "--timeout", "5")
    assert (found["stager/good"]["verdict"], found["stager/good"]["found"]) == ("ok", "good_one 1.2")
    for name, (_, message) in bad.items():
        row = found[f"stager/{name}"]
        assert row["verdict"] == "broken"
        assert row["found"].startswith(f"{name} 1.2: ")
        assert message.format(file=files[name]) in row["found"]
        assert name in row["do"]
    assert "Did you mean 'stager'?" in found["unknown 1.2"]["found"]
    with pytest.raises(ProcessLookupError):
        _wait_for_the_end_of(int(pid.read_text()))


def test_the_table_has_remedies_and_counts(
    install: Install, capsys: pytest.CaptureFixture[str], without_torch: None
) -> None:
    install("breaks", "raise ValueError('no licence')", {"stager.breaks": "X"})
    assert cli.main(["doctor"]) == 1
    seen = capsys.readouterr().out
    assert "-> Repair, update or uninstall breaks." in seen
    assert "\n1 broken, " in seen
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--timeout", "0"])
    assert "--timeout: must be above 0, not '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accelerator", "backends", "pinning", "expected"),
    [
        ("", "gloo", "", {"accelerators": "missing", "collectives": "ok"}),
        ("", "", "", {"collectives": "broken"}),
        ("cuda", "gloo", "", {"accelerators": "ok", "collectives": "warn", "page-locked memory": "ok"}),
        ("cuda", "gloo nccl", "", {"collectives": "ok"}),
        ("cuda", "gloo", "CUDA error: OS call failed", {"page-locked memory": "broken"}),
    ],
)
def test_what_torch_finds_is_judged(
    accelerator: str, backends: str, pinning: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def page_lock(*_: object, **__: object) -> None:
        if pinning:
            raise RuntimeError(pinning)

    for name in ("gloo", "nccl", "mpi"):
        monkeypatch.setattr(dist, f"is_{name}_available", lambda name=name: name in backends)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(accelerator))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "H200")
    monkeypatch.setattr(torch, "empty", page_lock)
    found = {one.what: one for one in doctor.torch_findings()}
    assert {what: found[what].verdict for what in expected} == expected
    assert not accelerator or pinning in found["page-locked memory"].found
    assert ("H200" in found["accelerators"].found) == bool(accelerator)


def test_versions_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.4.0", "hydra-core": "1.3.8", "matplotlib": "3.11"}

    def version(name: str) -> str:
        if name not in there:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = {one.what: one[1:] for one in doctor._versions()}
    assert found["torch"] == ("broken", "2.4.0, but stagereg needs >=2.11", "pip install 'torch>=2.11'")
    assert found["omegaconf"] == ("broken", "not installed", "pip install 'omegaconf>=2.3'")
    remedy = "pip install 'hydra-stagereg[safetensors]'"
    assert found["safetensors"] == ("missing", "not installed; of the extra 'safetensors'", remedy)
    assert (found["hydra-core"][0], found["matplotlib"][0]) == ("ok", "ok")
    assert (found["stagereg"][0], found["stagereg"][1].endswith("; its options are in every Hydra app")) == ("ok", True)
    assert "hypothesis" not in found, "the requirements of its developers are not checked"


def test_options_that_hydra_does_not_find_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    found = {one.what: one for one in doctor._versions()}["stagereg"]
    assert (found.verdict, found.found.endswith("; its options are only in apps that import it")) == ("warn", True)


@pytest.mark.parametrize(("content", "bound"), [("max", ""), ("1048576", ", the container's bound included")])
def test_the_bound_of_a_container_is_named_where_it_is_known(
    content: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: content)
    monkeypatch.setattr(doctor.machine, "cores", lambda: 2)
    found = {one.what: one.found for one in doctor._limits()}["memory"]
    assert found.endswith(f"iB{bound}")
    assert found.startswith("1 MiB") == bool(bound)


@pytest.mark.parametrize(
    ("free", "soft", "verdicts"),
    [(64 * 2**20, 1024, ("warn", "ok")), (2**33, 256, ("ok", "warn")), (2**33, -1, ("ok",) * 2)],
)
def test_little_shared_memory_and_few_files_are_reported(
    free: int, soft: int, verdicts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(f_frsize=4096, f_blocks=2**34 // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: seen)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 4096))
    found = {one.what: one for one in doctor._limits()}
    memory, files = found["/dev/shm"], found["open files"]
    assert (memory.verdict, files.verdict) == verdicts
    assert memory.found.startswith("16 GiB, ")
    assert "--shm-size" in memory.do
    assert files.do == "`ulimit -n 4096` before training"


@pytest.mark.parametrize(
    ("refused", "error", "asked", "verdict", "found"),
    [
        (os.O_DIRECT, 22, True, "warn", "O_DIRECT no"),
        (os.O_CREAT, 30, True, "broken", "cannot be written: Read-only file system"),
        (os.O_CREAT, 30, False, "warn", "cannot be written: Read-only file system"),
    ],
)
def test_what_checkpoints_lack_on_a_disk_is_reported(
    refused: int,
    error: int,
    asked: bool,
    verdict: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without_torch: None,
) -> None:
    opened = os.open

    def refusing(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & refused and "doctor" in str(path):
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.chdir(tmp_path)
    row = examined(capsys, int(verdict == "broken"), *(["--dir", str(tmp_path)] * asked))[str(tmp_path)]
    assert row["verdict"] == verdict
    assert found in row["found"]
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_torch_or_a_built_in_component_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(None, "ImportError: libcudart.so"), ("stager/shared: no such thing", "")])
    monkeypatch.setattr(doctor, "call_in_child", lambda *_, limit_s: next(answers))
    found = examined(capsys, 1)
    assert found["torch works"]["found"] == "ImportError: libcudart.so"
    assert found["built-in components"]["verdict"] == "broken"
    assert found["built-in components"]["found"].endswith("stager/shared: no such thing")


def test_a_function_in_a_child_returns_or_its_end_is_reported(install: Install) -> None:
    install("asked", "def twice(text):\n    print('noise')\n    return [text, text]\n", {})
    assert call_in_child("asked:twice", "a", limit_s=60) == (["a", "a"], "")
    assert "has no attribute 'thrice'" in call_in_child("asked:thrice", "a", limit_s=60)[1]
    assert "No module named 'no_module'" in call_in_child("no_module:x", "a", limit_s=60)[1]


def _wait_for_the_end_of(pid: int) -> None:
    """Signal an orphan until it is gone; its new parent may take a moment to reap it."""
    for _ in range(2000):
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            raise ProcessLookupError
        os.kill(pid, 0)
        signal.sigtimedwait([], 0.005)
