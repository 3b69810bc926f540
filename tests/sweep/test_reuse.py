"""Sweeps into one directory: whatever came before there, each job ends as it does alone, and nothing is mixed."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import stagereg.sweep.render as render
import stagereg.sweep.render.tables as tables
from stagereg import Checkpointer
from stagereg.sweep.plan import Plan
from stagereg.sweep.result import JobResult, jobs_in

STEPS = 4
VALUES = ("1", "2", "3")
CONFIG = """
defaults: [sweep: compare, _self_]
lr: 0
size: 0
scale: {scale}
sweep: {{metric: returned.score, direction: minimize}}
"""


@dataclass(frozen=True)
class Sweep:
    """One sweep: what it tries, how often, with which config, and what happens to it."""

    values: tuple[str, ...] = VALUES
    repeats: int = 1
    size: str = ""  # one more override; none if empty
    scale: int = 1  # in the YAML file, so in no override
    raises: str = ""  # the value of which every job raises
    killed_after: int | None = None  # steps of all jobs together
    how: type[BaseException] = KeyboardInterrupt
    batch: int | None = None

    @property
    def planned(self) -> set[tuple[str, int, bool]]:
        """Value, repeat, A/A of each job."""
        found = {(value, at, False) for value in self.values for at in range(self.repeats * self.values.count(value))}
        return found | {(self.values[0], at, True) for at in range(self.repeats if self.repeats > 1 else 0)}

    @property
    def overrides(self) -> list[str]:
        size = [f"size={self.size}"] if self.size else []
        batch = [f"hydra.sweeper.max_batch_size={self.batch}"] if self.batch else []
        return [f"lr={','.join(self.values)}", f"sweep.repeats={self.repeats}", *size, *batch]


def sweeps() -> st.SearchStrategy[Sweep]:
    """One in three is killed, one in three has a value that raises."""
    values = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(tuple)
    return st.builds(
        Sweep,
        values=values,
        repeats=st.sampled_from((1, 1, 2, 3)),
        size=st.sampled_from(("", "", "5")),
        scale=st.sampled_from((1, 1, 1, 2)),
        raises=st.sampled_from(("", "", *VALUES)),
        killed_after=st.none() | st.integers(1, 14),
        how=st.sampled_from((KeyboardInterrupt, SystemExit)),
        batch=st.sampled_from((None, None, 2)),
    )


def after(score: int, cfg: Any, step: int) -> int:
    """One step of training: no other job has the same."""
    return zlib.crc32(f"{score} {cfg.lr} {cfg.size} {cfg.scale} {cfg.sweep.repeat} {cfg.sweep.again} {step}".encode())


def alone(cfg: Any) -> int:
    score = 0
    for step in range(1, STEPS + 1):
        score = after(score, cfg, step)
    return score


@dataclass
class Directory:
    """One directory that sweeps go to, in this process."""

    folder: Path
    left: int | None = None  # steps until the kill
    how: type[BaseException] = KeyboardInterrupt
    raises: str = ""
    at_the_end: set[Path] = field(default_factory=set)  # jobs that were killed after their last step
    ranked: list[JobResult] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def train(self, cfg: Any) -> Any:
        output = Path(HydraConfig.get().runtime.output_dir)
        state: dict[str, Any] = {"score": 0}
        with Checkpointer(str(output / "checkpoints"), every=1, stager="blocking") as checkpointer:
            for step in range((checkpointer.restore(state) or 0) + 1, STEPS + 1):
                state["score"] = after(state["score"], cfg, step)
                checkpointer.maybe_save(step, state)
                checkpointer.wait()
                if str(cfg.lr) == self.raises and step == 2:
                    raise ValueError("as planned")
                if self.left is not None:
                    self.left -= 1
                    if self.left == 0:
                        self.at_the_end |= {output} if step == STEPS else set()
                        raise self.how(143)
        return {"score": state["score"]}

    def run(self, sweep: Sweep) -> int:
        """Run a sweep; return its exit code, 130 for Ctrl-C."""
        (self.folder / "app.yaml").write_text(CONFIG.format(scale=sweep.scale))
        self.left, self.how, self.raises = sweep.killed_after, sweep.how, sweep.raises
        self.ranked = []
        quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
        sys.argv = ["app.py", "-m", *sweep.overrides, *quiet, f"hydra.sweep.dir={self.out}"]
        try:
            hydra.main(config_path=str(self.folder), config_name="app", version_base="1.3")(self.train)()
        except KeyboardInterrupt:
            return 130
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            GlobalHydra.instance().clear()
        return 0


@pytest.fixture(scope="module")
def pages() -> Iterator[list[Any]]:
    """The comparisons that sweeps end with; drawing them takes most of the time."""
    seen: list[Any] = []
    root, argv = logging.getLogger(), sys.argv
    handlers = root.handlers[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "terminal", lambda comparison: None)
        patch.setattr(render, "write", lambda comparison, directory: seen.append(comparison) or [Path("report.html")])
        yield seen
    sys.argv, root.handlers[:] = argv, handlers


def check(directory: Directory, sweep: Sweep, code: int, before: dict[Path, bytes], comparisons: Sequence[Any]) -> None:
    for job in jobs_in(directory.out):
        cfg = OmegaConf.load(job.directory / ".hydra" / "config.yaml")
        if job.status == "completed":
            assert job.returned == {"score": alone(cfg)}, job.directory
            assert job.figures["returned.score"] == alone(cfg)
        elif job.status == "failed" and "as planned" not in str(job.error):
            assert "no step was taken" in str(job.error)
            assert job.directory in directory.at_the_end
            assert not job.figures
    for file, content in before.items():
        assert file.read_bytes() == content, "a completed result changed"
    identities = [(job.identity, (job.directory / ".hydra/config.yaml").read_text()) for job in jobs_in(directory.out)]
    assert len(set(identities)) == len(identities), "one job twice"
    plan = Plan.read(directory.out)
    assert plan is not None
    assert not plan.runs
    if code in (130, 143):
        assert directory.left == 0
        return
    assert code == (any(job.status == "failed" for row in comparisons[-1].rows for job in row.jobs))
    ranked = [job for row in comparisons[-1].rows for job in row.jobs]
    keys = [(dict(each.split("=") for each in job.overrides), job.repeat, job.again) for job in ranked]
    assert {(by_key["lr"], repeat, again) for by_key, repeat, again in keys} == sweep.planned
    assert len(keys) == len(sweep.planned)
    assert {by_key.get("size", "") for by_key, _, _ in keys} == {sweep.size}
    scales = {OmegaConf.load(job.directory / ".hydra" / "config.yaml").scale for job in ranked}
    assert scales == {sweep.scale}
    progress = plan.progress(jobs_in(directory.out))
    assert progress.completed + progress.failed == progress.planned == len(sweep.planned)


def completed(out: Path) -> dict[Path, bytes]:
    files = {path: path.read_bytes() for path in out.glob("*/result.json")}
    return {path: content for path, content in files.items() if json.loads(content)["status"] == "completed"}


def run_all(sequence: Sequence[Sweep], comparisons: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Directory(Path(folder))
        for sweep in sequence:
            before = completed(directory.out)
            code = directory.run(sweep)
            check(directory, sweep, code, before, comparisons)


def test_each_job_ends_as_it_does_alone_whatever_was_in_the_directory(pages: list[Any]) -> None:
    """A value in front of an unfinished one, in another order; more repeats; an edited YAML; a smaller sweep."""
    two = ("1", "2")
    run_all(
        [
            Sweep(two, killed_after=STEPS + 2),
            Sweep(("3", *two), raises="3"),
            Sweep(("2", "3"), repeats=2, killed_after=STEPS + 2, how=SystemExit),
            Sweep(("2",), repeats=2, scale=2),
            Sweep(("3", "3"), batch=1),
        ],
        pages,
    )


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("SEQUENCES", "20")))
@given(st.lists(sweeps(), min_size=2, max_size=4))
def test_each_job_of_any_sweeps_into_one_directory_ends_as_it_does_alone(
    pages: list[Any], sequence: list[Sweep]
) -> None:
    run_all(sequence, pages)
