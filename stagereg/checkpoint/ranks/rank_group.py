"""The ranks that save and restore together, and the messages that they exchange.

After each action that can fail on a single rank, the ranks exchange the results. If the action failed on one rank, all
ranks raise an error that names the rank and the reason, and no rank waits for the failed rank. The exchanges use a
separate gloo group, not the group of training. Only one thread at a time uses the gloo group.

Gloo aborts a group permanently if an operation times out. Therefore the group has a timeout of 30 days, and each
exchange has its own limit, or none. If the storage of one rank hangs, the other ranks wait until it responds.

When a rank dies, its connections close. The first rank that detects this records the failed ranks in the rendezvous
store, and closes its own connections, so that all ranks raise the same error. A rank that waits for more than a second
records this in the store. After a timeout, the ranks without such a record are the missing ranks.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from stagereg.base.deadline import answer_within
from stagereg.base.pages import view_of
from stagereg.errors import CheckpointError, RankMismatchError, StageregError, global_ranks, kind_of, name_ranks, reason
from stagereg.kernel.broken import abort, is_broken_operation, is_timeout
from stagereg.kernel.channel import resources_of, wait_for_keys

_log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_PATIENCE = timedelta(days=30)  # longer than any wait for storage
_USUAL = timedelta(minutes=30)  # default timeout of gloo groups in torch
_LONG_S = 5.0  # seconds until a waiting rank logs the ranks that it waits for
_TOGETHER_S = 120.0  # seconds within which all ranks must construct their groups
_TURN_S = 1.0  # seconds until a waiting rank records in the rendezvous store that it waits
_ANSWER_S = 2.0  # timeout of a call to the rendezvous store, in seconds
_TAG = 0x90E5  # tag of a test message that no rank receives
_HEAD_BYTES, _LENGTH_BYTES = 1016, 8  # a message begins with its length (8 bytes) and its first 1016 bytes
_SHOWN = 4  # maximum number of errors that a message lists


def _cause(error: BaseException) -> BaseException | None:
    """Return the ``__cause__`` for a new error: ``error``, or the cause of ``error`` if both have the same message."""
    return error.__cause__ if isinstance(error, CheckpointError) else error


def _listed(errors: Mapping[int, BaseException]) -> str:
    """Return a message that lists the errors of the ranks. Ranks with the same error are listed together."""
    alike: dict[str, list[int]] = {}
    for rank, error in errors.items():
        alike.setdefault(reason(error), []).append(rank)
    # A rank that has detected a mismatch is not at fault, so the text does not name it.
    blameless = {reason(error) for error in errors.values() if isinstance(error, RankMismatchError)}
    texts = [text if text in blameless else f"{name_ranks(ranks)}: {text}" for text, ranks in alike.items()]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "; ".join(texts[:_SHOWN] + more)


def portable(error: BaseException) -> BaseException:
    """Return ``error`` if it can be pickled and unpickled, otherwise a ``RuntimeError`` with the same message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(reason(error))
    return error


def _post(act: Callable[[], object]) -> tuple[bytes, BaseException | None]:
    """Call ``act``. Return the message for rank 0, and the exception, if any, for the caller to raise later."""
    try:
        return pickle.dumps((act(), None)), None
    except BaseException as error:
        return pickle.dumps((None, portable(error))), error


def _answer(posts: list[bytes], answer: Callable[[list[T]], Sequence[U]]) -> tuple[list[bytes], BaseException | None]:
    """Return the message for each rank, and the exception that ``answer`` has raised, if any. Called on rank 0."""
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
    """Return the fixed-size first part of a message: its length and first bytes. A short message fits completely."""
    head = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_HEAD_BYTES]
    return _as_tensor(head.ljust(_LENGTH_BYTES + _HEAD_BYTES))


def _read_head(head: torch.Tensor) -> tuple[bytes, int]:
    """Parse the fixed-size first part of a message. Return the first bytes, and the length of the whole message."""
    data = bytes(view_of(head))
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES:][:length], length


class RankGroup:
    """The ranks that save together; a single process if ``torch.distributed`` is not initialised.

    The constructor is collective: all ranks construct their groups in the same order. ``timeout`` limits each exchange
    that has no limit of its own. Values below half an hour are raised to half an hour.
    """

    _named: Sequence[int] = ()  # global ranks of the group's ranks, for messages; a subclass may have none

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.limit = min(max(timeout or _USUAL, _USUAL), _PATIENCE)  # limit of exchanges without their own limit
        self.rank, self.size = 0, 1
        self.numbers: Sequence[int] = range(1)  # the number of each rank in the checkpoint
        self._store: Any = None
        self._why = ""  # error message after a rank failure
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_rank(process_group) < 0:
            raise CheckpointError(
                "This rank is not in the process_group of the Checkpointer. Construct it only on ranks of that group."
            )
        training = process_group or dist.group.WORLD
        ranks = self._named = dist.get_process_group_ranks(training)
        present = self._await_all(training, len(ranks))
        local = process_group is not None
        self.group = dist.new_group(ranks, timeout=_PATIENCE, backend="gloo", use_local_synchronization=local)
        present()
        self.rank, self.size, self.numbers = dist.get_rank(self.group), len(ranks), range(len(ranks))

    def _await_all(self, training: Any, size: int) -> Callable[[], object]:
        """Wait until all ranks construct a group. Return a function that deletes this rank's key from the store."""
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
        """Make error messages inside the ``with`` block show global ranks instead of ranks of this group."""
        token = global_ranks.set(self._named)
        try:
            yield
        finally:
            global_ranks.reset(token)

    def name(self, *ranks: int) -> str:
        """Format the given ranks of this group as global ranks, for use in messages."""
        with self.naming():
            return name_ranks(ranks)

    def machine_of(self, rank: int) -> str:
        return self._store.get(f"machine/{rank}").decode()

    def check_still_all(self) -> None:
        """Raise ``CheckpointError`` if ``torch.distributed`` was initialised after this object was constructed."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError("The Checkpointer was constructed before init_process_group. Construct it later.")

    def is_first(self, what: str) -> bool:
        """Return whether this is the first call with ``what`` on any rank. Not collective."""
        return self.size == 1 or self._ask(lambda: int(self._store.add(f"first/{what}", 1))) in (1, None)

    @property
    def number(self) -> int:
        return self.numbers[self.rank]

    def max_async(self, values: Sequence[float]) -> Callable[..., list[float]]:
        """Start to compute the maximum of each value over all ranks. Collective.

        Return a function that waits for the results and returns them. The argument of the function is the timeout in
        seconds, after which it raises ``CheckpointError``.
        """
        greatest = torch.tensor(values, dtype=torch.float64, device="cpu")
        work = None if self.size == 1 else dist.all_reduce(greatest, dist.ReduceOp.MAX, self.group, async_op=True)

        def wait(seconds: float | None = None) -> list[float]:
            limit = self.limit if seconds is None else timedelta(seconds=seconds)
            with self.explaining("The ranks could not agree on a step"):
                try:
                    if work is not None:
                        self.wait(work, limit)
                except RuntimeError as error:
                    if seconds is None or not is_timeout(error):
                        raise
                    # The all-reduce continues, so the ranks save together again once the slow rank takes part.
                    raise CheckpointError(f"The ranks could not agree on a step in {limit}: {reason(error)}") from error
            return greatest.tolist()

        return wait

    def any(self, failing: str, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank. Waits without a limit while all ranks are alive. Collective.

        :meth:`round_trip` documents ``failing`` and the errors.
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
        """If a collective in the ``with`` block fails, raise ``CheckpointError`` with the failed ranks on all ranks."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, StageregError) or not is_broken_operation(error):
                raise
            if not self._why:
                self._why = self._missing(time.monotonic() - began) if is_timeout(error) else self._gone(error)
                self._why = self._ask(lambda: self._store.compare_set("failure", "", self._why).decode()) or self._why
                abort(cast("dist.ProcessGroup", self.group))
            raise CheckpointError(f"{failing}: {self._why}") from error

    def wait(self, work: Any, limit: timedelta) -> None:
        """Wait for a collective. Errors of torch propagate.

        Not suitable for send and receive, because a timeout of these operations closes the connection.
        """
        key, ends, waits = f"waits/{self.rank}", time.monotonic() + limit.total_seconds(), False
        while not work.is_completed():
            turn = max(min(_TURN_S, ends - time.monotonic()), 0.001)
            try:
                work.wait(timedelta(seconds=turn))
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
        """Make all exchanges on this rank fail with the message ``why``, including one in progress.

        Does not contact other ranks or the rendezvous store. Any thread. Not collective.
        """
        if self.group is not None:
            self._why = self._why or why
            abort(self.group)

    def _gone(self, error: RuntimeError) -> str:
        """Return an error message that names the ranks whose connection to this rank is closed."""
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
        """Return the result of a call to the rendezvous store, or ``None`` if the store does not respond in time."""
        return answer_within(_ANSWER_S, call)

    def run_on_all(self, failing: str, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every rank, and return the results in rank order. Collective.

        Raises the errors of :meth:`round_trip`, and ``CheckpointError`` if a rank does not take part within the limit.
        """
        return self.round_trip(failing, act, lambda values: [values] * self.size, self.limit)

    def round_trip(
        self,
        failing: str,
        act: Callable[[], T],
        answer: Callable[[list[T]], Sequence[U]],
        limit: timedelta | None = None,
    ) -> U:
        """Call ``act`` on every rank, then ``answer`` on rank 0; if any call fails, raise on all ranks. Collective.

        Args:
            failing: the beginning of the error message, such as ``"Step 100 was not saved"``.
            act: the action of this rank, which must not be collective itself.
            answer: called on rank 0 if no rank has failed, with the results of ``act`` in rank order; returns one item
                for each rank, which is then the result there.
            limit: how long to wait for the other ranks. ``None`` waits as long as the other ranks are alive.

        Raises:
            CheckpointError: on every rank, with the failed ranks and their errors. ``__cause__`` is this rank's error,
                or the error of the first failed rank. An error in ``answer`` counts as an error of rank 0.
            BaseException: only on this rank, if ``act`` or ``answer`` raised, for example, ``KeyboardInterrupt``.
        """
        with self.naming():
            if self.size == 1:
                try:
                    return answer([act()])[0]
                except Exception as error:
                    raise kind_of([error])(f"{failing}: {reason(error)}") from _cause(error)
            post, failure = _post(act)
            self._expect_initialized(failing)
            # Messages are bytes, so that a rank can take part even if an object cannot be pickled or unpickled.
            with self.explaining(failing):
                posts = self._collect(post, limit or _PATIENCE)
            answers: list[bytes] = []
            if self.rank == 0:
                answers, failed = _answer(posts, answer)
                failure = failure if failed is None else failed
            with self.explaining(failing):
                answered, errors = pickle.loads(self._hand_out(answers, limit or _PATIENCE))
            if failure is not None:
                errors[self.rank] = failure  # the original exception, not the unpickled copy
                if not isinstance(failure, Exception):
                    raise failure
            if errors:
                cause = next(iter(errors.values())) if failure is None else failure
                raise kind_of(errors.values())(f"{failing}: {_listed(errors)}") from _cause(cause)
            return cast("U", answered)

    def _expect_initialized(self, failing: str) -> None:
        if not dist.is_initialized():
            why = "the process group is gone. Call close() of the Checkpointer before destroy_process_group()"
            raise CheckpointError(f"{failing}: " + why)

    def _collect(self, post: bytes, limit: timedelta) -> list[bytes]:
        """Return the messages of all ranks on rank 0. ``gather_object`` would pad each message to the longest one."""
        heads = [_head() for _ in range(self.size)] if self.rank == 0 else None
        self.wait(dist.gather(_head(post), heads, group=self.group, group_dst=0, async_op=True), limit)
        if heads is None:
            self._send([(0, post)])
            return []
        return [post, *self._receive(list(enumerate(heads))[1:])]

    def _hand_out(self, answers: Sequence[bytes], limit: timedelta) -> bytes:
        """Send ``answers[rank]`` from rank 0 to each rank, and return the message for this rank."""
        head, heads = _head(), [_head(each) for each in answers]
        self.wait(dist.scatter(head, heads or None, group=self.group, group_src=0, async_op=True), limit)
        if self.rank == 0:
            self._send(list(enumerate(answers))[1:])
            return answers[0]
        return self._receive([(0, head)])[0]

    def _send(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Send the rest of each message that did not fit into the fixed-size first part (:func:`_head`)."""
        rests = [(rank, _as_tensor(data[_HEAD_BYTES:])) for rank, data in messages if len(data) > _HEAD_BYTES]
        for work in [dist.isend(x, group=self.group, group_dst=rank) for rank, x in rests]:
            cast("dist.Work", work).wait(self.limit)

    def _receive(self, heads: Sequence[tuple[int, torch.Tensor]]) -> list[bytes]:
        """Receive the rest of each message that did not fit into its first part; return the complete messages."""
        begun = [(rank, *_read_head(head)) for rank, head in heads]
        rests = [torch.empty(length - len(begin), dtype=torch.uint8, device="cpu") for _, begin, length in begun]
        coming = [(rank, x) for (rank, *_), x in zip(begun, rests, strict=True) if len(x)]
        for work in [dist.irecv(x, group=self.group, group_src=rank) for rank, x in coming]:
            cast("dist.Work", work).wait(self.limit)
        return [begin + bytes(view_of(x)) for (_, begin, _), x in zip(begun, rests, strict=True)]
