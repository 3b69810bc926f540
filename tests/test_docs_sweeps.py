"""The pages on sweeps and on many machines: commands are understood, configs compose, and the slow test runs them."""

from __future__ import annotations

import argparse
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
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import stagereg.commands.planning as planning
import stagereg.commands.reporting as reporting
from stagereg.sweep.metric import METRICS
from stagereg.sweep.render import FILES
from stagereg.sweep.result import RESULT

from .pages import fits

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SWEEPS = ROOT / "docs" / "sweeps.md"
SLURM = ROOT / "docs" / "slurm.md"
LIMIT_S = 400


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def consoles() -> list[tuple[str, str]]:
    """The commands of the page on sweeps, each with the output that the page shows."""
    parts = [part for text in blocks(SWEEPS, "console") for part in re.split(r"^\$ ", text, flags=re.M)[1:]]
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


def commands(page: Path) -> list[list[str]]:
    """All commands of a page, also those in its text and its tables, as lists of arguments."""
    text = page.read_text()
    scripts = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    spoken: list[str] = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    lines = [line for line, _ in consoles()] * (page == SWEEPS) + scripts + spoken
    return [shlex.split(line.rstrip("& "), comments=True) for line in lines]


def started(page: Path, program: str) -> list[list[str]]:
    """The arguments of each command of a page that starts ``program``."""
    found = [command[command.index(program) + 1 :] for command in commands(page) if program in command]
    return [[argument for argument in arguments if argument != "..."] for arguments in found]


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Any]:
    """Composes the example's config with the overrides of one job."""
    conf = tmp_path / "conf"
    shutil.copytree(EXAMPLES / "conf", conf)
    for text in blocks(SLURM, "yaml"):
        file = tmp_path / text.partition("\n")[0].removeprefix("# ")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf), version_base="1.3"):
        yield lambda overrides: compose("train", overrides=overrides, return_hydra_config=True)


def one_job(arguments: list[str]) -> list[str]:
    """Overrides with the first of each list of values."""
    given = [each for each in arguments if "=" in each and not each.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(given)
    first = []
    for override in overrides:
        value = next(iter(override.sweep_string_iterator())) if override.is_sweep_override() else None
        first.append(override.input_line if value is None else f"{override.get_key_element()}={value}")
    return first


@pytest.mark.parametrize("page", [SWEEPS, SLURM], ids=["sweeps", "slurm"])
def test_every_job_that_a_page_starts_composes(page: Path, composed: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    given = [[each for each in arguments if "=" in each and "$" not in each] for arguments in started(page, "train.py")]
    jobs = {tuple(one_job(arguments)) for arguments in given}
    for job in jobs:
        assert composed(list(job)).nproc >= 1
    assert len(jobs) >= 2


def test_the_launcher_of_the_page_is_one_that_submitit_takes(composed: Any) -> None:
    launcher = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.submitit_launcher")
    (arguments,) = [each for each in started(SLURM, "train.py") if "hydra/launcher=cluster" in each]
    cfg = composed(one_job(arguments)).hydra.launcher
    assert cfg._target_.endswith("SlurmLauncher")
    assert (cfg.nodes, cfg.tasks_per_node, cfg.max_num_timeout) == (2, 1, 3)
    params = {key: value for key, value in cfg.items() if key != "_target_"}
    submitit = pytest.importorskip("submitit")
    known = submitit.SlurmExecutor._valid_parameters() | submitit.AutoExecutor._typed_parameters().keys()
    ours = {"submitit_folder", "max_num_timeout"}
    names = {name.removeprefix("slurm_") for name in known}
    assert {str(key) for key in params} - ours <= names, launcher


def test_every_torchrun_of_a_page_is_understood() -> None:
    from torch.distributed.run import get_args_parser

    found = [each for each in started(SLURM, "torchrun") if "train.py" in each and "-m" not in each]
    for arguments in found:
        asked = get_args_parser().parse_args([re.sub(r"\$\w+", "2", each) for each in arguments])
        assert asked.training_script == "train.py"
        assert (asked.rdzv_backend, asked.nproc_per_node) == ("c10d", "8")
    assert len(found) == 2


def test_the_scripts_of_the_page_are_shell() -> None:
    scripts = blocks(SLURM, "bash")
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=LIMIT_S)
    assert len(scripts) == 4


def test_every_command_of_stagereg_on_the_pages_is_understood() -> None:
    parser = argparse.ArgumentParser()
    commands_of_parser = parser.add_subparsers(required=True)
    for module in (planning, reporting):
        module.add_to(commands_of_parser)
    found = [each for page in (SWEEPS, SLURM) for each in started(page, "stagereg") if len(each) > 1]
    for arguments in found:
        parser.parse_args(arguments)
    assert len(found) >= 4


def test_the_page_describes_every_figure() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w*) *\| (.*) \|$", SWEEPS.read_text(), re.M)
    assert rows == [(each.name, each.better, each.doc) for each in METRICS]


def test_the_page_names_every_file_of_a_sweep() -> None:
    (tree,) = (text for text in blocks(SWEEPS, "") if "multirun.yaml" in text)
    for name in (*FILES, RESULT, "metrics.jsonl", "metrics.rank1.jsonl"):
        assert name in tree


@pytest.mark.parametrize("page", [SWEEPS, SLURM], ids=["sweeps", "slurm"])
def test_the_links_of_a_page_have_targets(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_every_command_of_the_page_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "conf", tmp_path / "examples" / "conf")
    shutil.copy(EXAMPLES / "train.py", tmp_path / "examples")
    bin = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PATH": bin}
    for line, shown in consoles():
        if line == "cd examples":
            continue
        ended = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path / "examples",
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == ("failing" in line), f"$ {line}\n{ended.stdout}"
        printed = "".join(f"{each.rstrip()}\n" for each in ended.stdout.splitlines())
        assert fits(shown, printed), f"$ {line}\n{printed}\n-- the page shows\n{shown}"
