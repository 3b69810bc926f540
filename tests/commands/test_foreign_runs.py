"""Runs and sweeps that somebody else packed: ``stagereg report`` calls, shows and obeys nothing that is in them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagereg.sweep.files import _loader, json_of, lines_of, yaml_of

from .conftest import Command

SECRET = "sk-secret-4711"
READS = "${oc.env:API_KEY}"
ESCAPE = "\x1b]0;owned\x07\u202e"
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
RESULT = {"format": 1, "status": "completed", "error": None, "overrides": ["a=1"], "figures": {"loss": 1.0}}
START = {"event": "start", "format": 1, "world_size": 1, "t": 1.0, "host": "h"}
STEPS = [{"event": "step", "t": 1.0 + step, "step": step} for step in range(1, 5)]
END = {"event": "end", "status": "completed", "seconds": 1, "t": 7.0}
HEADS = "abcdefghijkl"
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in itertools.pairwise(HEADS)
)


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def sweep(root: Path, config: str = "", plan: str = "", **changed: Any) -> Path:
    """A sweep of two jobs, of which the first has this config and result."""
    for number, more in enumerate([changed, {"overrides": ["a=2"]}]):
        (hydra := root / str(number) / ".hydra").mkdir(parents=True)
        (hydra / "overrides.yaml").write_text(f'["a={number + 1}"]')
        (hydra / "config.yaml").write_text(config if not number else "a: 2\n")
        (root / str(number) / "result.json").write_text(json.dumps({**RESULT, "job": {"num": number}, **more}))
    (root / "multirun.yaml").write_text("{}\n")
    if plan:
        (root / "sweep.json").write_text(plan)
    return root


def run(root: Path, *events: dict[str, Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return root


def ended(command: Command, *arguments: object) -> str:
    """Return what a command printed that has ended with a report or with one error of the project."""
    try:
        return "".join(command(*arguments))
    except AssertionError:
        return "".join(command(*arguments, code=2))


@pytest.mark.parametrize("key", ["metric", "direction", "matters"])
def test_nothing_is_resolved(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    plan = {"format": 1, "jobs": [{"num": 0, "directory": "0", "overrides": ["a=1"]}], key: READS}
    for name, more in {"config": {"config": f"sweep:\n  {key}: {READS}\n"}, "plan": {"plan": json.dumps(plan)}}.items():
        root = sweep(tmp_path / name, overrides=[f"a={READS}"], error=READS, status="failed", **more)
        (root / "0" / ".hydra" / "hydra.yaml").write_text(f"hydra:\n  job:\n    name: {READS}\n")
        seen = [ended(command, "report", root, *more) for more in ((), ("--json",), ("--metric", "loss"))]
        seen += [ended(command, "report", root / "0", *more) for more in ((), ("--json",))]
        files = [path.read_text(errors="replace") for path in root.rglob("*") if path.is_file()]
        assert SECRET not in "".join([*seen, *files])
        assert READS in "".join(seen)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['exit 1']",
        ALIASES,
        "a: &a [*a]",
        "a: &a {b: 1}\nc:\n  <<: *a",
        deep(400),
        deep(101),
        f"a: {'9' * 5000}",
        f"a: 0x{'f' * 5000}",
        f"a: 1{':1' * 5000}",
        "a: 2026-01-01\nb: !!timestamp 2026-01-01",
        "!!set {a, b}",
        "a: '" + "x" * (1 << 20) + "'",
        "a: \0",
    ],
    ids=lambda text: text[:20],
)
def test_a_config_that_is_more_than_plain_data_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert yaml_of(tmp_path / "config.yaml") is None


def test_a_number_of_many_parts_is_refused_before_it_is_computed() -> None:
    with pytest.raises(yaml.YAMLError, match="a number is too long"):
        yaml.load(f"a: 1{':1' * 500}", Loader=_loader())


def test_a_config_is_read_as_it_is_and_never_through_a_link(tmp_path: Path) -> None:
    shared = "p: &p !!python/object/apply:pathlib.PosixPath [/a, b]\n"
    (tmp_path / "config.yaml").write_text(f"a: {READS}\nb: ???\nc: 1e-3\n{shared}q: &q text\nr: *q\n")
    content = {"a": READS, "b": "???", "c": 1e-3, "p": Path("/a/b"), "q": "text", "r": "text"}
    assert yaml_of(tmp_path / "config.yaml") == content
    (tmp_path / "link.yaml").symlink_to("config.yaml")
    assert yaml_of(tmp_path / "link.yaml") is None


ODD = [
    deep(90),
    '"x"',
    "5",
    "-1",
    "true",
    "{}",
    "[[]]",
    "1.7e308",
    str(2**70),
    "1" + "0" * 400,
    '"\\ud800"',
    '"\\u0000"',
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:12])
def test_an_odd_value_in_any_field_is_left_out_or_named(tmp_path: Path, command: Command, odd: str) -> None:
    value, seen = json.loads(odd), ""
    for number, field in enumerate(("status", "job", "repeat", "started", "figures", "versions", "environment")):
        root = sweep(tmp_path / f"result {number}", **{field: value})
        found = command("report", root, "--metric", "loss", "--json")
        assert {"a": "2"} in [row["parameters"] for row in found.json["rows"] if row["status"] == "completed"]
        seen += found.out + ended(command, "report", root / "0")
    job = {"num": 0, "directory": "0", "overrides": ["a=1"]}
    changes: list[dict[str, Any]] = [{key: value} for key in ("metric", "direction", "matters", "began", "jobs")]
    for number, change in enumerate([*changes, {"jobs": [{**job, "directory": value}]}]):
        plan = json.dumps({"format": 1, "jobs": [job], **change})
        seen += ended(command, "report", sweep(tmp_path / f"plan {number}", plan=plan), "--json")
    times = dict.fromkeys(("start", "seconds", "bytes"), value)
    extra: list[dict[str, Any]] = [
        {"event": name, "t": 2.0, "step": 1, **times} for name in ("stall", "stage", "write")
    ]
    extra += [{**START, "t": 1.5, "world_size": value, "host": value}, {**END, "error": value, "peak_rss": value}]
    root = run(tmp_path / "run", {**START, "world_size": 2}, *STEPS, *extra, END)
    shutil.copy(root / "metrics.jsonl", root / "metrics.rank1.jsonl")  # whose numbers are summed
    seen += command("report", root).out + command("report", root, "--json").out
    assert not CONTROLS.search(seen)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (deep(100_000), "nested too deeply"),
        ('{"format": 1, "figures": {}, "overrides": [], "returned": ' + deep(200) + "}", "nested too deeply"),
        ('{"format": ' + "9" * 5000 + "}", "digits"),
        ('{"format": ' + "9" * 100 + "}", "an integer is beyond"),
        ("[]", "not a mapping"),
        ("", "Expecting value"),
        ('"\\xff"', "escape"),
    ],
    ids=lambda text: text[:12],
)
def test_a_bad_result_is_named_and_costs_its_job_alone(
    tmp_path: Path, command: Command, content: str, why: str
) -> None:
    root = sweep(tmp_path / "sweep")
    (root / "0" / "result.json").write_text(content)
    rows = command("report", root, "--metric", "loss", "--json").json["rows"]
    assert [row["status"] for row in rows] == ["completed", "unfinished"]
    assert re.search(rf"sweep/0/result\.json .*{why}", rows[1]["error"])


def test_a_run_of_many_ranks_by_its_own_account_takes_no_memory(tmp_path: Path, command: Command) -> None:
    text = command("report", run(tmp_path / "run", {**START, "world_size": 1 << 24}, *STEPS)).out
    assert "No records of 16,777,215 ranks (1, 2, 3, 4, 5, 6, 7, 8, …)" in text
    assert (
        "1 corrupt line"
        in command("report", run(tmp_path / "run", START, {**START, "world_size": 1 << 40}, *STEPS)).out
    )


@pytest.mark.parametrize("kind", ["pipe", "device", "long line"])
def test_records_that_would_never_end_are_not_read(tmp_path: Path, command: Command, kind: str) -> None:
    path = run(tmp_path / "run", START, *STEPS) / "metrics.rank1.jsonl"
    if kind == "long line":
        path.write_bytes(b"x" * (1 << 24))
        with pytest.raises(OSError, match="more than 16,777,216 bytes"):
            list(lines_of(path))
    else:
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert "The run has no usable records: " in command("report", tmp_path / "run").out


def test_texts_of_other_people_are_shown_without_commands(tmp_path: Path, command: Command) -> None:
    where = tmp_path / f"sweep{ESCAPE}"
    odd = {
        "error": ESCAPE,
        "status": "failed",
        "overrides": [f"a={ESCAPE}", f"{ESCAPE}=1"],
        "versions": {"torch": ESCAPE},
    }
    root = sweep(where, config=ESCAPE, environment={ESCAPE: ESCAPE, "cpu": ESCAPE}, **odd)
    seen = [
        *command("report", root, "--metric", "loss"),
        *command("report", root / "0"),
        *command("report", root, "--json"),
    ]
    records = [START, *STEPS, {**END, "status": "failed", "error": f"x{ESCAPE}"}]
    seen += [*command("report", run(tmp_path / "run", *records)), *command("report", tmp_path / ESCAPE, code=2)]
    (root / "1" / "result.json").write_text("\udcff", errors="surrogateescape")
    seen += command("report", root, "--metric", ESCAPE, code=2)
    files = [(root / name).read_text() for name in ("report.html", "compare.csv", "compare.svg")]
    assert not CONTROLS.search("".join([*seen, *files]))
    assert all("\\x1b]0;owned" in text for text in (seen[0], seen[6], *files))


def test_no_cell_of_the_csv_is_a_formula_and_numbers_stay_numbers(tmp_path: Path, command: Command) -> None:
    root = tmp_path / "sweep"
    as_they_are = {"-1.5", "+2e-3", "a-b"}
    values = [
        "=cmd|calc!A1",
        "@SUM(1)",
        "+1+1",
        "-1+cmd|calc!A1",
        "\t=1",
        " =1",
        "\uff1d1",
        "-1_0",
        *sorted(as_they_are),
    ]
    for number, value in enumerate(values):
        (job := root / str(number)).mkdir(parents=True)
        content = {
            **RESULT,
            "overrides": [f"a={value}", "+b=1"],
            "job": {"num": number},
            "figures": {"loss": -2.5 - number},
        }
        (job / "result.json").write_text(
            json.dumps(content | {"error": "=1", "status": "failed"} if number == 0 else content)
        )
    (root / "multirun.yaml").write_text("{}\n")
    command("report", root, "--metric", "loss")
    head, *rows = csv.reader(io.StringIO((root / "compare.csv").read_text()))
    shown = {row[head.index("a")] for row in rows}
    assert shown == {value if value in as_they_are else f"'{value}" for value in values}
    assert {row[head.index("loss.median")] for row in rows} == {"", *(str(-2.5 - number) for number in range(1, 11))}
    assert {row[head.index("error")] for row in rows} == {"", "'=1"}
    assert all(row[head.index("overrides")].startswith("'+b=1") for row in rows)


def test_a_config_that_is_a_link_is_not_put_into_the_page(tmp_path: Path, command: Command) -> None:
    (tmp_path / "id_rsa").write_text(SECRET)
    root = sweep(tmp_path / "sweep")
    (config := root / "0" / ".hydra" / "config.yaml").unlink()
    config.symlink_to("../../../id_rsa")
    command("report", root, "--metric", "loss")
    page = (root / "report.html").read_text()
    assert SECRET not in page
    assert "a: 2" in page


def test_a_baseline_that_is_no_sweep_is_named(tmp_path: Path, command: Command) -> None:
    root = sweep(tmp_path / "sweep")
    good = command("report", root, "--metric", "loss", "--json").json
    for number, change in enumerate(
        [{"rows": 5}, {"rows": [{}]}, {"metric": 5}, {"better": []}, {"rows": [{**good["rows"][0], "status": []}]}]
    ):
        (path := tmp_path / f"{number}.json").write_text(json.dumps({**good, **change}))
        seen = command("report", root, "--metric", "loss", "--baseline", path, code=2).err
        assert f"{path} is not a baseline" in seen
    (path := tmp_path / "deep.json").write_text(deep(100_000))
    assert f"{path} is not a baseline" in command("report", root, "--baseline", path, "--metric", "loss", code=2).err
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of(path)
