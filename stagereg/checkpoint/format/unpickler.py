"""Reads untrusted pickles one instruction at a time. Imports and calls only functions that a subclass allows by name.

Python's own unpickler in C allocates memory for sizes in a file before it checks them, and can modify classes. This
unpickler takes memory in proportion to the size of the file, and rejects all instructions that are not listed here.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

_TORCH_SAVE = (  # instructions that ``torch.load(weights_only=True)`` accepts
    pickle.PROTO + pickle.MARK + pickle.GLOBAL + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET
    + pickle.LONG_BINGET + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1
    + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINSTRING
    + pickle.EMPTY_TUPLE + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS + pickle.EMPTY_DICT + pickle.EMPTY_SET
    + pickle.BINPERSID
)  # fmt: skip
_PICKLE = pickle.MEMOIZE + pickle.SHORT_BINUNICODE + pickle.STACK_GLOBAL  # instructions of later protocols

_ITEMS = 1 << 15  # maximum items that all calls together may copy, plus one for each byte of the pickle


class _Instructions(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise ValueError(f"the pickle has the unsupported instruction {code}")


class Name(str):
    """Placeholder for a class or function in a pickle: its full name."""

    __slots__ = ()


class BoundedUnpickler(pickle._Unpickler):
    """Unpickles ``data``. :meth:`load` raises an exception, of any class, for an unknown instruction or name."""

    def __init__(self, data: bytes | memoryview) -> None:
        stream = io.BytesIO(data)
        super().__init__(stream, encoding="bytes")
        self.read, self.readline = stream.read, stream.readline
        self._items_left = _ITEMS + len(data)
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        self.pop_mark: Callable[[], list[Any]]

    def load(self) -> Any:
        """Return the unpickled object. Ignores frames, which only readers of streams need."""
        read, dispatch = self.read, self.dispatch
        while (code := read(1)) != pickle.STOP:
            dispatch[ord(code)](self)
        return self.stack.pop()

    def find_class(self, module: str, name: str) -> Any:
        return Name(f"{module}.{name}")

    def gone_through(self, items: int) -> None:
        """Count items that are copied or checked, because a pickle may refer to one large value many times.

        Raises: ``ValueError`` if the count is too large for a pickle of this size that has no such repetitions.
        """
        self._items_left -= items
        if self._items_left < 0:
            raise ValueError("the pickle uses the same large values too often")

    def _count(self, values: Any, levels: int = 3) -> None:
        for value in values:
            if isinstance(value, (str, bytes)):
                self.gone_through(len(value) >> 3)
            elif isinstance(value, (tuple, list, dict, set)):
                self.gone_through(len(value))
            if levels > 1 and isinstance(value, tuple):
                self._count(value, levels - 1)

    def call(self, of: Any, given: Any) -> Any:
        """Return the result of calling the function that ``of`` names with the arguments in ``given``."""
        raise NotImplementedError

    def build(self, made: Any, state: Any) -> None:
        """Set the state of an object that :meth:`call` has returned."""
        raise NotImplementedError

    def make_tuple(self, items: list[Any]) -> Any:
        """Return a tuple. Subclasses limit its nesting, because Python visits every path in it to hash or print it."""
        raise NotImplementedError

    def set_items(self, of: Any, items: list[Any]) -> None:
        """Set items of a dict. ``items`` contains keys and values alternately."""
        raise NotImplementedError

    def _tuple_of(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) < count:
            raise ValueError("a tuple in the pickle lacks items")
        self.stack[-count:] = [self.make_tuple(items)]

    def _marked_tuple(self) -> None:
        items = self.pop_mark()
        self.stack.append(self.make_tuple(items) if items else ())

    def _called(self) -> None:
        given = self.stack.pop()
        self._count([given])
        self.stack[-1] = self.call(self.stack[-1], given)

    def _built(self) -> None:
        state = self.stack.pop()
        self._count([state])
        self.build(self.stack[-1], state)

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("the pickle appends to an object that is not a list")
        self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        self.set_items(self.stack[-1], items)

    dispatch: ClassVar[Any] = _Instructions({code: pickle._Unpickler.dispatch[code] for code in _TORCH_SAVE + _PICKLE})
    dispatch |= {
        pickle.FRAME[0]: lambda self: self.read(8),
        pickle.TUPLE[0]: _marked_tuple,
        pickle.TUPLE1[0]: lambda self: self._tuple_of(1),
        pickle.TUPLE2[0]: lambda self: self._tuple_of(2),
        pickle.TUPLE3[0]: lambda self: self._tuple_of(3),
        pickle.REDUCE[0]: _called,
        pickle.NEWOBJ[0]: _called,
        pickle.BUILD[0]: _built,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._set(self.pop_mark()),
    }
