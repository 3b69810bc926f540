"""The pages: commands are understood and print what is shown, configs compose, tables are the code's, links lead."""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import stagereg
from stagereg import cli
from stagereg.sweep.metric import METRICS
from stagereg.sweep.render import FILES
from stagereg.sweep.result import RESULT

from .support.app import App
from .support.crash_points import POINTS
from .support.pages import DOCS, Page, fits

EXAMPLES = DOCS.parent / "examples"
SWEEPS, SLURM, MACHINES, FAILURES = map(Page, ("sweeps.md", "slurm.md", "several-machines.md", "rank-failures.md"))
EXPORT, QUICKSTART, JOIN = map(Page, ("export.md", "quickstart.md", "join.md"))
TASKS = [Page(f"{name}.md") for name in ("commit-protocol", "stagers", "retention", "callbacks")]
COMMANDS = [
    Page(f"{name}.md")
    for name in ("export", "sweeps", "slurm", "guarantees", "object-stores", "quickstart", "retention")
]
ALL = [Page(path.name) for path in sorted(DOCS.glob("*.md"))]
LIMIT_S = 400


def test_only_numbers_and_parts_written_as_dots_may_differ() -> None:
    for same in ("a\n  b  3.25 c\n", "a\n b 1,024 c\nd\n"):
        assert fits("a\n b 1 c\n...\n", same)
    for other in ("a\n b 21:29:45 c\n", "a\n b x c\n", "b 3.1 c\n"):
        assert not fits("a\n b 1 c\n...\n", other)


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Any]:
    """Composes the example's config with the overrides of one job."""
    conf = tmp_path / "conf"
    shutil.copytree(EXAMPLES / "conf", conf)
    App(tmp_path, {text.partition("\n")[0].removeprefix("# "): text for text in SLURM.of("yaml")})
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        yield lambda overrides: compose("train", overrides=overrides, return_hydra_config=True)


def one_job(arguments: list[str]) -> list[str]:
    """Overrides with the first of each list of values."""
    given = [each for each in arguments if "=" in each and "$" not in each and not each.startswith("-")]
    first = []
    for override in OverridesParser.create().parse_overrides(given):
        value = next(iter(override.sweep_string_iterator())) if override.is_sweep_override() else None
        first.append(override.input_line if value is None else f"{override.get_key_element()}={value}")
    return first


@pytest.mark.parametrize("pages", [("sweeps",), ("slurm",), ("tiers", "callbacks", "checkpoint-interval")])
def test_every_job_that_a_page_starts_composes(pages: tuple[str, ...], composed: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    jobs = {tuple(one_job(each)) for name in pages for each in Page(f"{name}.md").started("train.py")}
    for job in jobs:
        assert composed(list(job)).nproc >= 1
    assert len(jobs) >= 2


def test_the_launcher_of_the_page_is_one_that_submitit_takes(composed: Any) -> None:
    launcher = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    (arguments,) = [each for each in SLURM.started("train.py") if "hydra/launcher=cluster" in each]
    cfg = composed(one_job(arguments)).hydra.launcher
    assert cfg._target_.endswith("SlurmLauncher")
    assert (cfg.nodes, cfg.tasks_per_node, cfg.max_num_timeout) == (2, 1, 3)
    submitit = pytest.importorskip("submitit")
    known = submitit.SlurmExecutor._valid_parameters() | submitit.AutoExecutor._typed_parameters().keys()
    names = {name.removeprefix("slurm_") for name in known}
    assert set(cfg) - {"_target_", "submitit_folder", "max_num_timeout"} <= names, launcher


@pytest.mark.parametrize("page", [JOIN, SWEEPS], ids=["join", "sweeps"])
def test_the_config_of_a_page_composes(page: Page, tmp_path: Path) -> None:
    (config,) = page.of("yaml")
    (tmp_path / "train.yaml").write_text(config)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("train")
    assert cfg.checkpoint._target_
    assert cfg.join.joinables.model._target_ == "stagereg.join.adapt.auto" if page is JOIN else "sweep" in cfg


def test_the_python_of_the_pages_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, model = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    with stagereg.Checkpointer("runs/gpt") as checkpointer:
        checkpointer.save(100, {"model": saved})
    known = {"stagereg": stagereg, "torch": torch, "model": model}
    ran = [each for page in TASKS for each in page.of("python") if not re.match(r"# \w+\.py\n", each)]
    for text in ran:
        exec(compile(text, "page", "exec"), known)
    assert len(ran) == 5
    assert torch.equal(model.weight, saved.weight)
    printed = capsys.readouterr().out
    assert "{'held_out': 0.05}" in printed
    made = {"announced/step-00000020", "copied/step-00000010", "copies/step-00000010"}
    assert [each for each in made if not (tmp_path / "runs" / each).is_dir()] == []


def test_checkpoints_are_evaluated_inspected_and_exported_as_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    saved = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(saved.parameters())
    known: dict[str, Any] = {}
    with stagereg.Checkpointer("runs/gpt", keep=3) as training:
        for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0)):
            saved(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()
            stagereg.log(step, held_out=loss)
            training.save(step, {"model": saved, "optimizer": optimizer})
        training.wait()
        for text in EXPORT.of("python"):  # while the run holds the directory
            exec(compile(text, "page", "exec"), known)
        printed = capsys.readouterr().out
    assert (known["step"], known["best"].name) == (300, "step-00000200")
    assert torch.equal(known["model"].weight, saved.weight)
    assert "step 300" in printed
    assert "model.weight torch.float32 (64, 64)" in printed
    assert "only in one of them: []\nmodel.bias 0.00" in printed
    assert torch.load("backbone.pt", weights_only=True).keys() == {"backbone.weight", "backbone.bias"}
    commands = [each for each in EXPORT.started("stagereg") if len(each) > 1 and each[0] != "follow"]
    commands += [shlex.split(line, comments=True)[1:] for text in EXPORT.of("") for line in text.splitlines()]
    assert [cli.main(each) for each in commands] == [0] * 7
    assert torch.load("model.pt", weights_only=True).keys() == {"weight", "bias"}
    assert (tmp_path / "hf/model.safetensors").exists()


def test_every_torchrun_and_script_of_a_page_is_understood() -> None:
    from torch.distributed.run import get_args_parser

    started = [
        *(each for page in (MACHINES, FAILURES) for each in page.started("torchrun")),
        *(each[1:] for each in SLURM.started("stagereg") if each[:1] == ["run"]),
    ]
    found = [each for each in started if "train.py" in each and "-m" not in each]
    for arguments in found:
        asked = get_args_parser().parse_args([re.sub(r"\$\w+", "2", each) for each in arguments])
        assert asked.training_script == "train.py"
        assert (asked.rdzv_backend, asked.nproc_per_node) == ("c10d", "8")
    assert len(found) == 3
    scripts = [text for page in (MACHINES, FAILURES, SLURM) for text in page.of("bash")]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=LIMIT_S)
    assert len(scripts) == 5


def test_skypilot_starts_a_job_that_ended_with_75_again() -> None:
    from torch.distributed.run import get_args_parser

    task = yaml.safe_load((EXAMPLES / "clusters" / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True, timeout=LIMIT_S)
    command = shlex.split(re.sub(r"\$\w+|\$\([^)]*\)", "2", task["run"].replace("\\\n", " ")))
    assert command[:2] == ["stagereg", "run"]
    assert get_args_parser().parse_args(command[2:]).training_script == "train.py"


def test_every_command_of_stagereg_is_understood() -> None:
    parser = argparse.ArgumentParser()
    added = parser.add_subparsers(required=True)
    for module in dict.fromkeys(cli.BUILT_IN.values()):
        importlib.import_module(module).add_to(added)
    given = [each for page in COMMANDS for each in page.started("stagereg") if len(each) > 1]
    for arguments in given:
        parser.parse_args(list(itertools.takewhile(lambda word: word != ">", arguments)))
    assert {arguments[0] for arguments in given} == {"ls", "verify", "report", "follow", "run", "new"}


def test_the_tables_of_moments_figures_and_files_are_the_codes() -> None:
    table = Page("commit-protocol.md").text.partition("| point |")[2].partition("\n\n")[0]
    moments = re.findall(r"^\| `(\w+)` +\| ([^|]*?) +\|", table, re.M)
    assert moments == [(name, what.replace("``", "`")) for name, what in POINTS.items()]
    figures = re.findall(r"^\| `(\w+)` \| (\w*) *\| (.*) \|$", SWEEPS.text, re.M)
    assert figures == [(each.name, each.better, each.doc) for each in METRICS]
    (tree,) = (text for text in SWEEPS.of("") if "multirun.yaml" in text)
    assert [name for name in (*FILES, RESULT, "metrics.jsonl", "metrics.rank1.jsonl") if name not in tree] == []


def test_every_option_that_a_page_names_is_the_checkpointers() -> None:
    from stagereg.assembly import Checkpointer

    pages = [page for page in ALL if page.path.name != "messages.md"]  # torchtitan has options of that name
    named = {each for page in pages for each in re.findall(r"`checkpoint\.(\w+)(?:\.(\w+))?(?!\w*\()", page.text)}
    assert {
        ("restore", "verify"),
        ("failure", "on_error"),
        ("preemption", "grace_period"),
        ("resume", ""),
        ("dir", ""),
    } <= named
    takes = inspect.signature(Checkpointer).parameters
    assert [each for each in named if each[0] not in takes] == []
    assert [
        each for each in named if each[1] and each[0] != "on_commit" and not hasattr(takes[each[0]].default, each[1])
    ] == []


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_the_links_of_a_page_have_targets_on_the_site(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", Page(page).text):
        target = ((DOCS / page).parent / link).resolve() if link else DOCS / page
        assert target.exists(), link
        shown = target.relative_to(DOCS.parent).parts
        assert shown[0] in {"docs", "examples"} or (shown[0].endswith(".md") and len(shown) == 1), link
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", [QUICKSTART, SWEEPS], ids=["quickstart", "sweeps"])
def test_every_command_of_a_page_prints_what_it_shows(tmp_path: Path, page: Page) -> None:
    pytest.importorskip("safetensors")
    shutil.copytree(EXAMPLES / "conf", tmp_path / "conf")
    shutil.copy(EXAMPLES / "train.py", tmp_path)
    for program in page.of("python"):
        if named := re.match(r"# (\w+\.py)\n", program):
            (tmp_path / named[1]).write_text(program)
    bin = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PATH": bin}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    flipped = False
    for command in page.consoles():
        line = command.line
        if line == "cd examples":
            continue
        ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, timeout=LIMIT_S, **pipes)
        flipped = line.startswith("printf") or (flipped and line != "python train.py")  # a run saves the step again
        damaged = flipped and line.startswith("stagereg verify")
        assert ended.returncode == (damaged or "failing" in line), f"$ {line}\n{ended.stdout}"
        command.check("".join(f"{each.rstrip()}\n" for each in ended.stdout.splitlines()))


BEFORE_THE_DIFF = """\
from itertools import islice
import stagereg, torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.arange(320.0).view(40, 8).sin(), torch.arange(40) % 3)
loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(1))

def Model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

"""


@pytest.mark.slow
def test_a_torchrun_program_that_was_changed_as_shown_resumes_bit_for_bit(tmp_path: Path) -> None:
    (diff,) = Page("from-torchrun.md").of("diff")
    program = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in " +")
    app = App(tmp_path, {"conf/train.yaml": "defaults: [stagereg, _self_]\nnproc: 2\n"})
    (tmp_path / "train.py").write_text(f'{BEFORE_THE_DIFF}{program}\nif __name__ == "__main__":\n    train()\n')
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        done = app.run(f"checkpoint.dir={folder}", "checkpoint.every=5", script="train.py")
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000005", "step-00000010"]
        if folder == whole:
            shutil.copytree(whole / "step-00000005", resumed / "step-00000005")
    ends = [stagereg.open_checkpoint(folder / "step-00000010") for folder in (whole, resumed)]
    assert list(ends[0]) == list(ends[1])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_demo_of_the_readme_is_that_of_the_quickstart_whose_output_is_compared() -> None:
    readme, quickstart = Page("../README.md"), Page("quickstart.md")
    assert readme.of("python")[0] == quickstart.of("python")[0]
    shown = readme.of("console")[0].splitlines()
    tested = [line for block in quickstart.of("console") for line in block.splitlines()]
    tested.append("$ timeout -s KILL 9 python train.py")  # kills at a time; the quickstart kills at step 250
    patterns = [re.escape(line).replace(re.escape("..."), ".+") for line in tested]
    assert [line for line in shown if not any(re.fullmatch(each, line) for each in patterns)] == []


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_program_of_the_readme_runs_as_it_is_printed(tmp_path: Path, starts: int) -> None:
    readme = Page("../README.md")
    program, (config,) = readme.of("python")[1], readme.of("yaml")
    app = App(tmp_path, {"train.py": program, "conf/train.yaml": config})
    for said in ("training starts from scratch", "resumed from")[:starts]:
        done = app.fork("checkpoint.dir=kept", "checkpoint.every=20", script="train.py")
        assert done.returncode == 0, done.stderr
        assert said in done.stdout + done.stderr
        assert sorted(path.name for path in (tmp_path / "kept").glob("step-*")) == ["step-00000020", "step-00000030"]
        shutil.rmtree(tmp_path / "kept/step-00000030")  # the next run resumes at step 20, and repeats no batch
