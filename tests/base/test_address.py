"""Which address a process listens on, and whether all ranks are on one machine."""

from __future__ import annotations

import os

import pytest

from stagereg.base.address import is_one_machine, listen, own_address

ONE = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        (ONE, True),
        ({**ONE, "WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "node1"}, False),
        ({"WORLD_SIZE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"WORLD_SIZE": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({**ONE, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({**ONE, "SLURM_STEP_NUM_NODES": "2", "TORCHELASTIC_RUN_ID": "x"}, True),
    ],
)
def test_all_ranks_are_on_one_machine_only_where_the_launcher_says_so(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth0", **variables})
    assert is_one_machine() == expected
    if expected:
        assert own_address() == "127.0.0.1", "whatever interface gloo takes"


def test_a_port_is_on_one_address_and_forked_processes_close_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as opened:
        assert opened.getsockname()[0] == "127.0.0.1"
        if (pid := os.fork()) == 0:
            os._exit(opened.fileno() != -1)
        assert os.waitpid(pid, 0)[1] == 0
    with listen("192.0.2.77") as elsewhere:  # which this machine does not have
        assert elsewhere.getsockname()[0] in ("0.0.0.0", "::")
