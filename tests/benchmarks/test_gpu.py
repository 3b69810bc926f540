"""``make gpu`` and ``make gpu-quick`` write their page whatever fails, and claim no figure of a GPU without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stagereg

from . import gpu, gpu_figures, gpu_risks

LARGE = {"bytes": 10**10, "tensors": 900, "bytes_per_s": 49e9, "blocked_s": 1.9e-3, "step_s": 0.5, "slower": 0.01}
STAGING = [
    {"row": "blocking", "failure": "OSError"},
    {"row": "pinned_cached", "ratio": 1.04},
    {"row": "x", "ratio": 2.0},
]
ALL_RISKS = [f"R{number}" for number in range(1, 13)]
WHOLE = ["machine", "tests", *gpu.RISKS, "link", "large", "staging", "stall", "beside", "restore", "write"]
QUICK = [name for name in WHOLE if name not in ("large", "write")]


def results(beside: float = 1.1, **changed: Any) -> dict[str, Any]:
    """Return the results of a run on a GPU that reaches all targets, except for the ``changed`` figures of large."""
    staging = {"groups": [{"name": "large", "rows": STAGING}, {"name": "gpt", "rows": []}]}
    rows = [{"row": "no save", "ratio": 1.0}, {"row": "overlapped", "ratio": beside}]
    found = {"link": {"bytes_per_s": 50e9}, "large": {**LARGE, **changed}, "staging": staging}
    return {**found, "beside": {"rows": rows}}


def reached(found: dict[str, Any], device: str = "cuda") -> list[bool | None]:
    return [row[2] for row in gpu.targets(found, device)]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time; {code}", *arguments]


def in_order(tmp_path: Path, *pieces: gpu.Piece) -> None:
    gpu.run(pieces, gpu.shares(True), gpu.QUICK_S, tmp_path)


def test_targets_are_compared_with_the_measured_figures() -> None:
    assert reached(results()) == [True] * 5
    assert reached(results(bytes_per_s=47e9)) == [False, True, True, True, True]
    assert reached(results(blocked_s=2.1e-3)) == [True, True, False, True, True]
    assert reached(results(slower=0.031)) == [True, True, True, False, True]
    assert reached(results(beside=1.21)) == [True, True, True, True, False]
    assert reached({"link": {}, "large": {}, "staging": {}, "beside": {}}) == [None] * 5
    assert reached(results(), "cpu") == [None] * 5
    assert [row[1] for row in gpu.targets(results(), "cuda")] == [
        "0.98", "0.96", "1.90 ms", "+1.0 % of 500 ms", "1.10",
    ]  # fmt: skip


# -- the limits of the quick size


def test_the_limits_of_the_quick_size_add_up_to_less_than_eight_minutes(tmp_path: Path) -> None:
    pieces = gpu.pieces("cuda", 1.0, None, tmp_path, quick=True)
    assert [piece.name for piece in pieces] == QUICK
    alone = sum(piece.limit_s for piece in pieces if not piece.share)
    together = sum(gpu.shares(quick=True)[share] for share in {piece.share for piece in pieces} - {""})
    assert alone + together <= gpu.QUICK_S - 15, "the rest is for starting and ending the processes"
    assert gpu.QUICK_S == 480
    assert all(piece.each_s <= piece.limit_s / 3 for piece in pieces if isinstance(piece, gpu.Tests))


def test_a_piece_gets_no_more_time_than_its_share_and_the_whole_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "shares", lambda quick: {"risks": 4.5})
    command = python("time.sleep(600)")
    first, second, third = (gpu.Risk(name, command, 2.0, "risks") for name in ("R1", "R2", "R3"))
    monkeypatch.setattr(gpu, "_LEAST_S", 1.0)
    second.limit_s = 60.0
    in_order(tmp_path, first, second, third)
    assert first.result == {"verdict": "fault", "figures": "stopped after 2 s"}
    for late in (second, third):
        assert late.result == {"verdict": "could not run", "figures": "the other checks used up the time"}
        assert late.error, "the page is not complete"
    assert (third.error, third.seconds < 0.1) == ("no time was left", True)
    monkeypatch.setattr(gpu, "QUICK_S", 1.0)
    last = gpu.Piece("last", command, 60)
    in_order(tmp_path, last)
    assert (last.error, last.seconds < 0.1) == ("no time was left", True)


# -- the risks


def test_each_of_the_twelve_risks_has_a_check_and_a_row_on_the_page(tmp_path: Path) -> None:
    assert sorted(gpu.RISKS) == sorted(gpu_risks.CHECKS) == sorted(ALL_RISKS)
    for quick in (False, True):
        pieces = gpu.pieces("cuda", 1.0, None, tmp_path, quick)
        risks = [piece for piece in pieces if isinstance(piece, gpu.Risk)]
        assert [(piece.name, piece.command[-3]) for piece in risks] == [(name, name) for name in gpu.RISKS]
        rows = [line.split(" | ") for line in gpu.page(pieces, "cuda").splitlines() if line.startswith("| R")]
        assert [row[:3] for row in rows] == [[f"| {name}", gpu.RISKS[name], "could not run"] for name in ALL_RISKS]


def test_a_check_that_hangs_or_crashes_costs_only_its_row(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    said = {
        "R1": "print('R1 ok: 3 ms')",
        "R2": "print('R2 could not run: one NUMA node')",
        "R3": f"os.fork(); open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)",
        "R4": "os.kill(os.getpid(), 11)",
        "R5": "pass",
        "R6": "print('R6 fault: 9 ms'); sys.exit(1)",
        "R7": "print('R7 ok: 1 GB/s'); sys.stdout.flush(); os.kill(os.getpid(), 11)",
    }
    risks = [gpu.Risk(name, python(code), 1.5 if name == "R3" else 30, "risks") for name, code in said.items()]
    in_order(tmp_path, *risks)
    expected = {
        "R1": ("ok", "3 ms"),
        "R2": ("could not run", "one NUMA node"),
        "R3": ("**fault**", "stopped after 1.5 s"),
        "R4": ("**fault**", "exit code -11"),
        "R5": ("**fault**", "the check printed no verdict"),
        "R6": ("**fault**", "9 ms"),
        "R7": ("**fault**", "1 GB/s; exit code -11"),
    }
    rows = [line.split(" | ") for line in gpu.page(risks, "cuda").splitlines() if line.startswith("| R")]
    assert {row[0].strip("| "): (row[2], row[3]) for row in rows} == expected
    assert [risk.name for risk in risks if not risk.error] == ["R1", "R2"]
    states = [Path(f"/proc/{pid}/stat") for pid in pids.read_text().split()]
    assert not any(file.exists() and file.read_text().split()[2] != "Z" for file in states), "it and its child ended"
    assert "2 fault" not in gpu.page(risks[:3], "cuda")
    assert "1 ok, 5 fault, 1 could not run" in gpu.page(
        [gpu.Piece("a", [""], 1), gpu.Piece("b", [""], 1), *risks], "cuda"
    )


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("could not run", 0), ("fault", 1)])
def test_a_fault_makes_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    risk = gpu.Risk("R4", python(f"print('R4 {verdict}: 1 ms')"), 30, "risks")
    monkeypatch.setattr(gpu, "pieces", lambda *asked: [risk])
    assert gpu.main(["--out", str(tmp_path)]) == code
    (seen,) = json.loads((tmp_path / "gpu.json").read_text())["pieces"]
    assert seen["result"] == {"verdict": verdict, "figures": "1 ms"}


def test_an_exception_in_a_check_is_a_fault_and_a_missing_device_is_not() -> None:
    def broken() -> gpu_risks.Verdict:
        raise AttributeError("no such name")

    def without_nodes() -> gpu_risks.Verdict:
        raise gpu_risks.CannotRun("one NUMA node")

    assert gpu_risks.verdict_line("R3", broken, "cuda") == "R3 fault: AttributeError: no such name"
    assert gpu_risks.verdict_line("R3", broken, "cpu") == "R3 could not run: needs a GPU"
    assert gpu_risks.verdict_line("R7", without_nodes, "cuda") == "R7 could not run: one NUMA node"
    assert gpu_risks.verdict_line("R2", lambda: (False, "2 s"), "cpu") == "R2 fault: 2 s"


REHEARSAL = """
import contextlib, os, sys
import torch
import tests.benchmarks.gpu_risks as risks

class Event:
    def query(self):
        return False
    def synchronize(self):
        pass

def graph_of(run):
    run()
    return run

def hang(seconds):  # from now on, the device runs nothing of the model and the optimizer
    torch.optim.AdamW.step = lambda self: None
    torch.nn.Sequential.__call__ = lambda self, x: torch.zeros(1, requires_grad=True)

model_of = risks.model_of
risks.model_of = lambda nbytes, on_cpu=2**21, **options: model_of(nbytes, on_cpu)  # not capturable on a CPU
risks.DEVICE, risks.ON_CPU = "cpu", tuple(risks.CHECKS)
risks.busy, risks.mark, risks.graph_of = (lambda seconds: None), Event, graph_of
risks.capturing, risks.reserved = contextlib.nullcontext, (lambda: 0)
for name in sys.argv[1:]:
    if name == "R1":
        risks.busy = hang
    print(risks.verdict_line(name, risks.CHECKS[name], "cpu"), flush=True)
os._exit(0)
"""


SLOW = ["R3", "R6", "R11"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SLOW, marks=pytest.mark.slow, id="slow"),
        pytest.param([*(name for name in ALL_RISKS[1:] if name not in SLOW), "R1"], id="fast"),
    ],
)
def test_each_check_comes_to_a_verdict_on_a_device_double(names: list[str]) -> None:
    command = [sys.executable, "-c", REHEARSAL, *names]  # R1 is last, since no optimizer steps after it
    ran = subprocess.run(command, cwd=gpu.REPOSITORY, capture_output=True, text=True, timeout=110, check=True)
    found = dict(line.split(" ", 1) for line in ran.stdout.splitlines())
    assert found.keys() == set(names), ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    assert all("WRONG" not in text and "DIFFERENT" not in text for text in found.values()), found
    for name in found.keys() & {"R2", "R5", "R6", "R8", "R12"}:
        assert found[name].startswith("ok: "), found[name]
    if "R1" in found:
        assert found["R1"].startswith("ok: step 3 is 'whole'"), found["R1"]
    if "R3" in found:
        assert "NOT PAGE-LOCKED" in found["R3"], "the double has no page-locked memory"


# -- the tests


def planted(tmp_path: Path, code: str, limit_s: float, each_s: float) -> gpu.Tests:
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "test_planted.py").write_text(f"import os, time, pytest\n{code}")
    program = str(gpu.REPOSITORY / "tests/benchmarks/gpu_tests.py")
    options = ["--rootdir", str(folder), "-p", "no:cacheprovider", str(folder)]
    piece = gpu.Tests("tests", [sys.executable, "-P", program, "{out}", "{done}", *options], limit_s)
    piece.each_s = each_s
    return piece


def test_a_test_that_hangs_or_crashes_costs_only_itself(tmp_path: Path) -> None:
    code = """
def test_1(): pass
def test_2(): os.kill(os.getpid(), 11)
def test_3(): assert not "wrong value"
@pytest.mark.skip(reason="needs two GPUs")
def test_4(): pass
def test_5(): time.sleep(600)
def test_6(): pass
"""
    piece = planted(tmp_path, code, 60, 2.0)
    in_order(tmp_path, piece)
    failed, skipped = ({name[-6:]: why for name, why in piece.result[kind].items()} for kind in ("failed", "skipped"))
    assert piece.result["passed"] == 2
    assert list(failed) == ["test_2", "test_3", "test_5"]
    assert failed["test_2"] == "the process ended with exit code -11"
    assert "wrong value" in failed["test_3"]
    assert failed["test_5"] == "stopped after 2 s"
    assert skipped == {"test_4": "Skipped: needs two GPUs"}
    assert piece.error == "3 failed"
    assert all(text in gpu.page([piece], "cuda") for text in ("2 passed, 3 failed, 1 could not run", "needs two GPUs"))


def test_tests_without_time_are_named(tmp_path: Path) -> None:
    code = "def test_1(): pass\ndef test_2(): time.sleep(600)\ndef test_3(): pass\n"
    piece = planted(tmp_path, code, 6, 60.0)
    in_order(tmp_path, piece)
    assert piece.result["passed"] == 1
    whys = {name[-6:]: why for name, why in piece.result["skipped"].items()}
    assert whys == {"test_2": "no time was left to finish", "test_3": "no time was left"}
    assert piece.error == "stopped after its time; 1 had no time"


def test_a_file_that_cannot_be_imported_is_a_failure_and_no_test_is_an_error(tmp_path: Path) -> None:
    piece = planted(tmp_path, "import nowhere_at_all\n", 30, 10.0)
    in_order(tmp_path, piece)
    assert ["nowhere_at_all" in why for why in piece.result["failed"].values()] == [True]
    assert piece.error
    (tmp_path / "empty").mkdir()
    empty = planted(tmp_path / "empty", "", 30, 10.0)
    in_order(tmp_path / "empty", empty)
    assert empty.error == "no test was found"


def test_the_files_that_hold_the_risks_run_first_and_long_ones_last() -> None:
    tests = gpu.REPOSITORY / "tests"
    files = [Path(file).relative_to(tests).as_posix() for file in gpu.marked_files()]
    assert files[0] == "stagers/test_accelerator.py"
    assert files.index("join/test_batches.py") < files.index("checkpoint/storage/test_dcp.py")
    assert files.index("checkpoint/storage/test_dcp.py") < files.index("extensions/recovery/test_devices.py")
    assert len(set(files)) == len(files)


# -- the other pieces


def test_a_row_of_torch_that_fails_is_not_an_error(tmp_path: Path) -> None:
    for rows, error in ((["torch:pinned"], ""), (["torch:pinned", "overlapped"], "exit code 1"), ([], "exit code 1")):
        content = {"groups": [{"name": "gpt", "rows": [{"row": row, "failure": "KeyError"} for row in rows]}]}
        piece = gpu.Bench(
            "staging", python(f"open(sys.argv[1], 'w').write('''{json.dumps(content)}'''); sys.exit(1)", "{out}"), 30
        )
        in_order(tmp_path, piece)
        assert piece.error == error


def test_a_stager_has_a_row_for_each_way_to_pace_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Paced:
        def __init__(self, device_piece_mib: int = 64) -> None:
            if device_piece_mib == 32:
                raise stagereg.StageregError("must be 64")

    class Plain:
        pass

    monkeypatch.setattr(
        stagereg, "build", lambda kind, name, **options: {"overlapped": Paced}.get(name, Plain)(**options)
    )
    rows = gpu_figures.saving_rows()
    assert [row.row for row in rows] == [
        "no save",
        "overlapped",
        "overlapped, device_piece_mib=64",
        "overlapped, device_piece_mib=32",
        "pinned_cached",
        "no save (A/A)",
    ]
    assert [row.row for row in rows if row.failure] == ["overlapped, device_piece_mib=32"]


@pytest.mark.slow
def test_a_piece_that_fails_costs_its_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def piece(name: str, code: str, limit_s: float = 60.0) -> gpu.Piece:
        return gpu.Piece(name, python(code, "{out}"), limit_s)

    there = gpu.pieces("cpu", 0.001, 1, tmp_path)
    assert [each.name for each in there] == WHOLE
    some = [
        *(each for each in there if each.name in ("machine", "link")),
        piece("restore", "open(sys.argv[1], 'w').write('{no json')"),
        piece("large", "sys.exit('out of memory')"),
        piece("staging", "print('so far', flush=True); time.sleep(600)", 0.5),  # 4 times as long in a dry run
        gpu.Piece("write", [str(tmp_path / "nowhere")], 1.0),
    ]
    monkeypatch.setattr(gpu, "pieces", lambda *asked: some)
    assert gpu.main(["--device", "cpu", "--scale", "0.001", "--rounds", "1", "--out", str(tmp_path / "out")]) == 1
    seen, page = json.loads((tmp_path / "out" / "gpu.json").read_text()), (tmp_path / "out" / "gpu.md").read_text()
    errors = {each["name"]: each["error"] for each in seen["pieces"]}
    assert (errors["machine"], errors["link"], errors["large"]) == ("", "", "exit code 1")
    assert errors["restore"].startswith("JSONDecodeError")
    assert errors["staging"] == "stopped after 2 s"
    assert errors["write"].startswith("FileNotFoundError")
    assert seen["note"] == gpu.NO_GPU
    assert all(text in page for text in (gpu.NO_GPU, "out of memory", "so far", "stopped after 2 s", "GB/s to host"))
    assert page.count("not measured") == 5
    assert "staging: stopped after 2 s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "whole"])
def test_all_of_it_runs_without_a_gpu(tmp_path: Path, quick: bool) -> None:
    options = ["--device", "cpu", "--scale", "0.001", "--rounds", "1", "--out", str(tmp_path)]
    assert gpu.main([*options, *(["--quick"] if quick else [])]) == 0
    seen, page = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert {each["name"]: each["error"] for each in seen["pieces"]} == dict.fromkeys(QUICK if quick else WHOLE, "")
    assert {row["reached"] for row in seen["targets"]} == {None}
    assert page.count("not measured") == (3 if quick else 0)
    found = {each["name"]: each["result"] for each in seen["pieces"]}
    assert {name: found[name]["verdict"] for name in ALL_RISKS} == {
        name: "ok" if name in gpu_risks.ON_CPU else "could not run" for name in ALL_RISKS
    }
    texts = [gpu.NO_GPU, "### Could not run", "nccl between GPUs needs 2", "pinned_cached+dcp", "torch (A/A)"]
    if not quick:
        assert found["tests"]["passed"] >= 2, "the tests that run on a CPU instead"
        texts += ["first:pinned_cached", "torch:save"]
    assert all(text in page for text in texts)
