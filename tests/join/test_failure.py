"""When one rank fails, the others end in time with an error that names it; when none does, nothing is left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stagereg.testing.ranks as ranks
from stagereg.errors import JoinError, PeerFailedError
from stagereg.join.failure import FailureDetector, RankStatus, abort, is_broken_operation, is_timeout
from stagereg.kernel.channel import resources_of
from stagereg.testing import RankFailure, run_ranks

SOON_S = 5.0
"""Within which a rank's error is to reach the others: a quarter of a second, and much patience with a busy machine."""
INQUIRY_S = 5.0
"""Seconds beyond the timeout for asking around, likewise."""


def outcome(detector: FailureDetector, step: Callable[[], Any]) -> tuple[float, int | None, str, str]:
    """Seconds that ``step`` took to fail, and the rank, message and text of the error that a join would raise."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        step()
    error = raised.value
    known = error if isinstance(error, PeerFailedError) else detector.explain(error)
    assert known is not None, f"not explained: {error}"
    return time.monotonic() - start, known.rank, known.message, str(known)


def aborting(rank: int, world_size: int) -> list[float]:
    """Rank 1 has failed and aborts nothing. Of the others one waits for it, and aborts when the other already has."""
    seconds = []
    for second in (0, 2):
        group = dist.new_group()
        dist.barrier(group)
        if rank == second:
            work = dist.irecv(torch.zeros(1), 1, group=group)
            assert work is not None
            with pytest.raises(RuntimeError):
                dist.recv(torch.zeros(1), 2 - rank, group=group)  # until the connection to the other is closed
        if rank != 1:
            abort(group)
        if rank == second:
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=2 * SOON_S))
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=group)  # a collective that had not begun
            seconds.append(time.monotonic() - start)
        dist.barrier()
    return seconds


def test_an_abort_ends_every_wait_for_the_failed_rank_whichever_rank_aborts_first() -> None:
    for seconds in run_ranks(aborting, 3, timeout_s=60):
        assert all(each < SOON_S for each in seconds)


def await_statuses(group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], step: int) -> None:
    """Return when all ``ranks`` have published which step they are in, since others are not suspected."""
    store = dist.PrefixStore(name, group.get_group_store())
    deadline = time.monotonic() + 20
    for rank in ranks:
        while (status := status_of(store, rank)) is None or status.step != step:
            assert time.monotonic() < deadline, f"rank {rank} publishes nothing"
    dist.barrier(group)


def status_of(store: dist.Store, rank: int) -> RankStatus | None:
    return pickle.loads(store.get(str(rank))) if store.check([str(rank)]) else None


def killed(rank: int, world_size: int, folder: Path, timeout_s: float, own_store: bool) -> None:
    """Rank 0 is killed, and with it the store of the process group if it is its ``own``."""
    if own_store:
        ports: list[Any] = [None]
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ports = [store.port]
        dist.broadcast_object_list(ports, 0)
        if rank != 0:
            store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    detector = FailureDetector(group, timeout_s, "killed", lambda: 7)
    detector.start()
    await_statuses(group, "killed", tuple(range(world_size)), 7)
    assert detector.explain(RuntimeError("DataLoader timed out after 5 seconds")) is None
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = outcome(detector, lambda: dist.all_reduce(torch.ones(1)))
    start = time.monotonic()
    detector.stop()
    (folder / f"{rank}.json").write_text(json.dumps([*seen, time.monotonic() - start]))
    raise LookupError("all is reported; the harness would wait for the rank that is gone")


@pytest.mark.parametrize("own_store", [False, True])
def test_a_killed_rank_is_named_and_so_is_a_store_that_dies_with_it(
    tmp_path: Path, own_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_s = 4.0
    # The harness ends ranks that outlive another; these are to have the time that they may take.
    monkeypatch.setattr(ranks, "_LINGER_S", timeout_s + INQUIRY_S)
    with pytest.raises(RankFailure) as failure:
        run_ranks(killed, 3, args=(tmp_path, timeout_s, own_store), timeout_s=60)
    assert "SIGKILL" in failure.value.failed[0]
    for rank in (1, 2):
        assert "all is reported" in failure.value.failed[rank], failure.value
        seconds, whose, message, text, stopping = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seconds < SOON_S
        assert stopping < 2.0
        if own_store:
            assert whose is None
            assert message.startswith("the job's store is gone (it says ")
            assert "The process that hosts it, rank 0 or the launcher, was killed or frozen" in text
        else:
            assert whose == 0
            assert message.startswith("did not answer for at least ")
            assert "rank 0 did not answer" in text
            assert "it was last in step 7" in text


def many(rank: int, world_size: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    store = group.get_group_store()
    before = backend.options._timeout, threading.active_count()
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    limits = set()
    for epoch in range(60):
        detector = FailureDetector(group, 30, f"epoch {epoch}")
        detector.start()
        detector.start()
        limits.add(backend.options._timeout)
        dist.all_reduce(torch.ones(1))
        detector.check()
        if epoch % 2 == rank:
            dist.barrier()
        detector.stop()
        detector.stop()
        if epoch % 2 != rank:
            dist.barrier()
        detector.check()
        detector.report(ValueError("after its end"))
        assert detector.explain(RuntimeError("after its end")) is None
    idle = threading.Event()
    resources_of(group).heartbeat.submit(idle.set)
    assert idle.wait(20)
    dist.barrier()
    keys = store.num_keys() - keys
    dist.barrier()
    return limits, backend.options._timeout == before[0], threading.active_count() - before[1], keys


def test_joins_in_a_row_share_one_thread_and_leave_no_key_and_the_timeout_that_was_there() -> None:
    assert run_ranks(many, 2, timeout_s=60) == [({timedelta(seconds=30)}, True, 1, 0)] * 2


KINDS = ("none", "left", "crossed")


def unexplained(rank: int, world_size: int) -> Any:
    """Three groups of three ranks, side by side, as they all wait. All ranks are well, but in the first group the last
    rank has no detector, in the second it has left, and in the third all wait for each other."""
    texts: list[Any] = []
    number, kind, is_last = rank // 3, KINDS[rank // 3], rank % 3 == 2
    members = [tuple(range(first, first + 3)) for first in range(0, world_size, 3)]
    group = [dist.new_group(list(each)) for each in members][number]
    detector = FailureDetector(group, 2.0, kind, lambda: 3)
    if not is_last or kind != "none":
        detector.start()
        await_statuses(group, kind, members[number][:2] if kind == "none" else members[number], 3)
    else:
        dist.barrier(group)
    if is_last and kind == "left":
        detector.stop()
    if rank == 0:
        texts.append(detector.explain(RuntimeError("[gloo/pair.cc] sizes do not match")))
    if not is_last or kind == "crossed":
        never = threading.Event()
        with pytest.raises(PeerFailedError) as error:
            detector.wait(never.wait, f"the end of {rank}" if kind == "crossed" else "the end")
        texts.append((error.value.rank, str(error.value)))
    dist.barrier()
    detector.stop()
    dist.barrier()
    return texts


def test_a_rank_that_is_not_in_the_join_is_named_only_when_it_is_waited_for() -> None:
    outcomes = run_ranks(unexplained, 3 * len(KINDS), timeout_s=60)
    assert outcomes[0].pop(0) is None
    absent = (
        "is not in this join, or no more, and did not come to the end within 2 s. "
        "All ranks have to enter the same joins in the same order, and none may leave by itself."
    )
    assert outcomes[:6] == [[(2, f"rank 2 {absent}")]] * 2 + [[]] + [[(5, f"rank 5 {absent}")]] * 2 + [[]]
    crossed = {text for ((_, text),) in outcomes[6:]}
    for text in crossed:
        assert text.startswith("all ranks are alive and wait for each other, this one for the end of ")
        assert text.endswith("; it was last in step 3. They do not make the same calls in the same order.")


def single_rank(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    detector = FailureDetector(group, 0.5, "alone")
    threads = threading.active_count()
    detector.start()
    assert threading.active_count() == threads
    detector.wait(lambda seconds: True, "nothing")
    detector.report(ValueError("x"))
    assert detector.explain(RuntimeError("x")) is None
    detector.stop()


def test_a_single_rank_needs_no_thread() -> None:
    run_ranks(single_rank, 1, timeout_s=30)


class Member:
    """As much of a process group as a detector needs, for ranks in one process.

    Attributes:
        aborted: set once the group is aborted on this rank.
    """

    _device_types = ()

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.group_name = "simulated"
        self.aborted = threading.Event()
        self._store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> dist.Store:
        return self._store


@pytest.fixture
def simulated_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagereg.join.failure.abort", lambda member: member.aborted.set())


class Detecting(FailureDetector):
    """The detector of a rank among others in one process."""

    def __init__(self, member: Any, timeout_s: float, name: str = "join") -> None:
        self.member, self.acted = member, member.aborted
        with mock.patch.object(dist, "get_process_group_ranks", lambda group: list(range(group.size()))):
            super().__init__(member, timeout_s, name)

    def leave(self) -> None:
        """Return when the thread is idle."""
        self.stop()
        thread = resources_of(self.member).heartbeat
        idle = threading.Event()
        thread.submit(idle.set)
        assert idle.wait(10)
        thread.close()


def await_true(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("simulated_abort")
def test_a_rank_that_comes_while_others_are_polled_is_not_suspected() -> None:
    shared = dist.HashStore()
    store = dist.PrefixStore("join", shared)
    detector = Detecting(Member(shared, 0, 2), 60)
    detector.start()

    def beat() -> int:
        status = status_of(store, 0)
        return 0 if status is None else status.beat

    found = []
    asking = threading.Thread(target=lambda: found.append(detector.explain(RuntimeError("gloo"))))
    asking.start()
    await_true(lambda: beat() > 3)  # so the poll has begun
    store.set("1", pickle.dumps(RankStatus(1)))
    asking.join(20)
    assert found == [None]
    assert detector.failure is None
    detector.leave()
    assert not store.check(["0"])


@pytest.mark.usefixtures("simulated_abort")
def test_a_failure_reaches_64_ranks_and_only_the_first_one_does() -> None:
    store = dist.HashStore()
    all_of_them = [Detecting(Member(store, rank, 64), 60) for rank in range(64)]
    for each in all_of_them:
        each.start()
    for rank in (17, 18):
        all_of_them[rank].report(KeyError("x"))
    all_of_them[17].leave()
    assert all(each.acted.wait(20) for rank, each in enumerate(all_of_them) if rank != 17)
    assert not all_of_them[17].acted.is_set()
    assert {str(each.failure) for each in all_of_them} == {str(all_of_them[17].failure)}
    with pytest.raises(PeerFailedError, match="rank 17 failed: KeyError: 'x'"):
        all_of_them[0].check()
    for rank, each in enumerate(all_of_them):
        if rank != 17:
            each.leave()


@pytest.mark.usefixtures("simulated_abort")
def test_no_group_is_aborted_once_a_rank_has_left() -> None:
    detector = Detecting(Member(dist.HashStore(), 0, 2), 60)
    detector.start()
    detector.report(ValueError("x"))
    detector.leave()
    assert detector.failure is not None
    assert not detector.acted.is_set()


class Broken(dist.Store):
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.usefixtures("simulated_abort")
def test_a_store_that_is_gone_ends_the_detector_and_holds_no_rank_up() -> None:
    detector = Detecting(Member(Broken(), 0, 2), 60)
    detector.start()
    start = time.monotonic()
    error = detector.explain(RuntimeError("gloo"))
    assert str(error).startswith("the job's store is gone (it says RuntimeError: Connection reset by peer)")
    detector.report(ValueError("x"))
    detector.leave()
    assert time.monotonic() - start < 1.0


def test_the_error_is_what_joins_and_collectives_raise_and_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(PeerFailedError("rank 1 failed: x", 1, "x")))
    assert isinstance(error, JoinError)
    assert isinstance(error, RuntimeError)
    assert (str(error), error.rank, error.message) == ("rank 1 failed: x", 1, "x")


@pytest.mark.parametrize(
    ("text", "broken", "timeout"),
    [
        ("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2345", True, False),
        ("[/x/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete", True, True),
        ("Application timeout caused pair closure", True, True),
        ("DataLoader timed out after 5 seconds", False, False),
        ("mat1 and mat2 shapes cannot be multiplied", False, False),
    ],
)
def test_the_error_of_a_collective_is_distinguished_from_others(text: str, broken: bool, timeout: bool) -> None:
    cause = RuntimeError(text)
    outer = ValueError("in my loop")
    outer.__cause__ = cause
    for error in (cause, outer):
        assert (is_broken_operation(error), is_timeout(error)) == (broken, timeout)
