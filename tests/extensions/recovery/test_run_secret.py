"""Where the processes of a run listen, and how they get the secret that they know each other by."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

import stagereg.extensions.recovery.run_secret as run_secret
from stagereg.errors import LaunchError
from stagereg.extensions.recovery.run_secret import agreed_secret
from stagereg.launch.rank import SECRET

from ...support.programs import TORCHRUN, Program, free_port

SCRIPT = """
import contextlib, gc, json, os
from pathlib import Path

import stagereg


def listening(processes):
    owned, found = set(), []
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                owned.add(os.readlink(descriptor))
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                found.append(fields[1].partition(":")[0])
    return found


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    import torch.distributed as dist
    from stagereg.extensions.recovery.failure_monitor import FailureMonitor

    with stagereg.instantiate(cfg.checkpoint) as checkpointer:
        checkpointer.restore({})
        [monitor] = [each for each in gc.get_objects() if isinstance(each, FailureMonitor)]
        mine = [os.getpid(), monitor._process.pid]
        if dist.get_rank() == 0 and "STAGEREG_LAUNCHER" in os.environ:
            mine.append(int(os.environ.get("FORKED_BY") or os.getppid()))
        processes = [None, None]
        dist.all_gather_object(processes, mine)
        if dist.get_rank() == 0:
            master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            stranger = dist.TCPStore(*master, is_master=False)
            values = [stranger.get(key).decode(errors="replace") for key in stranger.list_keys()]
            told = [value for value in values if monitor._config.secret[:64] in value]
            about = {"listening": listening(sum(processes, [])), "told": told, "values": len(values)}
            about["environment"] = "STAGEREG_SECRET" in os.environ
            Path(cfg.answers, "0.json").write_text(json.dumps(about))
        dist.barrier()


train()
"""
CONFIG = """
defaults: [stagereg, _self_]
answers: ???
"""
HAND = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": rank}) for rank in "01"]
sys.exit(max(rank.wait() for rank in ranks))
"""
BY_HAND = [sys.executable, "-c", HAND]


@pytest.mark.parametrize(
    "start",
    [None, pytest.param(TORCHRUN, marks=pytest.mark.slow), pytest.param(BY_HAND, marks=pytest.mark.slow)],
    ids=["python", "torchrun", "by hand"],
)
def test_a_run_on_one_machine_listens_on_loopback_and_its_store_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: list[str] | None
) -> None:
    if start is BY_HAND:
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}.items():
            monkeypatch.setenv(name, value)
    program = Program(tmp_path, CONFIG, SCRIPT)
    ended = program.run(*([] if start else ["nproc=2"]), "tier=disk", f"tier.dir={tmp_path}", start=start)
    assert ended.returncode == 0, ended.stderr
    about = json.loads((program.answers / "0.json").read_text())
    assert len(about["listening"]) >= 4, "two tier servers, the hub, the store"
    assert [each for each in about["listening"] if not each.endswith("7F")] == []
    assert (about["told"], about["environment"], about["values"] > 10) == ([], False, True)


def agree(store: Any, *given: str, machines: str = "aa") -> list[Any]:
    """Return the secret of each rank, or its error, where machines are named by a letter for each rank."""
    found: list[Any] = [None] * len(given)

    def run(rank: int) -> None:
        try:
            found[rank] = agreed_secret(store, rank, len(given), given[rank])
        except LaunchError as error:
            found[rank] = error

    def machine_name() -> str:
        return machines[int(threading.current_thread().name)]

    before: Callable[[], str] = run_secret.machine_name
    run_secret.machine_name = machine_name  # type: ignore[attr-defined]
    try:
        threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(len(given))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
    finally:
        run_secret.machine_name = before  # type: ignore[attr-defined]
    return found


def values_of(store: Any, *keys: str) -> str:
    return "".join(store.get(key).decode() for key in keys if store.check([key]))


KEYS = ("secret/place", "secret/text", "secret/read", "secret/elsewhere")


def test_ranks_of_one_machine_agree_on_a_secret_that_the_store_does_not_have() -> None:
    store = HashStore()
    first, second, third = agree(store, "", "", "", machines="aaa")
    assert first == second == third != ""
    assert first not in values_of(store, *KEYS)
    assert agree(HashStore(), "", "")[0] != first


def test_ranks_agree_where_a_sandbox_forbids_memory_that_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("of a seccomp profile")

    monkeypatch.setattr(os, "memfd_create", refuse)
    first, second = agree(HashStore(), "", "")
    assert first == second != ""


def test_ranks_of_several_machines_agree_through_the_store() -> None:
    store = HashStore()
    first, second, third = agree(store, "", "", "", machines="aab")
    assert first == second == third == store.get("secret/text").decode()


def test_a_secret_that_is_given_is_in_no_store() -> None:
    store = HashStore()
    assert agree(store, "sesame", "sesame", machines="ab") == ["sesame", "sesame"]
    assert "sesame" not in values_of(store, *KEYS)


@pytest.mark.parametrize("given", [("sesame", ""), ("", "sesame")])
def test_a_secret_that_only_some_ranks_have_is_an_error(given: tuple[str, str]) -> None:
    _, error = agree(HashStore(), *given)
    assert isinstance(error, LaunchError)
    having, lacking = (0, 1) if given[0] else (1, 0)
    assert f"rank {having} has {SECRET} in its environment, but rank {lacking} does not" in str(error)


def test_memory_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("of another user")

    store = HashStore()
    monkeypatch.setattr(run_secret, "open", refuse, raising=False)
    first, second = agree(store, "", "")
    assert first == second == store.get("secret/text").decode()
