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

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import stagereg.testing.ranks as ranks
from stagereg.errors import JoinError, PeerFailedError
from stagereg.join.abort import abort, is_broken_operation, is_timeout
from stagereg.join.alarm import FailureDetector
from stagereg.join.board import Failure, RankStatus, StatusStore, location
from stagereg.join.watch import HeartbeatThread
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


def sit_in(kind: str, group: dist.ProcessGroup, detector: FailureDetector) -> Callable[[], Any]:
    """A step that the other ranks are to take part in, and that cannot end without them."""
    if kind == "all_reduce":
        return lambda: dist.all_reduce(torch.ones(1), group=group)
    if kind == "backward":
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
        ddp(torch.ones(1, 4)).sum().backward()
        return lambda: ddp(torch.ones(1, 4)).sum().backward()
    never = threading.Event()
    return lambda: detector.wait(never.wait, "the end")


def raising(rank: int, world_size: int) -> Any:
    seen = []
    for kind in ("all_reduce", "backward", "wait"):
        group = dist.new_group()
        detector = FailureDetector(group, 60, f"raising {kind}")
        detector.start()
        step = sit_in(kind, group, detector)
        detector.check()
        dist.barrier(group)
        if rank == 1:
            detector.report(ValueError(f"loss is not finite\nin {kind}"))
        else:
            seen.append(outcome(detector, step))
            with pytest.raises(PeerFailedError):
                detector.check()
            detector.report(RuntimeError("a consequence, not told"))
        detector.stop()
        dist.barrier()
    return seen


def test_an_exception_of_one_rank_reaches_all_wherever_they_sit() -> None:
    seen, silent, others = run_ranks(raising, 3, timeout_s=60)
    assert silent == []
    assert len(seen) == len(others) == 3
    for kind, *both in zip(("all_reduce", "backward", "wait"), seen, others, strict=True):
        for seconds, rank, message, text in both:
            assert seconds < SOON_S
            assert rank == 1
            assert message == f"ValueError: loss is not finite\nin {kind}"
            assert text == f"rank 1 failed: {message}\nThe cause is there: read the output of rank 1."


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


def test_an_abort_ends_what_waits_for_the_failed_rank_whoever_aborts_first() -> None:
    for seconds in run_ranks(aborting, 3, timeout_s=60):
        assert all(each < SOON_S for each in seconds)


def await_words(group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], step: int) -> None:
    """Return when all ``ranks`` have said which step they are in, for who has said nothing yet is no suspect."""
    store = StatusStore(group.get_group_store(), name)
    deadline = time.monotonic() + 20
    for rank in ranks:
        while (word := store.read(rank)) is None or word.notes.get("step") != str(step):
            assert time.monotonic() < deadline, f"rank {rank} says nothing"
    dist.barrier(group)


def unreachable(rank: int, world_size: int, timeout_s: float) -> Any:
    """Rank 1 is frozen, then twice busy with something else."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    seen: dict[str, Any] = {}
    for kind in ("frozen", "all_reduce", "wait"):
        group = dist.new_group()
        detector = FailureDetector(group, timeout_s, kind)
        detector.start()
        detector.note(step=40)
        detector.note(where="exit")
        await_words(group, kind, (0, 1, 2), 40)
        if rank != 1:
            seen[kind] = outcome(detector, sit_in("all_reduce" if kind == "frozen" else kind, group, detector))
            os.kill(pids[1], signal.SIGCONT)
        elif kind == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()  # where it is busy
        if rank == 1:
            seen[kind] = outcome(detector, sit_in("wait", group, detector))
        detector.stop()
        dist.barrier()
    return seen


@pytest.mark.slow
def test_a_rank_that_is_frozen_or_stuck_is_named_within_the_timeout() -> None:
    timeout_s = 3.0
    others = run_ranks(unreachable, 3, args=(timeout_s,), timeout_s=90)
    suspect = others.pop(1)
    for seen in others:
        for kind in seen:
            seconds, rank, _, _ = seen[kind]
            assert seconds < timeout_s + INQUIRY_S
            assert rank == 1, kind
        assert seen["frozen"][2].startswith("not heard of for at least ")
        assert seen["frozen"][3].endswith(
            " s; it was last in step 40, exit. Its process was killed or frozen, or the machine is gone: "
            "look at the end of its output."
        )
        what = {"all_reduce": "the collective that this rank was in", "wait": "the end"}
        for kind in what:
            assert seen[kind][2] == f"alive, but did not come to {what[kind]} within 3 s"
            assert seen[kind][3] == (
                f"rank 1 is {seen[kind][2]}; it was last in step 40, exit. "
                "Raise join.timeout if that is how long a step takes."
            )
    for kind in suspect:
        seconds, rank, _, text = suspect[kind]
        assert seconds < SOON_S
        assert rank == 1
        assert text.startswith("the other ranks have given this one up, and went on without it: rank 1 "), kind


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
    detector = FailureDetector(group, timeout_s, "killed")
    detector.start()
    detector.note(step=7)
    await_words(group, "killed", tuple(range(world_size)), 7)
    assert detector.explain(RuntimeError("DataLoader timed out after 5 seconds")) is None
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = outcome(detector, sit_in("all_reduce", group, detector))
    start = time.monotonic()
    detector.stop()
    (folder / f"{rank}.json").write_text(json.dumps([*seen, time.monotonic() - start]))
    raise LookupError("all is told; the harness would wait for the rank that is gone")


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
        assert "all is told" in failure.value.failed[rank], failure.value
        seconds, whose, message, text, stopping = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seconds < SOON_S
        assert stopping < 2.0
        if own_store:
            assert whose is None
            assert message.startswith("the job's store is gone (it says ")
            assert "The process that hosts it, rank 0 or the launcher, was killed or frozen" in text
        else:
            assert whose == 0
            assert message.startswith("not heard of for at least ")
            assert "rank 0 has not been heard of" in text
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
        detector.note(step=epoch)
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
    dist.barrier()
    keys = store.num_keys() - keys
    dist.barrier()
    return limits, before == (backend.options._timeout, threading.active_count()), keys


def test_joins_in_a_row_leave_no_thread_no_key_and_the_timeout_that_was_there() -> None:
    assert run_ranks(many, 2, timeout_s=60) == [({timedelta(seconds=30)}, True, 0)] * 2


KINDS = ("none", "left", "crossed")


def unexplained(rank: int, world_size: int) -> Any:
    """Three groups of three ranks, side by side, as they all wait. All ranks are well, but in the first group the last
    rank has no detector, in the second it has left, and in the third all wait for each other."""
    texts: list[Any] = []
    number, kind, is_last = rank // 3, KINDS[rank // 3], rank % 3 == 2
    members = [tuple(range(first, first + 3)) for first in range(0, world_size, 3)]
    group = [dist.new_group(list(each)) for each in members][number]
    detector = FailureDetector(group, 2.0, kind)
    if not is_last or kind != "none":
        detector.start()
        detector.note(step=3)
        await_words(group, kind, members[number][:2] if kind == "none" else members[number], 3)
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
    told = run_ranks(unexplained, 3 * len(KINDS), timeout_s=60)
    assert told[0].pop(0) is None
    absent = (
        "is not in this join, or no more, and did not come to the end within 2 s. "
        "All ranks have to enter the same joins in the same order, and none may leave by itself."
    )
    assert told[:6] == [[(2, f"rank 2 {absent}")]] * 2 + [[]] + [[(5, f"rank 5 {absent}")]] * 2 + [[]]
    crossed = {text for ((_, text),) in told[6:]}
    for text in crossed:
        assert text.startswith("all ranks are alive and wait for each other, this one for the end of ")
        assert text.endswith(", in step 3. They do not make the same calls in the same order.")


def alone(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    detector = FailureDetector(group, 0.5, "alone")
    threads = threading.active_count()
    detector.start()
    assert threading.active_count() == threads
    detector.wait(lambda seconds: True, "nothing")
    with pytest.raises(PeerFailedError, match=r"did not come to the end within 0\.5 s"):
        detector.wait(threading.Event().wait, "the end")
    detector.report(ValueError("x"))
    assert detector.explain(RuntimeError("x")) is None
    detector.stop()


def test_a_rank_that_is_alone_needs_no_thread() -> None:
    run_ranks(alone, 1, timeout_s=30)


class OneStore:
    """As much of a process group as the threads need, for ranks in one process."""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def get_group_store(self) -> Any:
        return self.store


FATES = st.lists(st.sampled_from(["well", "well", "dead", "absent"]), min_size=2, max_size=8)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.lists(FATES, min_size=1, max_size=5))
def test_those_who_fall_silent_are_named_and_nobody_else(joins: list[list[str]]) -> None:
    group: Any = OneStore()
    timeout_s = 1.2
    alive: list[tuple[HeartbeatThread, threading.Event, tuple[int, ...]]] = []
    for i, fates in enumerate(joins):
        dead = tuple(rank for rank, fate in enumerate(fates) if fate == "dead")
        for rank in dead:
            StatusStore(group.get_group_store(), f"join {i}").write(rank, RankStatus(1, {}))
        for rank, fate in enumerate(fates):
            if fate == "well":
                acted = threading.Event()
                alive.append(
                    (HeartbeatThread(group, f"join {i}", rank, range(len(fates)), timeout_s, acted.set), acted, dead)
                )
    try:
        for watch, _, _ in alive:
            watch.start()
        for _, acted, dead in alive:
            assert not dead or acted.wait(20)
        deadline = time.monotonic() + 1.5 * timeout_s
        for watch, acted, dead in alive:
            assert acted.wait(max(0.0, deadline - time.monotonic())) == bool(dead)
            assert watch.lost == ""
            assert (() if watch.failure is None else watch.failure.ranks) == dead
    finally:
        for watch, _, _ in alive:
            watch.leave(5)


def await_true(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline


def test_a_ring_is_answered_at_once_and_a_rank_that_comes_meanwhile_is_no_suspect() -> None:
    group: Any = OneStore()
    store = StatusStore(group.get_group_store(), "join")
    watch = HeartbeatThread(group, "join", 0, range(2), 60, lambda: None)
    watch.start()

    def beat() -> int:
        word = store.read(0)
        return 0 if word is None else word.beat

    await_true(lambda: beat() > 0)
    start = time.monotonic()
    for _ in range(6):  # by itself it says as many words in 12 seconds
        before = beat()
        store.notify()
        await_true(lambda before=before: beat() > before)
    assert time.monotonic() - start < 10
    rung = store.notifications()
    call = watch.poll_all()
    await_true(lambda: store.notifications() > rung)
    store.write(1, RankStatus(1, {}))
    await_true(lambda: watch.roll.call == call)
    assert set(watch.roll.words) == {1}
    assert watch.failure is None
    watch.leave(10)


def test_news_reaches_64_ranks() -> None:
    group: Any = OneStore()
    ranks = range(64)
    acted = [threading.Event() for _ in ranks]
    watches = [HeartbeatThread(group, "join", rank, ranks, 60, acted[rank].set) for rank in ranks]
    for watch in watches:
        watch.start()
    failure = Failure((17,), "KeyError: 'x'", "rank 17 failed: KeyError: 'x'")
    watches[17].tell(failure, 10)
    watches[17].leave(10)
    assert all(event.wait(20) for rank, event in enumerate(acted) if rank != 17)
    assert all(watch.failure == failure for watch in watches)
    for watch in watches:
        watch.leave(10)
    assert not any(watch.is_alive() for watch in watches)


class Broken:
    def get_group_store(self) -> Any:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_is_gone_ends_the_thread_and_keeps_nobody_waiting() -> None:
    group: Any = Broken()
    acted = threading.Event()
    watch = HeartbeatThread(group, "join", 0, range(2), 60, acted.set)
    watch.start()
    watch.join(20)
    assert watch.lost == "RuntimeError: Connection reset by peer"
    watch.tell(Failure((0,), "m", "t"), 20)
    assert acted.is_set()
    watch.leave(20)


def test_what_a_rank_says_arrives_as_it_was() -> None:
    word = RankStatus(3, {"step": "4", "where": "exit", "epoch": "1"}, "the end", Failure((2, 3), "m", "t"))
    assert RankStatus.unpack(word.pack().encode()) == word
    assert location(word, "in ") == "in step 4, exit, epoch 1"
    assert location(RankStatus(1, {}), "in ") == ""


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
def test_the_error_of_a_collective_is_told_from_others(text: str, broken: bool, timeout: bool) -> None:
    cause = RuntimeError(text)
    outer = ValueError("in my loop")
    outer.__cause__ = cause
    for error in (cause, outer):
        assert (is_broken_operation(error), is_timeout(error)) == (broken, timeout)
