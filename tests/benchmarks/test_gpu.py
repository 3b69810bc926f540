"""``make gpu``: the page is written whatever fails, and says which figures are none of a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from . import gpu

LARGE = {"bytes": 10**10, "tensors": 900, "bytes_per_s": 49e9, "blocked_s": 1.9e-3, "step_s": 0.5, "slower": 0.01}
STAGING = [
    {"row": "blocking", "failure": "OSError"},
    {"row": "pinned_cached", "ratio": 1.04},
    {"row": "x", "ratio": 2.0},
]


def results(**changed: Any) -> dict[str, Any]:
    """What a run on a GPU has found, in which all that was measured is reached."""
    staging = {"groups": [{"name": "large", "rows": STAGING}, {"name": "gpt", "rows": []}]}
    return {"link": {"bytes_per_s": 50e9}, "large": {**LARGE, **changed}, "staging": staging}


def reached(found: dict[str, Any], device: str = "cuda") -> list[bool | None]:
    return [row[2] for row in gpu.targets(found, device)]


def test_targets_are_held_against_what_was_measured() -> None:
    assert reached(results()) == [True, True, True, True]
    assert reached(results(bytes_per_s=47e9)) == [False, True, True, True]
    assert reached(results(blocked_s=2.1e-3)) == [True, True, False, True]
    assert reached(results(slower=0.031)) == [True, True, True, False]
    assert reached({"link": {}, "large": {}, "staging": {}}) == [None] * 4
    assert reached(results(), "cpu") == [None] * 4
    assert [row[1] for row in gpu.targets(results(), "cuda")] == [
        "0.98", "0.96", "1.90 ms", "+1.0 % of 500 ms",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_piece_that_fails_costs_its_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def piece(name: str, code: str, limit_s: float = 60.0) -> gpu.Piece:
        return gpu.Piece(name, [sys.executable, "-c", f"import sys, time; {code}", "{out}"], limit_s)

    there = gpu.pieces("cpu", 0.001, 1, tmp_path)
    assert [each.name for each in there] == ["machine", "tests", "link", "large", "staging", "stall", "write"]
    some = [
        *(each for each in there if each.name in ("machine", "link")),
        piece("tests", "open(sys.argv[1], 'w').write('<no xml')"),
        piece("large", "sys.exit('out of memory')"),
        piece("staging", "print('so far', flush=True); time.sleep(600)", 2.0),
        gpu.Piece("write", [str(tmp_path / "nowhere")], 1.0),
    ]
    monkeypatch.setattr(gpu, "pieces", lambda *asked: some)
    assert gpu.main(["--device", "cpu", "--scale", "0.001", "--rounds", "1", "--out", str(tmp_path / "out")]) == 1
    seen, page = json.loads((tmp_path / "out" / "gpu.json").read_text()), (tmp_path / "out" / "gpu.md").read_text()
    errors = {each["name"]: each["error"] for each in seen["pieces"]}
    assert (errors["machine"], errors["link"], errors["large"]) == ("", "", "exit code 1")
    assert errors["tests"].startswith("ParseError")
    assert errors["staging"] == "stopped after 2 s"
    assert errors["write"].startswith("FileNotFoundError")
    assert seen["note"] == gpu.NO_GPU
    assert all(text in page for text in (gpu.NO_GPU, "out of memory", "so far", "stopped after 2 s", "GB/s to host"))
    assert page.count("not measured") == 4
    assert "staging: stopped after 2 s" in capsys.readouterr().out


@pytest.mark.slow
def test_all_of_it_runs_where_there_is_no_gpu(tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--scale", "0.001", "--rounds", "1", "--out", str(tmp_path)]) == 0
    seen, page = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert {each["name"]: each["error"] for each in seen["pieces"]} == dict.fromkeys(
        ("machine", "tests", "link", "large", "staging", "stall", "write"), ""
    )
    assert {row["reached"] for row in seen["targets"]} == {None}
    assert "not measured" not in page
    (tests,) = (each["result"] for each in seen["pieces"] if each["name"] == "tests")
    assert tests["passed"] >= 2, "what is in the place of runs on GPUs"
    for text in (
        gpu.NO_GPU,
        "### Could not run",
        "nccl between GPUs needs 2",
        "pinned_cached+dcp",
        "first:pinned_cached",
        "torch:save",
    ):
        assert text in page
