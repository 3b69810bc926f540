"""The callback prove starts proofs with the command of the run, once, in a process that outlives the run."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg.assembly import Checkpointer
from stagereg.base.providers import has
from stagereg.checkpoint.store.open_store import open_store
from stagereg.errors import CheckpointError, ConfigError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint

from ...commands.checkpoint_directories import save
from ...support.forks import run_forked
from ...support.programs import LIMIT_S, comes_true, plain

if not has("prove"):
    pytest.skip("proofs need the extension prove", allow_module_level=True)

PLAIN = """
import sys, torch, stagereg

model = torch.nn.Linear(2, 2)
state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
proofs = stagereg.build("on_commit", "prove")
options = {"every": 4, "save_last": False, "on_commit": {"proofs": proofs}, "prove": stagereg.Prove(steps=1)}
with stagereg.Checkpointer(sys.argv[1], **options) as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, 6):
        state["optimizer"].zero_grad()
        model(torch.randn(2)).sum().backward()
        state["optimizer"].step()
        checkpointer.maybe_save(step, state)
"""
RANKS = """
import os
import stagereg


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(torch.distributed.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, 6):
            state["optimizer"].zero_grad()
            model(torch.randn(2)).sum().backward()
            state["optimizer"].step()
            checkpointer.maybe_save(step, state)


if __name__ == "__main__":
    train()
"""
APP = """
defaults: [stagereg, {on_commit@checkpoint.on_commit.proofs: prove}, _self_]
nproc: 2
hydra: {job: {chdir: true}}
checkpoint: {every: 4, save_last: false, prove: {steps: 1}}
"""
SSH = """#!/bin/sh
echo "$1" > "$CALLS"
cd /
exec /bin/sh -c "$2"
"""
PYTHON = """#!/bin/sh
pwd
printf "<%s> " "$@"
"""


def run(folder: Path, *arguments: str) -> None:
    """Run the program ``train.py`` in a folder. Its own output says nothing about the proofs."""
    environment = plain() | {"OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"cwd": folder, "environment": environment, "timeout_s": LIMIT_S, "forks_ranks": True}
    done = run_forked(Path("train.py"), *arguments, **how)
    assert done.returncode == 0, done.stderr
    assert "on_commit" not in done.stderr, done.stderr


def await_verdicts(root: Path) -> dict[int, str]:
    """Wait until the process that proves has ended, and return the verdicts by step."""

    def has_ended() -> bool:
        with (root / "proofs.log").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    assert comes_true(has_ended, 60), (root / "proofs.log").read_text()
    notes = [json.loads(each.read_text()) for each in sorted(root.glob("proofs/step-????????.json"))]
    return {int(each["key"][5:13]): each.get("verdict", "") for each in notes}


def test_verdicts_appear_after_the_run_has_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    run(tmp_path, "run")
    assert await_verdicts(tmp_path / "run") == {4: "proven"}, (tmp_path / "run/proofs.log").read_text()
    assert (tmp_path / "run" / "proofs.log").read_text().startswith("run/step-00000004: proven: 1 step equal")


def test_ranks_of_stagereg_main_are_proven_by_as_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text(APP)
    (tmp_path / "train.py").write_text(RANKS)
    run(tmp_path, f"checkpoint.dir={tmp_path}/run")
    assert await_verdicts(tmp_path / "run") == {4: "proven"}, (tmp_path / "run/proofs.log").read_text()
    assert "number of ranks" not in (tmp_path / "run" / "proofs.log").read_text()


# -- in this process, with a program that prints its command instead of `stagereg prove`


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The commands and environments of the processes that components start; each runs ``cat`` of a pipe."""
    found: list[Any] = []
    running: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        found.append((command, how))
        running.append(real(["cat"], **how | {"stdin": subprocess.PIPE}))
        return running[-1]

    monkeypatch.setattr("stagereg.extensions.callbacks.prove.subprocess.Popen", popen)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "train", "lr=1"])
    yield found
    for each in running:
        each.communicate(timeout=LIMIT_S)


def commit(component: Any, *paths: Path | str) -> None:
    for path in paths:
        manifest = open_store(Path(paths[0]).parent).checkpoints()[0][0].manifest
        component.committed(CommittedCheckpoint(manifest.step, path, manifest, {}))


def test_the_process_starts_once_with_the_command_of_the_run(tmp_path: Path, started: list[Any]) -> None:
    paths = [Path(each) for each in save(tmp_path, 1, 2)]
    commit(stagereg.build("on_commit", "prove"), *paths)
    program = [sys.executable, "-m", "train", "lr=1"]
    [(command, how)] = started
    assert command[1:] == [
        *("-u", "-m", "stagereg", "prove", str(tmp_path), "--follow", "--after-run", "--timeout", "1200", "--"),
        *program,
    ]
    assert how["start_new_session"]
    (tmp_path / "proofs.log").unlink()
    commit(stagereg.build("on_commit", "prove", after_run=False), *paths)
    assert "--after-run" not in started[1][0]


def test_a_restarted_run_starts_no_second_process(tmp_path: Path, started: list[Any]) -> None:
    paths = [Path(each) for each in save(tmp_path, 1, 2)]
    for _ in range(3):
        commit(stagereg.build("on_commit", "prove"), *paths)
    assert len(started) == 1


def test_a_link_with_the_name_of_the_log_is_not_followed(tmp_path: Path, started: list[Any], mine: Path) -> None:
    path = Path(save(tmp_path / "run", 1)[0])
    (tmp_path / "run" / "proofs.log").symlink_to(mine)
    with pytest.raises(OSError, match="not a regular file"):
        commit(stagereg.build("on_commit", "prove"), path)
    assert not started


def test_the_process_inherits_no_variable_of_a_rank(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    more = ["MASTER_PORT", "STAGEREG_LAUNCHER", "STAGEREG_ATTEMPT", "STAGEREG_VALUES", "STAGEREG_RUN"]
    for name in (*ranks, *more, "STAGEREG_SECRET", "STAGEREG_KEEPS_CODE", "TORCHELASTIC_USE_AGENT_STORE", "MY_RANK"):
        monkeypatch.setenv(name, "2")
    commit(stagereg.build("on_commit", "prove"), Path(save(tmp_path, 1)[0]))
    [(_, how)] = started
    words = ("RANK", "WORLD_SIZE", "MASTER", "STAGEREG", "TORCHELASTIC")
    assert [name for name in how["env"] if any(word in name for word in words)] == ["MY_RANK"]
    assert how["env"]["PATH"] == os.environ["PATH"]


def test_a_spare_machine_runs_the_command_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "name=it's", "a  b; c"])
    component = stagereg.build("on_commit", "prove", host="me@spare-1.lab", after_run=False)
    monkeypatch.chdir("/")
    commit(component, Path(save(tmp_path / "run", 1)[0]))
    assert component._process.wait(LIMIT_S) == 0
    assert (tmp_path / "calls").read_text() == "me@spare-1.lab\n"
    where, command = (tmp_path / "run" / "proofs.log").read_text().splitlines()
    assert where == str(folder)
    options = f"<prove> <{tmp_path}/run> <--follow> <--timeout> <1200> <-->"
    assert command == f"<-u> <-m> <stagereg> {options} <{tmp_path}/python> <train.py> <name=it's> <a  b; c> "


def test_a_process_that_has_failed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    component = stagereg.build("on_commit", "prove")
    paths = [Path(each) for each in save(tmp_path, 1, 2)]
    commit(component, paths[0])
    component._process.wait(LIMIT_S)
    with pytest.raises(CheckpointError, match=f"exited with code 1. See {tmp_path}/proofs.log"):
        commit(component, paths[1])


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a;b", "a\n", 7.5])
def test_a_host_that_is_not_a_name_is_refused(host: Any) -> None:
    with pytest.raises(ConfigError, match="must be the name of a host"):
        stagereg.build("on_commit", "prove", host=host)


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {"STAGEREG_LAUNCHER": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=["torchrun", "another launcher", "two machines"],
)
def test_a_command_that_cannot_be_repeated_is_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"cannot repeat .* Run `stagereg prove DIR --follow --after-run -- COMMAND`"):
        Checkpointer(str(tmp_path / "run"), on_commit=stagereg.build("on_commit", "prove"))
