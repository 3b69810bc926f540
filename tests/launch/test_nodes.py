"""Ranks on several machines: two agents of torchrun, or two tasks of a scheduler's job, on this one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

import stagereg.base.shutdown as shutdown
import stagereg.launch.rank as rank
from stagereg.errors import CheckpointError, LaunchError
from stagereg.launch.job import name_attempt
from stagereg.launch.main import _follow
from stagereg.launch.rank import Rank
from stagereg.launch.run_store import RunStore

from ..support.programs import LIMIT_S, SAVING, TORCHRUN, Program, await_port, free_port, run


class Agents(Program):
    """A user's program, and two folders from which two agents start it as if they were two machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, f"{SAVING}steps: 5\nat: []\ncheckpoint: {{every: 2}}\n")
        self.folders = [folder / "first", folder / "second"]
        for each in self.folders:
            each.mkdir()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, options: tuple[str, ...] = ()) -> None:
        """Start the first agent, and the second when the first one's rendezvous is open."""
        port = free_port()
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={self.folder.name}")
        command = [*TORCHRUN[:3], "--nnodes=2", "--nproc-per-node=1", *meeting, *options]
        command += ["../train.py", *arguments, f"answers={self.answers}"]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        for folder in self.folders:
            agent = subprocess.Popen(command, cwd=folder, env=env, text=True, start_new_session=True, **pipes)
            self.running.append(agent)
            if len(self.running) == 1:
                await_port(port)

    def run_both(self, *arguments: str, **start: Any) -> list[tuple[int, str, str]]:
        """Run the program to its end; return exit code, stdout and stderr of each agent."""
        self.start(*arguments, **start)
        return self.end()

    def end(self) -> list[tuple[int, str, str]]:
        """Wait for both agents."""
        with ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda agent: agent.communicate(timeout=LIMIT_S), self.running))
        ended = [(agent.returncode, *both) for agent, both in zip(self.running, outputs, strict=True)]
        self.running.clear()
        return ended


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for agent in agents.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


@pytest.mark.slow
def test_agents_that_start_in_different_folders_are_one_run(agents: Agents) -> None:
    for code, _, stderr in agents.run_both():
        assert code == 0, stderr
    first, second = agents.answer(0), agents.answer(1)
    assert first["agent"] != second["agent"]
    assert (first["run"], first["stamp"]) == (second["run"], second["stamp"])
    (folder,) = agents.run_folders()
    assert folder == Path(first["run"])
    assert folder.is_relative_to(first["agent"])
    (log,) = agents.folder.rglob("train.log")
    assert log.parent == folder
    assert re.findall("rank (.*) starts", log.read_text()) == ["0 of 2"]
    assert sorted(file.name for file in folder.glob("metrics*.jsonl")) == ["metrics.jsonl", "metrics.rank1.jsonl"]
    assert (folder / "checkpoints" / "latest").resolve().name == "step-00000005"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_restarted_run_reports_once_and_resumes_in_its_folder(agents: Agents) -> None:
    ended = agents.run_both("what=fail", options=("--max-restarts=2",))
    stderr = "".join(stderr for _, _, stderr in ended)
    assert [code for code, _, _ in ended] == [0, 0], stderr
    assert re.findall(r"^rank \d+: .*", stderr, re.MULTILINE) == ["rank 1: Traceback (most recent call last):"]
    assert stderr.count("KeyError: 'no cheese'") == 1
    attempts = list(zip(agents.answers_of(0), agents.answers_of(1), strict=True))
    assert [[about["start"] for about in attempt] for attempt in attempts] == [[0, 0], [2, 2], [2, 2]]
    assert [{about["value"] for about in attempt} for attempt in attempts] == [{0.0}, {9.0}, {45.0}]
    assert len({(about["run"], about["stamp"]) for attempt in attempts for about in attempt}) == 1
    assert len(agents.run_folders()) == len(list(agents.folder.rglob("train.log"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tasks_of_a_schedulers_job_are_one_run(agents: Agents) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=4"]
    ended = run(agents.command("-m", "what=work,fail", *launcher), agents.folder, OMP_NUM_THREADS="1")
    assert ended.returncode == 1
    assert re.findall(r"^rank \d+: .*", ended.stderr, re.MULTILINE) == ["rank 1: Traceback (most recent call last):"]
    for job in ("0", "1"):
        first, second = ([each for each in agents.answers_of(rank) if each["job"] == job] for rank in range(2))
        assert [each["stamp"] for each in first] == [each["stamp"] for each in second] != []
        files = {file.name for file in Path(first[0]["run"]).iterdir()}
        assert {".hydra", "checkpoints", "metrics.jsonl", "metrics.rank1.jsonl", "train.log"} <= files


@settings(max_examples=25, deadline=None)
@given(world=st.integers(1, 4), dead=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_the_ranks_of_an_attempt_agree_on_a_new_name(world: int, dead: list[int]) -> None:
    """Before each attempt some processes came that far and died: they drew a number, and got no answer."""
    store, names = HashStore(), []
    with ThreadPoolExecutor(world) as pool:
        for number in dead:
            for _ in range(number):
                store.add("drawn", 1)
            asked = [pool.submit(name_attempt, store, each, world) for each in reversed(range(world))]
            (name,) = {future.result(timeout=LIMIT_S) for future in asked}
            names.append(name)
    assert len(set(names)) == len(names)


def test_ranks_of_two_machines_report_a_cause_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutdown, "exit_now", sys.exit)
    monkeypatch.setattr(rank, "_LINGER_S", LIMIT_S)  # no rank waits that long: the other one comes
    store = HashStore()

    def ends(number: int, error: Exception) -> object:
        with pytest.raises(SystemExit) as left:
            Rank(number, 2, 0, 1, False, RunStore(store, number, 2)).fail(error)
        return left.value.code

    with ThreadPoolExecutor(1) as pool:
        follows = pool.submit(ends, 0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
        assert ends(1, KeyError("no cheese")) == follows.result(timeout=LIMIT_S) == 1
    printed = capsys.readouterr().err
    assert printed.splitlines()[0].startswith("rank 1: ")
    assert printed.count("KeyError: 'no cheese'") == len(re.findall(r"^rank \d+: ", printed, re.MULTILINE)) == 1
    assert "peer" not in printed


@pytest.mark.parametrize(
    ("world", "local", "command"),
    [
        (4, 4, "python train.py -m nproc=4 ..."),
        (8, 4, "python train.py -m nproc=4 hydra/launcher=submitit_slurm hydra.launcher.nodes=2 ..."),
    ],
)
def test_a_sweep_below_torchrun_names_the_command_that_does_it(
    monkeypatch: pytest.MonkeyPatch, world: int, local: int, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "lr=1,2"])
    for number in range(2):
        with pytest.raises(LaunchError) as caught:
            _follow(Rank(number, world, number, local, False, RunStore(HashStore(), number, world)))
        assert f"`{command}`" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("why", "is_one"), [("Application timeout caused pair closure", True), ("it is full", False)])
def test_an_exchange_that_ends_since_a_rank_is_lost_is_no_cause(why: str, is_one: bool) -> None:
    error = CheckpointError("Nothing was restored: rank 1 did not reach this exchange within 2.95 s, and may hang.")
    error.__cause__ = RuntimeError(why)
    assert rank.is_consequence(error) is is_one
