"""``stagereg doctor``: every defect is one row with its remedy, even if it kills the process that tries it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stagereg.commands.doctor as doctor
from stagereg import cli
from stagereg.commands.child import ChildCall

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
    return {one["what"]: one for one in seen["findings"]}


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for the child that asks torch, and for the one that loads all built-in components, which take long."""
    begin, result = ChildCall.__init__, ChildCall.result

    def instead(self: ChildCall, function: str, *arguments: str) -> None:
        self.known = function.endswith("torch_findings") or len(arguments) > 1  # type: ignore[attr-defined]
        begin(self, *(["os:getcwd"] if self.known else [function, *arguments]))  # type: ignore[attr-defined]

    def answered(self: ChildCall, limit_s: float) -> tuple[Any, str]:
        return ([], "") if self.known else result(self, limit_s)  # type: ignore[attr-defined]

    monkeypatch.setattr(ChildCall, "__init__", instead)
    monkeypatch.setattr(ChildCall, "result", answered)


def test_a_healthy_machine_has_nothing_broken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = examined(capsys, 0, "--dir", str(tmp_path / "not" / "yet"))
    assert set(found) >= {
        *("python", "stagereg", "torch", "hydra-core", "omegaconf", "matplotlib", "safetensors"),
        *("cores", "memory", "accelerators", "collectives", "page-locked memory", "/dev/shm", "open files"),
        *(str(tmp_path), "Hydra options", "built-in components"),
    }
    assert found["built-in components"]["verdict"] == "ok"
    assert list(tmp_path.iterdir()) == [], "it left something behind"


def test_a_harmful_plugin_is_one_row_and_the_others_are_reported(
    install: Install, capsys: pytest.CaptureFixture[str], without_torch: None
) -> None:
    install("good_one", GOOD, {"stager.good": "Good"})
    install("newer", "print('imported')", {"stager.newer": "X"}, requires="hydra-stagereg>=99")
    install("lacking", "class X: ...", {"stager.lacking": "X"})
    install("unknown", "", {"stagr.x": "X"})
    bad = {
        "raises": ("raise ValueError('no licence')", "ValueError: no licence"),
        "leaves": ("raise SystemExit(7)", "SystemExit: 7"),
        "exits": ("import os\nprint('last', flush=True)\nos._exit(0)", "exit code 0; its last output: last"),
        "crashes": ("import os, signal\n\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV in <module> ("),
    }
    files = {name: install(name, source, {f"stager.{name}": "X"}) for name, (source, _) in bad.items()}
    found = examined(capsys, 1)
    assert (found["stager/good"]["verdict"], found["stager/good"]["found"]) == ("ok", "good_one 1.2")
    for name, (_, message) in bad.items():
        row = found[f"stager/{name}"]
        assert row["verdict"] == "broken"
        assert row["found"].startswith(f"{name} 1.2: ")
        assert message in row["found"]
        assert name in row["do"]
    assert f"{files['crashes']}:3" in found["stager/crashes"]["found"]
    assert "needs hydra-stagereg>=99" in found["stager/newer"]["found"]
    assert "method 'stage' is missing" in found["stager/lacking"]["found"]
    assert "Did you mean 'stager'?" in found["unknown 1.2"]["found"]


def test_a_plugin_that_hangs_is_ended_and_located(
    install: Install, capsys: pytest.CaptureFixture[str], without_torch: None, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    # It hangs with a child of its own, which must not outlive it, and without giving a signal a chance.
    source = f"""
import pathlib, signal, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
pathlib.Path({str(pid)!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Event().wait()
"""
    file = install("hanging", source, {"stager.hanging": "X"})
    found = examined(capsys, 1, "--timeout", "5")["stager/hanging"]
    assert found["found"].endswith(f"still running after 5 s: stuck in <module> ({file}:6)")
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


def test_a_limit_of_no_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout must be above 0 seconds, not 0." in capsys.readouterr().err


def row(findings: Any, what: str) -> doctor.Finding:
    return {one.what: one for one in findings}[what]


@pytest.mark.parametrize(
    ("accelerator", "backends", "pinning", "expected"),
    [
        ("", "gloo", "", {"accelerators": "missing", "collectives": "ok", "page-locked memory": "ok"}),
        ("", "", "", {"collectives": "broken"}),
        ("cuda", "gloo", "", {"accelerators": "ok", "collectives": "warn", "page-locked memory": "ok"}),
        ("cuda", "gloo nccl", "", {"collectives": "ok"}),
        ("cuda", "gloo", "CUDA error: OS call failed", {"page-locked memory": "broken"}),
    ],
)
def test_what_torch_finds_is_judged(
    accelerator: str, backends: str, pinning: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torch.distributed as dist

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
    for one in found.values():
        assert bool(one.do) == (one.verdict in ("warn", "broken"))
    assert pinning in found["page-locked memory"].found
    assert ("H200" in found["accelerators"].found) == bool(accelerator)


def test_versions_that_do_not_fit_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.4.0", "hydra-core": "1.3.8", "matplotlib": "3.11"}

    def version(name: str) -> str:
        if name not in there:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = {one.what: one for one in doctor.versions()}
    assert (found["torch"].verdict, found["torch"].found) == ("broken", "2.4.0, but stagereg needs >=2.11")
    assert found["torch"].do == "pip install 'torch>=2.11'"
    assert (found["omegaconf"].verdict, found["omegaconf"].do) == ("broken", "pip install 'omegaconf>=2.3'")
    assert found["safetensors"].verdict == "missing"
    assert found["safetensors"].do == "pip install 'hydra-stagereg[safetensors]'"
    assert (found["hydra-core"].verdict, found["matplotlib"].verdict) == ("ok", "ok")
    assert "hypothesis" not in found, "the requirements of its developers are not checked"


@pytest.mark.parametrize(("free", "verdict"), [(64 * 2**20, "warn"), (2**33, "ok")])
def test_little_shared_memory_is_reported(free: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(f_frsize=4096, f_blocks=2**34 // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: seen)
    found = row(doctor.limits(), "/dev/shm")
    assert found.verdict == verdict
    assert found.found.startswith("16 GiB, ")
    assert ("--shm-size" in found.do) == (verdict == "warn")


@pytest.mark.parametrize(("soft", "verdict"), [(256, "warn"), (1024, "ok"), (-1, "ok")])
def test_few_open_files_are_reported(soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 4096))
    found = row(doctor.limits(), "open files")
    assert found.verdict == verdict
    assert found.do == ("`ulimit -n 4096` before training" if verdict == "warn" else "")


def _refusing(condition: Callable[[int], bool], error: int) -> Callable[..., int]:
    opened = os.open

    def instead(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if condition(flags):
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *more, **others)

    return instead


def test_a_file_system_without_o_direct_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", _refusing(lambda flags: bool(flags & os.O_DIRECT), 22))
    found = doctor.directory(tmp_path, chosen=True)
    assert found.verdict == "warn"
    assert "O_DIRECT no" in found.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("chosen", "verdict"), [(True, "broken"), (False, "warn")])
def test_a_directory_that_cannot_be_written_is_reported(
    chosen: bool, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", _refusing(lambda flags: bool(flags & os.O_CREAT), 30))
    found = doctor.directory(tmp_path, chosen)
    assert (found.verdict, found.found) == (verdict, "cannot be written: Read-only file system")


def test_the_error_of_torch_or_a_built_in_component_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(None, "ImportError: libcudart.so"), ("stager/shared: no such thing", "")])
    monkeypatch.setattr(ChildCall, "result", lambda self, limit_s: next(answers))
    found = examined(capsys, 1)
    assert found["torch works"]["found"] == "ImportError: libcudart.so"
    assert found["built-in components"]["verdict"] == "broken"
    assert found["built-in components"]["found"].endswith("stager/shared: no such thing")


def test_a_function_in_a_child_returns_or_its_end_is_reported(install: Install) -> None:
    install("asked", "def twice(text):\n    print('noise')\n    return [text, text]\n", {})

    def call(function: str) -> tuple[Any, str]:
        with ChildCall(function, "a") as child:
            return child.result(60)

    assert call("asked:twice") == (["a", "a"], "")
    assert "has no attribute 'thrice'" in call("asked:thrice")[1]
    assert "No module named 'no_module'" in call("no_module:x")[1]


def _wait_for_the_end_of(pid: int) -> None:
    """Signal an orphan until it is gone; its new parent may take a moment to reap it."""
    for _ in range(2000):
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            raise ProcessLookupError
        os.kill(pid, 0)
        signal.sigtimedwait([], 0.005)
