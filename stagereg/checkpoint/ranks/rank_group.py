"""The ranks that save and restore together, and the exchanges between them.

After each action that can fail on a single rank, the ranks exchange the result. So all ranks raise the error together,
with the failed rank and the reason, and no rank waits for a rank that has raised. The exchanges use their own gloo
group, separate from the collectives of training, and only one thread at a time uses the group.

Gloo aborts a group permanently if one operation takes too long. So the group has a timeout of 30 days, and an exchange
has its own limit or none. If the storage of a rank hangs, the others wait, and all continue together when it returns.

When a rank dies, its connections close. The first rank that detects this records the failed ranks in the rendezvous
store, and closes its own connections, so that all ranks raise the same error. A rank that waits long records that in
the store, so that the missing ranks are known after the timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from stagereg.errors import CheckpointError, RankMismatchError, StageregError, global_ranks, kind_of, name_ranks, reason
from stagereg.kernel.broken import abort, is_broken_operation, is_timeout
from stagereg.kernel.channel import resources_of, wait_for_keys
from stagereg.kernel.memory import view_of

_log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_PATIENCE = datetime.timedelta(days=30)  # longer than any wait for storage
_USUAL = datetime.timedelta(minutes=30)  # the timeout of torch's own groups
_LONG_S = 5.0  # seconds until a waiting rank logs the ranks that it waits for
_TOGETHER_S = 120.0  # seconds within which all ranks must construct their groups
_TURN_S = 1.0  # seconds until a rank records in the store that it waits
_ANSWER_S = 2.0  # timeout of a call to the store, in seconds
_TAG = 0x90E5  # tag of a message that is never received
_HEAD_BYTES, _LENGTH_BYTES = 1016, 8  # sizes of a message's beginning and of its length, sent first
_SHOWN = 4  # maximum number of ranks' errors in a message


def _cause(error: BaseException) -> BaseException | None:
    """Return the cause for a new error: ``error``, or the cause of ``error`` if the new error repeats its text."""
    return error.__cause__ if isinstance(error, CheckpointError) else error


def _listed(errors: Mapping[int, BaseException]) -> str:
    """List the errors of the ranks; ranks with equal errors are listed together."""
    alike: dict[str, list[int]] = {}
    for rank, error in errors.items():
        alike.setdefault(reason(error), []).append(rank)
    # A rank that has detected a mismatch is not at fault, so the text does not name it.
    blameless = {reason(error) for error in errors.values() if isinstance(error, RankMismatchError)}
    texts = [text if text in blameless else f"{name_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "; ".join(texts[:_SHOWN] + more)


def portable(error: BaseException) -> BaseException:
    """Return ``error`` if another process can unpickle it, otherwise a ``RuntimeError`` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(reason(error))
    return error


def _post(act: Callable[[], object]) -> tuple[bytes, BaseException | None]:
    """Run ``act``; return the message for rank 0, and the error, which is not raised because other ranks wait."""
    try:
        return pickle.dumps((act(), None)), None
    except BaseException as error:
        return pickle.dumps((None, portable(error))), error


def _answer(
    posts: Sequence[bytes], answer: Callable[[list[T]], Sequence[U]]
) -> tuple[list[bytes], BaseException | None]:
    """Return the messages of rank 0 to each rank, and the error of ``answer``, if any."""
    failure: BaseException | None = None
    try:
        values, found = zip(*map(pickle.loads, posts), strict=True)
        errors = {rank: error for rank, error in enumerate(found) if error is not None}
        if not errors:
            answers = answer(list(values))
            packed = {id(each): each for each in answers}  # each object is pickled only once
            messages = {key: pickle.dumps((each, {})) for key, each in packed.items()}
            return [messages[id(each)] for each in answers], None
    except BaseException as error:
        failure, errors = error, {0: portable(error)}
    return [pickle.dumps((None, errors))] * len(posts), failure


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _head(data: bytes = b"") -> torch.Tensor:
    """Return the length and the beginning of a message; most messages fit into it."""
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_HEAD_BYTES]
    return _as_tensor(head.ljust(_LENGTH_BYTES + _HEAD_BYTES))


def _read_head(head: torch.Tensor) -> tuple[bytes, int]:
    """Return the beginning of a message, and the length of the message."""
    data = bytes(view_of(head))
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES:][:length], length


class RankGroup:
    """The ranks that save together; a single process if ``torch.distributed`` is not initialised.

    Constructing is collective: all ranks construct their groups in the same order. ``timeout`` is the limit of
    exchanges
    without their own limit, and is at least half an hour.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None
    ) -> None:
        self.group: dist.ProcessGroup | None = None
        self.limit = min(max(timeout or _USUAL, _USUAL), _PATIENCE)  # limit of exchanges without their own
        self.rank, self.size = 0, 1
        self.numbers: Sequence[int] = range(1)  # the number of each rank in the checkpoint
        self._named: Sequence[int] = ()  # the global rank of each of these ranks, for messages
        self._store: Any = None
        self._why = ""  # why the ranks cannot continue
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_rank(process_group) < 0:
            raise CheckpointError(
                "This rank is not in the process_group of the Checkpointer. Construct it only on ranks of that group."
            )
        training = process_group or dist.group.WORLD
        ranks = self._named = dist.get_process_group_ranks(training)
        present = self._await_all(training, len(ranks))
        self.group = dist.new_group(
            ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=process_group is not None
        )
        present()
        self.rank, self.size, self.numbers = dist.get_rank(self.group), len(ranks), range(len(ranks))

    def _await_all(self, training: Any, size: int) -> Callable[[], object]:
        """Wait until all ranks construct their groups, and log a long wait; the returned function cleans up."""
        store = self._store = PrefixStore(resources_of(training).next_name("ranks"), training.get_group_store())
        rank, ends = dist.get_rank(training), time.monotonic() + _TOGETHER_S
        store.set(str(rank), "")
        store.set(f"machine/{rank}", socket.gethostname())
        warned = False
        while not wait_for_keys(store, [str(each) for each in range(size)], _LONG_S):
            there = [each for each in range(size) if store.check([str(each)])]
            missing = self.name(*(each for each in range(size) if each not in there))
            text = f"{self.name(*there)} constructed a Checkpointer, but {missing} did not. Construct it on all ranks."
            if not warned and rank == there[0]:
                _log.warning("stagereg: %s", text)
            warned = True
            if time.monotonic() > ends:
                raise CheckpointError(
                    f"{text} This rank has waited {_TOGETHER_S:g} s. If a rank prepares data first, let the others "
                    "wait in torch.distributed.barrier()."
                )
        return partial(store.delete_key, str(rank))

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Name these ranks by their global ranks in the messages that are written inside."""
        token = global_ranks.set(self._named)
        try:
            yield
        finally:
            global_ranks.reset(token)

    def name(self, *ranks: int) -> str:
        """Return ranks of this group for a message, by their global ranks."""
        with self.naming():
            return name_ranks(ranks)

    def machine_of(self, rank: int) -> str:
        found: str = self._store.get(f"machine/{rank}").decode()
        return found

    def check_still_all(self) -> None:
        """Raise ``CheckpointError`` if ``torch.distributed`` was initialised after the construction of this object."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError("The Checkpointer was constructed before init_process_group. Construct it later.")

    def is_first(self, what: str) -> bool:
        """Return whether no other rank has called this method with ``what`` yet. Not collective."""
        return self.size == 1 or self._ask(lambda: int(self._store.add(f"first/{what}", 1))) in (1, None)

    @property
    def number(self) -> int:
        return self.numbers[self.rank]

    def max_async(self, values: Sequence[float]) -> Callable[..., list[float]]:
        """Begin to compute the maximum of each value over all ranks. Collective.

        Returns a function that waits at most the given seconds for the results. It raises ``CheckpointError`` if they
        do not arrive in time.
        """
        greatest = torch.tensor(values, dtype=torch.float64, device="cpu")
        work = None if self.size == 1 else dist.all_reduce(greatest, dist.ReduceOp.MAX, self.group, async_op=True)

        def wait(seconds: float | None = None) -> list[float]:
            limit = self.limit if seconds is None else datetime.timedelta(seconds=seconds)
            with self.explaining("The ranks could not agree on a step"):
                try:
                    if work is not None:
                        self.wait(work, limit)
                except RuntimeError as error:
                    if seconds is None or not is_timeout(error):
                        raise
                    # The all-reduce continues, so the ranks save together again once the slow rank takes part.
                    raise CheckpointError(f"The ranks could not agree on a step in {limit}: {reason(error)}") from error
            found: list[float] = greatest.tolist()
            return found

        return wait

    def any(self, failing: str, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank; waits as long as the other ranks are alive. Collective.

        See :meth:`round_trip` for ``failing`` and the errors.
        """
        if self.size == 1:
            return flag
        self._expect_initialized(failing)
        flags = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        with self.explaining(failing):
            self.wait(dist.all_reduce(flags, dist.ReduceOp.MAX, self.group, async_op=True), _PATIENCE)
        return bool(flags)

    @contextlib.contextmanager
    def explaining(self, failing: str) -> Iterator[None]:
        """Raise ``CheckpointError`` on all ranks, with the failed or missing ranks, if an operation inside fails."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, StageregError) or not is_broken_operation(error):
                raise
            if not self._why:
                self._why = self._missing(time.monotonic() - began) if is_timeout(error) else self._gone(error)
                told = self._ask(lambda: self._store.compare_set("failure", "", self._why).decode())
                self._why = told or self._why
                abort(cast("dist.ProcessGroup", self.group))
            raise CheckpointError(f"{failing}: {self._why}") from error

    def wait(self, work: Any, limit: datetime.timedelta) -> None:
        """Wait for a collective. Not for messages, because their timeouts close connections. Raises torch's errors."""
        key, ends, waits = f"waits/{self.rank}", time.monotonic() + limit.total_seconds(), False
        while not work.is_completed():
            turn = max(min(_TURN_S, ends - time.monotonic()), 0.001)
            try:
                work.wait(datetime.timedelta(seconds=turn))
            except RuntimeError:
                if not work.is_completed() and time.monotonic() > ends:
                    raise
                if not waits:
                    waits = True
                    self._ask(lambda: self._store.set(key, ""))
        work.wait()  # raises the error of the work
        if waits:
            self._ask(lambda: self._store.delete_key(key))

    def end(self, why: str) -> None:
        """Make every exchange fail with ``why``, also a running one, without contact to other ranks or the store.

        Any thread; not collective.
        """
        if self.group is not None:
            self._why = self._why or why
            abort(self.group)

    def _gone(self, error: RuntimeError) -> str:
        """Return a sentence about the ranks that are no longer connected to this rank."""
        gone = []
        for rank in range(self.size):
            try:
                if rank != self.rank:
                    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                    dist.isend(nothing, group=self.group, group_dst=rank, tag=_TAG)
            except RuntimeError:
                gone.append(rank)
        if not gone:
            return reason(error)
        if self._ask(lambda: str(self._store.check(["failure"]))) is None:  # the first rank hosted the store
            gone = gone[:1]
        return f"{self.name(*gone)} terminated, or the connection was lost: check the end of the output there."

    def _missing(self, seconds: float) -> str:

        def look() -> str:
            missing = [r for r in range(self.size) if r != self.rank and not self._store.check([f"waits/{r}"])]
            return self.name(*missing) if missing else "a rank"

        who = self._ask(look) or "a rank, perhaps the one with the rendezvous store, which does not respond either,"
        return f"{who} did not reach this exchange within {seconds:.3g} s, and may hang: check the output there."

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call to the store; ``None`` if the store is gone or its host does not respond."""
        answer: Future[T | None] = Future()

        def ask() -> None:
            try:
                answer.set_result(call())
            except RuntimeError:
                answer.set_result(None)

        threading.Thread(target=ask, name="stagereg-ask", daemon=True).start()
        try:
            return answer.result(_ANSWER_S)
        except TimeoutError:
            return None

    def run_on_all(self, failing: str, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on every rank, and return the results in rank order. Collective.

        Raises the errors of :meth:`round_trip`, and ``CheckpointError`` if the other ranks do not take part in time.
        """
        return self.round_trip(failing, act, lambda values: [values] * self.size, self.limit)

    def round_trip(
        self,
        failing: str,
        act: Callable[[], T],
        answer: Callable[[list[T]], Sequence[U]],
        limit: datetime.timedelta | None = None,
    ) -> U:
        """Run ``act`` on every rank and ``answer`` on rank 0; raise on all ranks if any call failed. Collective.

        Args:
            failing: the beginning of the message, such as ``"Step 100 was not saved"``.
            act: the action of this rank; must not be collective itself.
            answer: called on rank 0 if no rank has failed, with the results of ``act`` in rank order; returns an answer
                for each rank.
            limit: how long to wait for the other ranks; ``None``: as long as they are alive.

        Returns:
            The answer for this rank.

        Raises:
            CheckpointError: on every rank, with the failed ranks and their errors. The cause is this rank's error or,
                without one, the error of the first failed rank. An error of ``answer`` counts as an error of rank 0.
            BaseException: ``act`` or ``answer`` raised an exception that is not an ``Exception``; only on that rank.
        """
        with self.naming():
            if self.size == 1:
                try:
                    return answer([act()])[0]
                except Exception as error:
                    raise kind_of([error])(f"{failing}: {reason(error)}") from _cause(error)
            post, failure = _post(act)
            self._expect_initialized(failing)
            # Messages are bytes, so that a rank takes part even if it cannot pickle or unpickle an object.
            with self.explaining(failing):
                posts = self._collect(post, limit or _PATIENCE)
            answers: list[bytes] = []
            if self.rank == 0:
                answers, failed = _answer(posts, answer)
                failure = failure if failed is None else failed
            with self.explaining(failing):
                answered, errors = pickle.loads(self._hand_out(answers, limit or _PATIENCE))
            if failure is not None:
                errors[self.rank] = failure  # the original, with its cause
                if not isinstance(failure, Exception):
                    raise failure
            if errors:
                cause = next(iter(errors.values())) if failure is None else failure
                raise kind_of(errors.values())(f"{failing}: {_listed(errors)}") from _cause(cause)
            return cast("U", answered)

    def _expect_initialized(self, failing: str) -> None:
        if not dist.is_initialized():
            raise CheckpointError(
                f"{failing}: the process group is gone. Call close() of the Checkpointer before destroy_process_group()"
            )

    def _collect(self, post: bytes, limit: datetime.timedelta) -> list[bytes]:
        """Return the messages of all ranks on rank 0; torch's ``gather_object`` would pad each to the longest."""
        heads = [_head() for _ in range(self.size)] if self.rank == 0 else None
        self.wait(dist.gather(_head(post), heads, group=self.group, group_dst=0, async_op=True), limit)
        if heads is None:
            self._send([(0, post)])
            return []
        return [post, *self._receive(list(enumerate(heads))[1:])]

    def _hand_out(self, answers: Sequence[bytes], limit: datetime.timedelta) -> bytes:
        """Send each rank its answer from rank 0, and return the answer of this rank."""
        head, heads = _head(), [_head(each) for each in answers]
        self.wait(dist.scatter(head, heads or None, group=self.group, group_src=0, async_op=True), limit)
        if self.rank == 0:
            self._send(list(enumerate(answers))[1:])
            return answers[0]
        return self._receive([(0, head)])[0]

    def _send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send the remaining bytes of messages that are longer than their heads."""
        rests = [(rank, _as_tensor(data[_HEAD_BYTES:])) for rank, data in messages if len(data) > _HEAD_BYTES]
        for work in [dist.isend(x, group=self.group, group_dst=rank) for rank, x in rests]:
            cast("dist.Work", work).wait(self.limit)

    def _receive(self, heads: Sequence[tuple[int, torch.Tensor]]) -> list[bytes]:
        """Receive the remaining bytes of messages whose heads have arrived; return the messages."""
        begun = [(rank, *_read_head(head)) for rank, head in heads]
        rests = [torch.empty(length - len(begin), dtype=torch.uint8, device="cpu") for _, begin, length in begun]
        coming = [(rank, x) for (rank, *_), x in zip(begun, rests, strict=True) if len(x)]
        for work in [dist.irecv(x, group=self.group, group_src=rank) for rank, x in coming]:
            cast("dist.Work", work).wait(self.limit)
        return [begin + bytes(view_of(x)) for (_, begin, _), x in zip(begun, rests, strict=True)]
