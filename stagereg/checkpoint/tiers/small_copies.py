"""Small copies: what a rank alone has of a step, sent at the end of each step to a rank that keeps it.

When ranks are lost, those that are left save the last step, and what the lost ones had comes from here: random numbers,
positions in data, and per-rank values of plain data or one small tensor in host memory. It is copied as the step ends,
so it is of that very step or absent. The training thread never waits: a thread sends the newest step, and passes over
those that end while it is busy. No file is written.
"""

from __future__ import annotations

import logging
import marshal
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import stagereg.checkpoint.state.entries as entries
import stagereg.checkpoint.state.rng as rng
from stagereg.checkpoint.format.index import DTYPES
from stagereg.checkpoint.tiers.peer import Peer
from stagereg.errors import reason
from stagereg.kernel.memory import view_of

_log = logging.getLogger(__name__)

GENERATORS = f"{entries.RESERVED}.rng"
"""The name of a rank's random number generators among its values."""
_MOST_BYTES = 1 << 16  # of a rank's values, without its generators
_MOST_SENT = 1 << 18
_STEPS = 4  # that are kept of each rank: they are at different ones
_PAUSE_S = 5.0  # after a failure
_DEEPEST = 50
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_COLLECTIONS = frozenset({list, tuple, set, frozenset})


class SmallCopySender:
    """Sends those of one rank to ``peers``, of which each has a connection of its own."""

    def __init__(self, rank: int, peers: Sequence[Peer]) -> None:
        self._rank, self._peers = rank, peers
        self._next: deque[tuple[int, dict[str, bytes], dict[str, Any]]] = deque(maxlen=1)
        self._left_out: set[str] = set()  # for good: what is no plain data, or too large
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # of C, which costs the training thread least
        self._closed = False
        self._thread: threading.Thread | None = None

    def send(self, step: int, values: Mapping[str, Any], generators: dict[str, Any]) -> None:
        """Send ``values`` as they are now, and what :func:`.rng.note` has returned. On the training thread."""
        if not self._peers or self._closed:
            return
        frozen: dict[str, bytes] = {}
        for name in (each for each in values if each not in self._left_out):
            data = _frozen(values[name])
            if data is None or sum(map(len, frozen.values())) + len(data) > _MOST_BYTES:
                self._left_out.add(name)
                text = "stagereg: what rank %d has as %r is lost if the rank is: it is no plain data, or above %d KiB."
                _log.info(text, self._rank, name, _MOST_BYTES >> 10)
            else:
                frozen[name] = data
        self._next.append((step, frozen, generators))
        if self._wake.empty():
            self._wake.put(None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stagereg-tier-small", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End it; what is on its way may be lost. Twice is harmless."""
        self._closed = True
        self._wake.put(None)
        for peer in self._peers:
            peer.close()

    def _run(self) -> None:
        rests = dict.fromkeys(self._peers, 0.0)
        while not self._closed:
            self._wake.get()
            if not self._next:
                continue
            step, frozen, generators = self._next.pop()
            content = marshal.dumps({**frozen, GENERATORS: rng.capture(generators)})
            for peer in (each for each, until in rests.items() if time.monotonic() > until):
                try:
                    peer.send_small(self._rank, step, content)
                except Exception as error:
                    rests[peer] = time.monotonic() + _PAUSE_S
                    _log.debug("stagereg: the small copy of step %d was not sent: %s", step, reason(error))


class SmallCopies:
    """What one process keeps of other ranks, of each the last steps. Any thread."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, bytearray]] = {}  # by rank and step

    def checked_size(self, nbytes: Any) -> int:
        """Return the size of one that is coming. Raises: ``OSError`` if it is none, which ends the connection."""
        if type(nbytes) is not int or not 0 <= nbytes <= _MOST_SENT:
            raise ConnectionAbortedError("what comes is no small copy")
        return nbytes

    def keep(self, rank: int, step: int, content: bytearray) -> None:
        """Keep a step of a rank, in place of this and later ones."""
        earlier = [each for each in self._kept.get(rank, {}).items() if each[0] < step]
        self._kept[rank] = dict([*earlier[1 - _STEPS :], (step, content)])

    def clear(self) -> None:
        """Forget all: the ranks go on from another step."""
        self._kept.clear()

    def listed(self) -> list[tuple[int, int, list[str]]]:
        """Return rank and step of each, and the names of the values."""
        kept = [(rank, step) for rank, steps in [*self._kept.items()] for step in steps]
        return [(rank, step, [*self.values(rank, step)]) for rank, step in kept]

    def values(self, rank: int, step: int) -> dict[str, Any]:
        """Return what is kept of a rank at a step, as it is to be saved; nothing if that is nothing."""
        try:
            found = marshal.loads(self._kept[rank][step])  # plain data; nothing of it is run
            generators = rng.as_tensors(found.pop(GENERATORS))
            return {GENERATORS: generators, **{name: _thawed(each) for name, each in found.items()}}
        except Exception as error:
            _log.debug("stagereg: the small copy of rank %d at step %d is of no use: %s", rank, step, reason(error))
            return {}


def _frozen(value: Any) -> bytes | None:
    """Return a value as it is now; ``None`` if it is something else than plain data or a small tensor."""
    if type(value) is not torch.Tensor:
        return marshal.dumps((value,)) if _is_plain(value) else None
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.is_cpu or value.layout is not torch.strided or value.nbytes > _MOST_BYTES or dtype not in DTYPES:
        return None
    x = value.detach().resolve_conj().resolve_neg().contiguous()
    return marshal.dumps((dtype, [*x.shape], bytes(view_of(x))))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether marshal gives back just this, which of some other objects returns the bytes."""
    kind = type(value)
    if kind is dict:
        return _is_plain([*value], depth) and _is_plain([*value.values()], depth)
    if kind not in _COLLECTIONS or depth == _DEEPEST:
        return kind in _SCALARS
    return _SCALARS.issuperset(map(type, value)) or all(_is_plain(each, depth + 1) for each in value)


def _thawed(data: bytes) -> Any:
    found = marshal.loads(data)
    if len(found) == 1:
        return found[0]
    dtype, shape, content = found
    x = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    view_of(x)[:] = content
    return x
