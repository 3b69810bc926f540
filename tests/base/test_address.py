"""Which address a process listens on, and whether all ranks are on one machine."""

from __future__ import annotations

import os
import socket

import pytest

import stagereg.base.address as address
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


@pytest.mark.parametrize(("master", "expected"), [("127.0.0.1", "127.0.0.1"), ("localhost", None), ("::1", "::1")])
def test_the_address_of_a_run_on_one_machine_is_loopback(
    monkeypatch: pytest.MonkeyPatch, master: str, expected: str | None, request: pytest.FixtureRequest
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", master)
    if master == "::1":
        request.getfixturevalue("ipv6")
    assert own_address() in ([expected] if expected else ["127.0.0.1", "::1"])


@pytest.fixture
def ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.mark.parametrize("master", ["", "no.such.host.invalid", "x" * 300, "ü" * 100, "\0"])
@pytest.mark.parametrize("interface", ["", "lo", "nosuch0", "nosuch0,lo", "é" * 40])
def test_there_is_always_an_address(monkeypatch: pytest.MonkeyPatch, master: str, interface: str) -> None:
    environment = {"MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": interface}
    monkeypatch.setattr(os, "environ", environment)
    found = own_address()
    socket.getaddrinfo(found, 1, flags=socket.AI_NUMERICHOST)
    if "lo" in interface:
        assert found == "127.0.0.1"


def test_a_name_that_means_loopback_here_alone_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    routes = {"node1": "127.0.1.1", "192.0.2.1": "10.0.0.7"}
    monkeypatch.setattr(address, "_toward", routes.get)
    assert own_address() == "10.0.0.7"
