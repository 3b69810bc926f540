"""Messages of all ranks of a machine reach all of them in order, and a wait for a rank that is gone ends."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.testing.ranks as harness
from stagereg.kernel.channel import control_channel, resources_of
from stagereg.sockets import PeerSockets, connect_ranks
from stagereg.testing import RankFailure, run_ranks

from .support.reference import await_published

SOON_S = 30.0


@pytest.fixture
def ranks() -> Iterator[list[PeerSockets]]:
    """Three ranks, all in this process."""
    ends: list[dict[int, socket.socket]] = [{}, {}, {}]
    for one, other in combinations(range(3), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    made = [PeerSockets(rank, peers) for rank, peers in enumerate(ends)]
    for each in made:
        each._set_default_timeout(timedelta(seconds=SOON_S))
    yield made
    for each in made:
        each.abort()


def test_messages_of_a_call_belong_together(ranks: list[PeerSockets]) -> None:
    """Whatever the order in which calls are waited for, and however far a rank is ahead."""
    ahead = [ranks[0].send(b"%d" % number) for number in range(50)]
    assert not ahead[0].ready(0.0)
    for rank in (1, 2):
        calls = [ranks[rank].send(b"%d from %d" % (number, rank)) for number in range(50)]
        for number in reversed(range(rank, 50)):
            assert calls[number].parts[rank] == b"%d from %d" % (number, rank)
    for number in (49, 0, 7):
        assert ahead[number].wait() == [b"%d" % number, b"%d from 1" % number, b"%d from 2" % number]
    assert not ranks[0]._parts


def test_messages_too_large_for_a_buffer_cross(ranks: list[PeerSockets]) -> None:
    """Also while ranks wait for an earlier call, whose messages have all come."""
    large = [bytes([rank]) * (3_000_000 + rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [each.send(message) for each, message in zip(ranks, large, strict=True)]
        afterwards = [each.send(message) for each, message in zip(ranks, large, strict=True)]
        assert all(found == large for found in pool.map(lambda call: call.wait(), calls))
        assert all(found == large for found in pool.map(lambda call: call.wait(), afterwards))


def test_two_threads_can_wait_for_one_ranks_messages(ranks: list[PeerSockets]) -> None:
    """As a join's thread waits for the first sum while training waits for the next."""
    first, second = ranks[0].send(b"first"), ranks[0].send(b"second")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(call.ready, SOON_S) for call in (second, first)]
        for each in ranks[1:]:
            each.send(b"first")
            each.send(b"second")
        assert all(wait.result(SOON_S) for wait in waits)


def test_a_rank_that_ended_is_missed_only_by_what_it_did_not_send(ranks: list[PeerSockets]) -> None:
    """What it sent before is there, also where it never read what others had sent it."""
    ranks[0].send(b"never read")
    ranks[1].send(b"last words")
    ranks[1].abort()
    calls = [ranks[2].send(b"") for _ in range(2)]
    ranks[0].send(b"")
    assert calls[0].wait()[1] == b"last words"
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="Connection closed by peer: rank 1"):
            calls[1].ready(SOON_S)


def test_an_abort_ends_the_waits_of_other_threads_and_ranks(ranks: list[PeerSockets]) -> None:
    calls = [ranks[0].send(b""), [ranks[1].send(b"") for _ in range(2)][1]]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(call.ready, 2 * SOON_S) for call in calls]
        started = time.monotonic()
        ranks[0].abort()
        for wait in waits:
            with pytest.raises(dist.DistNetworkError, match="Connection closed"):
                wait.result(SOON_S)
    assert time.monotonic() - started < SOON_S


def test_a_wait_ends_at_the_limit_and_a_forked_copy_closes_nothing(ranks: list[PeerSockets]) -> None:
    ranks[0]._set_default_timeout(timedelta(seconds=0.1))
    call = ranks[0].send(b"")
    with pytest.raises(dist.DistNetworkError, match="Timed out waiting 100ms"):
        call.wait()
    copy = PeerSockets(1, {0: ranks[1]._peers[0].dup()})  # as a process that was forked has it
    del copy
    gc.collect()
    for each in ranks[1:]:
        each.send(b"")
    assert call.ready(SOON_S)


def connected(count: int, meanwhile: Callable[[list[str]], None] = lambda addresses: None) -> list[PeerSockets | None]:
    """Ranks that connect, each on a thread; ``meanwhile`` gets their addresses before that, and may change them."""
    texts: dict[str, list[str]] = {}
    barrier = threading.Barrier(count, lambda: meanwhile(texts["here"]) if len(texts) == 1 else None, SOON_S)

    def exchange(rank: int, key: str, text: str) -> list[str]:
        texts.setdefault(key, [""] * count)[rank] = text
        barrier.wait()
        return texts[key]

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: connect_ranks(rank, partial(exchange, rank)), range(count)))


def test_ranks_of_one_machine_connect_and_strangers_do_not() -> None:
    strangers = []

    def call(addresses: list[str]) -> None:
        for sent in (b"%-32s%8d" % (b"guessed", 1), b"\xff" * 40, b"ten bytes.", b""):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(f"\0stagereg-{addresses[0].split()[0]}")
            strangers[-1].sendall(sent)
        strangers.pop(2).close()

    made = connected(3, call)
    calls = [each.send(b"%d" % rank) for rank, each in enumerate(made) if each is not None]
    assert [call.wait() for call in calls] == [[b"0", b"1", b"2"]] * 3
    for each in strangers:
        each.settimeout(SOON_S)
        assert each.recv(1) == b""
        each.close()


def test_no_rank_uses_sockets_if_one_cannot_connect() -> None:
    """As on several machines: here only the last of three does not find another one."""
    assert connected(3, lambda addresses: addresses.__setitem__(1, "elsewhere its-secret")) == [None] * 3


def killed_with_a_worker(end: socket.socket, leash: socket.socket) -> None:
    made = PeerSockets(0, {1: end})
    if os.fork() == 0:
        leash.recv(1)  # returns as the test closes the other end
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    del made


def test_a_forked_worker_does_not_hide_that_its_rank_ended() -> None:
    (mine, its), (leash, other) = socket.socketpair(), socket.socketpair()
    rank = multiprocessing.get_context("spawn").Process(target=killed_with_a_worker, args=(its, other))
    rank.start()
    its.close()
    other.close()
    with leash, pytest.raises(dist.DistNetworkError, match="Connection closed by peer: rank 0"):
        PeerSockets(1, {0: mine}).send(b"").ready(6 * SOON_S)
    rank.join(SOON_S)
    assert rank.exitcode == -signal.SIGKILL


def channels(rank: int, world_size: int) -> list[Any]:
    """What goes over a channel, by sockets, and over gloo as among many ranks and on several machines."""
    group: Any = dist.group.WORLD
    found = []
    many = mock.patch("stagereg.sockets.MOST_RANKS", 2)
    elsewhere = mock.patch.object(socket.socket, "connect", side_effect=ConnectionRefusedError)
    forbidden = mock.patch("socket.socket", side_effect=PermissionError)
    where = {"few": {}, "many": dict.fromkeys(range(3), many), "several": {1: elsewhere}}
    where |= {f"forbidden on rank {each}": {each: forbidden} for each in range(3)}
    for purpose, on_ranks in where.items():
        with on_ranks.get(rank, contextlib.nullcontext()):
            channel = control_channel(group, purpose)
        sums = [channel.add([float(rank), step]) for step in range(3)]
        gathered = channel.gather({"rank": rank, "filler": "x" * 10_000 * rank})
        results = [each.wait() for each in sums]
        found.append((type(channel.backend).__name__, results, [len(each["filler"]) for each in gathered]))
    return found


def test_sums_are_the_same_over_sockets_and_over_gloo() -> None:
    for found in run_ranks(channels, 3, timeout_s=40):
        assert [each[0] for each in found] == ["PeerSockets", *["ProcessGroupGloo"] * 5]
        assert all(each[1:] == ([[3.0, 3.0 * step] for step in range(3)], [0, 10_000, 20_000]) for each in found)


def joins_after_a_failure(rank: int, world_size: int) -> list[Any]:
    """Rank 1 leaves a join with its first message sent and unread; then all join again over the same group."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    group: Any = dist.group.WORLD
    before: Any = None
    found: list[Any] = []
    for fails in (False, True, False):
        with mock.patch("stagereg.join.failure.abort"):  # so that the group can be used again
            try:
                with stagereg.Join([ddp], mode="counted", timeout=20) as join:
                    channel = resources_of(group).channels["membership"]
                    for step, x in enumerate(join.iterate([torch.ones(2, 4)] * (3 + rank))):
                        if fails and step == 1:
                            channel.add([7.0] * 9)  # a message that no rank expects
                            raise ValueError("on all ranks")
                        ddp(x).sum().backward()
                found.append(step + 1)
            except ValueError:
                found.append("failed")
        found.append(channel is before)
        before = channel
        dist.barrier()
    return found


def test_no_message_of_a_failed_join_reaches_the_next_one() -> None:
    for found in run_ranks(joins_after_a_failure, 2, timeout_s=60):
        assert found == [4, False, "failed", True, 4, False]


def killed(rank: int, world_size: int) -> None:
    """Rank 0 and 1 have left the loop and wait for the next step, which rank 2 was to take."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
    data = [torch.ones(2, 4)] * (4 if rank == 2 else 1)
    with stagereg.Join([ddp], mode="counted", timeout=60):
        for step, x in enumerate(data):
            if step == 2:
                await_published()
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(x).sum().backward()


def test_ranks_that_wait_by_sockets_soon_know_of_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_LINGER_S", 20.0)  # so that the others can raise; the join's timeout is longer
    with pytest.raises(RankFailure) as failure:
        run_ranks(killed, 3, timeout_s=50)
    assert "SIGKILL" in failure.value.failed[2]
    for rank in (0, 1):
        assert "PeerFailedError: rank 2 did not answer" in failure.value.failed[rank]


def test_closing_frees_every_socket() -> None:
    """At once, and also where a message of another rank never comes."""
    gc.collect()
    gc.disable()
    try:
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        made = [each for each in connected(2) if each is not None]
        outstanding = made[0].send(b"")
        assert len(os.listdir("/proc/self/fd")) == files + 2
        del made, outstanding
        assert len(os.listdir("/proc/self/fd")) == files
        assert threading.active_count() == threads
    finally:
        gc.enable()
