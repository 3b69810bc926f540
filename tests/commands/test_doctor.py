"""``stagereg doctor``: every defect is one row with its remedy, even if it kills the process that tries it."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stagereg.commands.doctor as doctor
import stagereg.kernel.compiled as compiled
from stagereg.commands.child import call_in_child

from ..support.programs import await_gone
from .conftest import GOOD, Command, Install


def examined(command: Command, code: int, *arguments: str) -> dict[str, dict[str, Any]]:
    seen = command("doctor", "--json", *arguments, code=code).json
    assert seen["broken"] == sum(one["verdict"] == "broken" for one in seen["findings"])
    return {one["what"]: one for one in seen["findings"]}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for the child that asks torch, and for the one that loads all built-in components, which take long."""

    def instead(function: str, *arguments: str, limit_s: float) -> tuple[Any, str]:
        if function.endswith("torch_finding"):
            return ("ok", "none"), ""
        return (None, "") if len(arguments) > 1 else call_in_child(function, *arguments, limit_s=limit_s)

    monkeypatch.setattr(doctor, "call_in_child", instead)


@pytest.mark.slow
def test_a_healthy_machine_has_nothing_broken(command: Command, tmp_path: Path) -> None:
    found = examined(command, 0, "--dir", str(tmp_path / "not" / "yet"))
    assert set(found) >= {
        *("python", "stagereg", "torch", "hydra-core", "omegaconf", "matplotlib", "safetensors"),
        *("machine", "accelerators", "copying", "/dev/shm", "page-locked memory", "open files"),
        *(str(tmp_path), "built-in components"),
    }
    assert "hypothesis" not in found, "the requirements of its developers are not checked"
    assert found["built-in components"]["verdict"] == "ok"
    assert list(tmp_path.iterdir()) == [], "it left something behind"


@pytest.mark.parametrize(("way", "verdict"), [("AVX2 streaming stores", "ok"), ("", "missing")])
def test_it_says_whether_the_compiled_part_copies(way: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "way", way)
    (found,) = [one for one in doctor._limits() if one.what == "copying"]
    assert found.verdict == verdict
    assert found.found == (f"compiled extension, {way}" if way else "memcpy of the C library: no compiled extension")
    assert "C compiler" in found.do


@pytest.mark.slow
def test_a_harmful_plugin_is_one_row_and_the_others_are_reported(
    install: Install, command: Command, without_torch: None, tmp_path: Path
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
    install("good_one", "print('noise')\n" + GOOD, {"stager.good": "Good"})
    install("newer", "print('imported')", {"stager.newer": "X"}, requires="hydra-stagereg>=99")
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
    found = examined(command, 1, "--timeout", "5")
    assert (found["stager/good"]["verdict"], found["stager/good"]["found"]) == ("ok", "good_one 1.2")
    for name, (_, message) in bad.items():
        row = found[f"stager/{name}"]
        assert row["verdict"] == "broken"
        assert row["found"].startswith(f"{name} 1.2: ")
        assert message.format(file=files[name]) in row["found"]
        assert name in row["do"]
    assert "needs hydra-stagereg>=99" in found["stager/newer"]["found"]
    assert "Did you mean 'stager'?" in found["unknown 1.2"]["found"]
    assert await_gone(int(pid.read_text()))


def test_the_table_has_remedies_and_counts(install: Install, command: Command, without_torch: None) -> None:
    install("breaks", "raise ValueError('no licence')", {"stager.breaks": "X"})
    seen = command("doctor", code=1).out
    assert "-> Fix, update or uninstall breaks 1.2." in seen
    assert "\n1 broken, " in seen
    assert "--timeout: must be above 0, got '0'" in command("doctor", "--timeout", "0", code=2).err


@pytest.mark.parametrize(
    ("accelerator", "backends", "verdict", "found"),
    [
        ("", "gloo", "ok", "none, so training runs on the CPU; backends: gloo"),
        ("", "", "broken", "backends: neither gloo nor nccl"),
        ("cuda", "gloo", "warn", "1 cuda; backends: gloo"),
        ("cuda", "gloo nccl", "ok", "1 cuda; backends: gloo, nccl"),
    ],
)
def test_what_torch_finds_is_judged(
    accelerator: str, backends: str, verdict: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gloo", "nccl"):
        monkeypatch.setattr(dist, f"is_{name}_available", lambda name=name: name in backends)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: int(bool(accelerator)))
    seen = doctor.torch_finding()
    assert seen[0] == verdict
    assert found in seen[1]


def test_what_does_not_fit_is_reported_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.4.0", "hydra-core": "1.3.8", "matplotlib": "3.11"}

    def version(name: str) -> str:
        if name not in there:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    findings = [*doctor._versions(), *doctor._limits(), doctor._directory(tmp_path)]
    found = {one.what: one[1:] for one in findings}
    assert found["torch"] == ("broken", "2.4.0, but stagereg requires >=2.11", "pip install 'torch>=2.11'")
    assert found["omegaconf"] == ("broken", "not installed", "pip install 'omegaconf>=2.3'")
    assert found["safetensors"] == ("missing", "optional, not installed", "pip install './stagereg[safetensors]'")
    assert (found["hydra-core"][0], found["matplotlib"][0]) == ("ok", "ok")
    assert found["/dev/shm"][:2] == ("warn", "64 MiB free")
    assert found["open files"][:2] == ("warn", "at most 256")
    assert found["page-locked memory"][:2] == ("ok", "at most 256 B")
    assert found[str(tmp_path)][0] == "broken"
    assert found[str(tmp_path)][1].startswith("not writable, ")


def test_an_error_of_torch_or_a_built_in_component_is_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(None, "ImportError: libcudart.so"), (None, "stager/shared: no such thing")])
    monkeypatch.setattr(doctor, "call_in_child", lambda *_, limit_s: next(answers))
    found = examined(command, 1)
    assert found["accelerators"]["found"] == "ImportError: libcudart.so"
    assert found["built-in components"]["verdict"] == "broken"
    assert found["built-in components"]["found"].endswith("stager/shared: no such thing")
