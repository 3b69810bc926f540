"""When one rank fails, the others end in time with an error that names it; when none does, nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stagereg
import stagereg.testing.ranks as ranks
from stagereg.errors import CheckpointError, JoinError, PeerFailedError
from stagereg.join.failure import FailureDetector, RankStatus
from stagereg.kernel.broken import abort, is_broken_operation, is_timeout
from stagereg.kernel.channel import resources_of
from stagereg.testing import RankFailure, run_ranks

from ..support.reference import JOINABLES, await_published, batch, mlp

SOON_S = 30.0
"""Seconds in which the error of a rank reaches the others: a quarter of a second, or far more on a busy machine."""
TIMEOUT_S = 3.0
PATIENT_S = 8.0
"""Seconds of a timeout of which a fifth, when a silent rank counts as lost, is long enough on a busy machine."""
SLACK_S = 40.0
"""Seconds that a rank may take beyond the timeout to raise, on a machine with more ranks than cores."""
WAYS = ["torch's wire", "counted", "planned", "iterate"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the harness wait for ranks that outlive another as long as they may take to raise."""
    monkeypatch.setattr(ranks, "_LINGER_S", PATIENT_S + SLACK_S)


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


def test_an_abort_ends_every_wait_for_the_failed_rank() -> None:
    for seconds in run_ranks(aborting, 3, timeout_s=100):
        assert all(each < SOON_S for each in seconds)


def status_of(store: dist.Store, rank: int) -> RankStatus | None:
    return pickle.loads(store.get(str(rank))) if store.check([str(rank)]) else None


def await_true(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline


def bereft(rank: int, world_size: int) -> list[Any]:
    """Rank 0 is killed, and with it the store of the process group."""
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
    detector = FailureDetector(group, 4.0, "bereft")
    detector.start()
    statuses = dist.PrefixStore("bereft", group.get_group_store())
    await_true(lambda: all(status_of(statuses, each) for each in range(world_size)))
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1))
    error = detector.explain(raised.value)
    seconds = time.monotonic() - start
    detector.stop()
    raise LookupError(json.dumps([seconds, time.monotonic() - start - seconds, str(error)]))


@pytest.mark.usefixtures("patient")
def test_a_killed_rank_that_hosted_the_store_is_named() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(bereft, 3, timeout_s=100)
    assert "SIGKILL" in failure.value.failed[0]
    for rank in (1, 2):
        (found,) = re.findall(r"LookupError: (\[.*\])", failure.value.failed[rank])
        seconds, stopping, text = json.loads(found)
        assert seconds < SOON_S
        assert stopping < SOON_S
        assert "the rendezvous store is gone (" in text
        assert "hosts the store, rank 0 or the launcher, was killed or frozen" in text


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

    def __init__(self, member: Any, timeout_s: float, step: int | None = None) -> None:
        self.member, self.acted = member, member.aborted
        with mock.patch.object(dist, "get_process_group_ranks", lambda group: list(range(group.size()))):
            super().__init__(member, timeout_s, "join", lambda: step)

    def leave(self) -> None:
        """Return when the thread is idle."""
        self.stop()
        thread = resources_of(self.member).heartbeat
        idle = threading.Event()
        thread.submit(idle.set)
        assert idle.wait(60)
        thread.close()


@pytest.mark.usefixtures("simulated_abort")
def test_a_rank_that_comes_during_a_poll_is_not_suspected() -> None:
    shared = dist.HashStore()
    store = dist.PrefixStore("join", shared)
    detector = Detecting(Member(shared, 0, 2), 60)
    detector.start()
    detector.start()
    assert detector.explain(RuntimeError("DataLoader timed out after 5 seconds")) is None

    def beat() -> int:
        status = status_of(store, 0)
        return 0 if status is None else status.beat

    found = []
    asking = threading.Thread(target=lambda: found.append(detector.explain(RuntimeError("gloo"))))
    asking.start()
    await_true(lambda: beat() > 3)  # so the poll has begun
    store.set("1", pickle.dumps(RankStatus(1)))
    asking.join(60)
    assert found == [None]
    assert detector.failure is None
    detector.leave()
    assert not store.check(["0"])
    detector.stop()
    detector.report(ValueError("after its end"))
    assert detector.explain(RuntimeError("gloo: after its end")) is None
    detector.check()


@pytest.mark.usefixtures("simulated_abort")
@pytest.mark.parametrize("kind", ["never came", "left", "all wait"])
def test_a_rank_outside_the_join_is_named_only_when_waited_for(kind: str) -> None:
    shared = dist.HashStore()
    store = dist.PrefixStore("join", shared)
    started = [Detecting(Member(shared, rank, 3), 2.0, step=3) for rank in range(2 if kind == "never came" else 3)]
    for each in started:
        each.start()
    await_true(lambda: all(status_of(store, rank) for rank in range(len(started))))
    waiting = started
    if kind != "all wait":
        waiting = started[:2]
        for each in started[2:]:
            each.leave()
        assert started[0].explain(RuntimeError("[gloo/pair.cc] sizes do not match")) is None

    def wait(detector: Detecting) -> PeerFailedError:
        with pytest.raises(PeerFailedError) as error:
            detector.wait(threading.Event().wait, f"the end of {detector.member.rank()}")
        return error.value

    with ThreadPoolExecutor(3) as threads:
        errors = list(threads.map(wait, waiting))
    for error in errors:
        if kind == "all wait":
            assert str(error).startswith("all ranks are alive and wait for each other: rank ")
            assert (
                "; its last step was 3. The ranks do not run the same collectives in the same order. A forward"
                in str(error)
            )
        else:
            assert error.rank == 2
            assert "rank 2 has not entered this join, or has left, and did not reach the end of " in str(error)
            assert "All ranks must enter the same joins in the same order" in str(error)
    for each in waiting:
        each.leave()


@pytest.mark.usefixtures("simulated_abort")
def test_a_rank_that_the_others_have_passed_by_is_named_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagereg.join.failure._POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr("stagereg.join.failure.collectives_of", lambda member: 4 + (member.rank() > 0))
    shared = dist.HashStore()
    detectors = [Detecting(Member(shared, rank, 3), 1000) for rank in range(3)]
    for each in detectors:
        each.start()
    with pytest.raises(PeerFailedError, match=r"ranks 1, 2 reached a collective that rank 0 does not run while it"):
        detectors[0].wait(threading.Event().wait, "the next step")
    for each in detectors:
        each.leave()


@pytest.mark.usefixtures("simulated_abort")
def test_a_failure_reaches_64_ranks_and_only_the_first_one_does() -> None:
    store = dist.HashStore()
    all_of_them = [Detecting(Member(store, rank, 64), 60) for rank in range(64)]
    for each in all_of_them:
        each.start()
    for rank in (17, 18):
        all_of_them[rank].report(KeyError("x"))
    all_of_them[17].leave()
    assert all(each.acted.wait(60) for rank, each in enumerate(all_of_them) if rank != 17)
    assert not all_of_them[17].acted.is_set()
    assert {str(each.failure) for each in all_of_them} == {str(all_of_them[17].failure)}
    with pytest.raises(PeerFailedError, match="rank 17 failed: KeyError: 'x'"):
        all_of_them[0].check()
    for rank, each in enumerate(all_of_them):
        if rank != 17:
            each.leave()


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


BEFORE = -1
"""For a step: before the loop."""


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(mlp().double())


def join(joinables: list[Any], way: str, data: list[Any], timeout_s: float = TIMEOUT_S) -> stagereg.Join:
    mode = way if way in ("counted", "planned") else None
    return stagereg.Join(joinables, mode=mode, loader=data if way == "planned" else None, timeout=timeout_s)


def trains(rank: int, way: str, length: int, trouble: Callable[[int], None], timeout_s: float = TIMEOUT_S) -> None:
    """A loop over uneven inputs, with trouble before it, and between forward and backward."""
    ddp = model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = [batch(rank, 0, step) for step in range(length)]
    joined = join([ddp, optimizer], way, data, timeout_s)
    with joined:
        trouble(BEFORE)
        for step, x in enumerate(joined.iterate(data) if way == "iterate" else data):
            optimizer.zero_grad()
            loss = ddp(x).sum()
            trouble(step)
            loss.backward()
            optimizer.step()


def outcome(act: Callable[[], object]) -> tuple[str, str, float]:
    """What a rank ends with: the type of its error, its text, and after how many seconds."""
    started = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


LENGTHS = (2, 6, 6)


def raising(rank: int, world_size: int, way: str, lengths: tuple[int, ...], fails_at: int) -> tuple[str, str, float]:
    def trouble(step: int) -> None:
        if rank == 1 and step == fails_at:
            raise ValueError("loss is not finite")

    return outcome(lambda: trains(rank, way, lengths[rank], trouble, timeout_s=100))


# iterate plans where all lengths are known. With one batch, rank 0 waits outside any collective for an answer about the
# loop's gradients; and "before" the loop of rank 1, the others have begun theirs.
@pytest.mark.parametrize(
    ("way", "lengths", "fails_at"),
    [("torch's wire", LENGTHS, 3), ("counted", (1, 3, 3), 1), ("iterate", LENGTHS, 3), ("iterate", LENGTHS, BEFORE)],
)
def test_an_exception_on_one_rank_is_reported_on_all(way: str, lengths: tuple[int, ...], fails_at: int) -> None:
    joined, failed, active = run_ranks(raising, 3, args=(way, lengths, fails_at), timeout_s=100)
    assert failed[:2] == ("ValueError", "loss is not finite")
    for kind, text, seconds in (joined, active):
        assert kind == "PeerFailedError"
        assert "rank 1 failed: ValueError: loss is not finite\nRead the output of rank 1 for the cause." in text
        assert seconds < SLACK_S


def going_on(rank: int, world_size: int) -> list[float]:
    """All ranks leave three joins of each kind by the same exception, and use the process group afterwards."""
    sums = []
    for way in WAYS * 3:
        with contextlib.suppress(KeyError):
            trains(rank, way, 3, lambda step: {BEFORE: None, 0: None}[step])
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
    return sums


def test_ranks_that_all_leave_by_the_same_exception_can_go_on() -> None:
    assert run_ranks(going_on, 3, timeout_s=100) == [[3.0] * 3 * len(WAYS)] * 3


def failing_between(rank: int, world_size: int) -> list[Any]:
    """All ranks leave the second of three joins by an exception, as rank 1 has begun a sum that rank 0 has not."""
    found: list[Any] = []
    channel: Any = None

    def trouble(step: int) -> None:
        nonlocal channel
        before, channel = channel, resources_of(dist.group.WORLD).channels["membership"]  # type: ignore[arg-type]
        if step == BEFORE:
            found.append(channel is before)
        if step == 1 and len(found) == 3:
            if rank == 1:
                channel.add([7.0] * 9)
            raise KeyError

    with mock.patch("stagereg.join.failure.abort"):  # so that the group can be used again
        for _ in range(3):
            found.append(outcome(lambda: trains(rank, "counted", 3 + rank, trouble))[0])
            dist.barrier()
    return found


def test_no_message_of_a_failed_join_reaches_the_next_one() -> None:
    assert run_ranks(failing_between, 2, timeout_s=60) == [[False, "", True, "KeyError", False, ""]] * 2


def lost(rank: int, world_size: int, way: str, number: int | None, folder: str) -> None:
    """Rank 1 gets a signal in a step, or takes no part in it until the others have raised."""

    def done() -> int:
        return len(list(Path(folder).glob("[0-9]")))

    def trouble(step: int) -> None:
        if rank == 1 and step == 3 and number is not None:
            await_published()
            os.kill(os.getpid(), number)
        while rank == 1 and step == 3 and done() < 2:
            time.sleep(0.05)

    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    trains(rank, way, LENGTHS[rank], lambda step: None)  # so the next join needs no time to be entered
    seen = outcome(lambda: trains(rank, way, LENGTHS[rank], trouble, PATIENT_S))
    Path(folder, f"{rank}.part").write_text("\n".join(map(str, [seen[0], seen[2], seen[1]])))
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    if done() == 2:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGKILL)
    raise RuntimeError("this rank is done; the harness would wait for the one that is gone")


LOST = {
    signal.SIGKILL: r"rank 1 did not respond for at least .*; its last step was \d.*killed or frozen",
    signal.SIGSTOP: r"rank 1 did not respond for at least .*; its last step was \d.*killed or frozen",
    None: r"rank 1 is alive, but did not reach .* within 8 s; its last step was \d.*Join\(timeout=\.\.\.\)",
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("way", "number"), [*(("iterate", each) for each in LOST), ("counted", signal.SIGKILL)])
def test_a_rank_that_is_lost_is_named_by_all_others_in_time(way: str, number: int | None, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(lost, 3, args=(way, number, str(tmp_path)), timeout_s=100)
    for rank in (0, 2):
        kind, seconds, *text = (tmp_path / str(rank)).read_text().splitlines()
        assert kind == "PeerFailedError", text
        assert re.search(LOST[number], text[0])
        assert (0.0 if number else PATIENT_S * 0.5) < float(seconds) < PATIENT_S + SLACK_S


class NeverNotifies(stagereg.Joinable):
    """Reduces something each step, and does not announce it."""

    def __init__(self) -> None:
        super().__init__()

    def __call__(self) -> None:
        dist.all_reduce(torch.ones(8))

    def join_hook(self, **kwargs: Any) -> stagereg.JoinHook:
        return stagereg.JoinHook()

    join_device = property(lambda self: torch.device("cpu"))
    join_process_group = property(lambda self: dist.group.WORLD)


def never_entered(rank: int, world_size: int) -> tuple[str, str, float]:
    def enter() -> None:
        with mock.patch("stagereg.join.peers.LIMIT_S", 1.0), stagereg.Join([ddp], mode="counted", timeout=1.0):
            pass

    ddp = model()
    seen = outcome(enter if rank == 0 else lambda: None)
    dist.distributed_c10d._get_default_store().wait(["seen"]) if rank else None
    dist.distributed_c10d._get_default_store().set("seen", "")
    return seen


def test_a_rank_that_never_enters_is_named() -> None:
    (kind, text, seconds), _ = run_ranks(never_entered, 2, timeout_s=100)
    assert kind == "PeerFailedError"
    assert "rank 1 has not entered this join, or has left, and did not reach the join within 1 s" in text
    assert seconds < SLACK_S


def misuse(rank: int, world_size: int, what: str) -> tuple[str, str, float]:
    one, two = model(), model()
    x = batch(rank, 0, 0)

    def act() -> None:
        if what == "nested, both used inside":
            with stagereg.Join([one], timeout=TIMEOUT_S), stagereg.Join([two], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    (one(x).sum() + two(x).sum()).backward()
        elif what == "nested, one rank fails":
            with stagereg.Join([one], timeout=TIMEOUT_S), stagereg.Join([two], timeout=TIMEOUT_S):
                for _ in range(4):
                    two(x).sum().backward()
                    if rank == 1:
                        raise JoinError("boom")
        elif what == "nested, the same module":
            with stagereg.Join([one], timeout=TIMEOUT_S), stagereg.Join([one], timeout=TIMEOUT_S):
                one(x).sum().backward()
        elif what == "another order than listed":
            with stagereg.Join([one, two], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    two(x).sum().backward()
                    one(x).sum().backward()
        elif what == "a forward without a backward":
            with stagereg.Join([one], timeout=TIMEOUT_S):
                for _ in range(1 + rank):
                    one(x).sum().backward()
                if rank == 1:
                    one(x)
        elif what == "static graph, a rank without batches":
            fixed = DistributedDataParallel(mlp().double(), static_graph=True)
            with stagereg.Join([fixed], timeout=TIMEOUT_S):
                for _ in range(2 * rank):
                    fixed(x).sum().backward()
        elif what == "a loop inside a loop":
            joined = stagereg.Join([one], timeout=TIMEOUT_S)
            with joined:
                for b in joined.iterate([x] * 3):
                    one(b).sum().backward()
                    for again in joined.iterate([x]):
                        one(again)
        elif what.endswith("on rank 0 alone"):
            metrics = [stagereg.build("joinable", "metrics")] if "metrics" in what else []
            mode = "counted" if "counted" in what else "planned"
            joined = stagereg.Join([one, *metrics], mode=mode, loader=range(3), timeout=TIMEOUT_S)
            with joined:
                for step in range(1, 4):
                    loss = one(x).sum()
                    loss.backward()
                    if rank == 0 or step < 2:
                        metrics[0].compute() if metrics else joined.mean(loss, 1)
        elif what.startswith("never announced"):
            reduces = NeverNotifies()
            with stagereg.Join([reduces], mode="counted" if "counted" in what else None, timeout=TIMEOUT_S):
                for _ in range(2 + 2 * rank):
                    reduces()

    return outcome(act)


OF_METRICS = [("metrics.compute", "counted")] if JOINABLES else []
MESSAGES = {
    "a loop inside a loop": "only one can run at a time",
    "nested, both used inside": "used inside an inner join",
    "nested, one rank fails": "boom",
    "nested, the same module": "already in another active join",
    "another order than listed": "began a forward of 1 (Sequential), although a backward of 0 (Sequential)",
    "a forward without a backward": "a forward without a backward",
    "static graph, a rank without batches": "static_graph",
    **{
        f"{mode} {call}, on rank 0 alone": f"rank 0 called {call} in step 2, rank 1 did not. Call {call} on all ranks, "
        "not under `if rank == 0`."
        for call, mode in (("join.mean", "counted"), ("join.mean", "planned"), ("metrics.compute", "counted"))[
            : 2 + JOINABLES
        ]
    },
    "never announced": "never signalled its steps",
    "never announced, counted": "never signalled its steps",
}


def test_what_cannot_be_joined_is_an_error_on_all_ranks() -> None:
    for each, message in MESSAGES.items():
        for kind, text, seconds in run_ranks(misuse, 2, args=(each,), timeout_s=100):
            assert kind in ("JoinError", "PeerFailedError"), (each, text)
            assert message in text
            assert seconds < TIMEOUT_S + SLACK_S, each


def observe(ddp: DistributedDataParallel) -> dict[str, Any]:
    """All that a join could leave on a module."""
    return {
        "config": tuple(ddp._join_config)[:3],
        "divisor": ddp.__dict__.get("_divide_by_initial_world_size", "none"),
        "attributes": sorted(ddp.__dict__.keys() - {"_authoritative_rank"}),  # DDP sets it before each use
        "hooks": [len(p._backward_hooks or ()) for p in ddp.parameters()],
        "module hooks": (len(ddp._forward_pre_hooks), len(ddp._forward_hooks)),
    }


class Clumsy(NeverNotifies):
    """Its exit fails."""

    def detach(self) -> None:
        raise OSError("clumsy")


def unentered_and_failing_exit(rank: int, world_size: int) -> Any:
    ddp = model()
    before = observe(ddp)
    stagereg.Join([ddp, lambda: None])
    unentered = observe(ddp)
    joinables = [Clumsy(), ddp, Clumsy()]
    with contextlib.suppress(OSError), stagereg.Join(joinables):
        pass
    return before, unentered, observe(ddp), [joinable._join_config.enable for joinable in joinables]


def test_a_join_not_entered_or_that_fails_changes_nothing() -> None:
    for before, unentered, after, enabled in run_ranks(unentered_and_failing_exit, 2, timeout_s=30):
        for mark in ("config", "hooks", "module hooks"):
            assert unentered[mark] == before[mark]
        assert after == before
        assert enabled == [False, False, False]


def leaves_on_empty(rank: int, world_size: int, error: BaseException) -> tuple[str, list[str]]:
    """Rank 0 is without data in the second step, and leaves with the error."""
    ddp = model()
    try:
        with stagereg.Join([ddp], mode="auto", timeout=20) as join:
            for x in join.iterate([batch(rank, 0, step) for step in range(1 + rank)]):
                if len(x) == 0:
                    raise error
                ddp(x).sum().backward()
    except BaseException as raised:
        return str(raised), getattr(raised, "__notes__", [])
    return "", []


@pytest.mark.parametrize(
    ("error", "notes", "elsewhere"),
    [
        (
            ValueError("no samples"),
            1,
            "rank 0 failed: ValueError: no samples\nRead the output of rank 0 for the cause.",
        ),
        (
            CheckpointError("no save"),
            0,
            "rank 0 failed: stagereg.errors.CheckpointError: no save\nRead the output of rank 0 for the cause.",
        ),
        (SystemExit(3), 0, "rank 0 left the join alone, with SystemExit: 3. Make all ranks leave at the same step."),
    ],
)
def test_foreign_errors_on_an_empty_batch_get_a_note(error: BaseException, notes: int, elsewhere: str) -> None:
    own, other = run_ranks(leaves_on_empty, 2, args=(error,), timeout_s=100)
    assert own[0] == str(error)
    assert len(own[1]) == notes
    assert other == (elsewhere, [])
