"""Reading pickles without running them: what a checkpoint's own pickles may hold, and nothing else.

A pickle is a program for a small stack machine, which can call whatever the file names. The machine here knows the
instructions that make plain data, and a *vocabulary*: what each name in a file stands for. A name is never looked up
anywhere else and nothing is imported for it. What may be called is a :class:`Maker` of the vocabulary, never
an object that the file itself has made; an object of a class of torch's becomes a :class:`Record`, which holds what the
file has about it, and whose reader checks that and builds the object itself.

The instructions are those of Python's ``pickletools``, protocols 2 to 5, without persistent ids, extension codes,
out-of-band buffers and the text forms of protocol 0. Nothing is allocated for a length that a file only claims to have,
nothing here recurses, and keys of mappings are flat or small, since Python hashes them on the machine's own stack, and
again each time.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import EllipsisType, NoneType
from typing import Any, TypeVar

import torch

from stagereg.errors import CheckpointError

__all__ = [
    "CONTAINERS",
    "Factory",
    "Maker",
    "Record",
    "Vocabulary",
    "allowed_by_user",
    "dtypes",
    "exactly",
    "expect_key",
    "loads",
]

T = TypeVar("T")

_TORCHS_OWN = ("torch.distributed.", "torch.nested.")
_KEYS_NEST = 32
_KEYS_ITEMS = 1000
_CHAINED = 200
_FLAT = frozenset({str, int, float, bool, NoneType, bytes, complex, torch.dtype, torch.Size, EllipsisType})


class Maker:
    """What a name in a file stands for if it may be called: ``make`` for a call, ``new`` for a bare object."""

    __slots__ = ("make", "new", "path")

    def __init__(self, path: str, make: Callable[..., Any], new: Callable[..., Any] | None = None) -> None:
        self.path = path
        self.make = make
        self.new = make if new is None else new


class Factory:
    """A class that stands in a file as a value, such as the ``list`` of a ``defaultdict(list)``; nothing calls it."""

    __slots__ = ("of",)

    def __init__(self, of: type) -> None:
        self.of = of


class Record:
    """What a file has about one object: the dotted path of its class, the arguments of its making, its state."""

    __slots__ = ("args", "path", "state")

    def __init__(self, path: str, args: tuple[Any, ...]) -> None:
        self.path = path
        self.args = args
        self.state: Any = None

    @classmethod
    def maker(cls, path: str) -> Maker:
        """Return what a class that is to become a record stands for."""
        return Maker(path, lambda *args: cls(path, args))


@dataclass(frozen=True)
class Vocabulary:
    """What the names in a file stand for.

    Attributes:
        names: by dotted path: a :class:`Maker`, or a plain value.
        trusted: classes whose objects may be filled and given a state by their own methods.
    """

    names: Mapping[str, Any]
    trusted: frozenset[type] = field(default_factory=frozenset)

    def __or__(self, other: Vocabulary) -> Vocabulary:
        return Vocabulary({**self.names, **other.names}, self.trusted | other.trusted)


def loads(data: bytes, vocabulary: Vocabulary) -> Any:
    """Return what a pickle holds, if it is data in the names of ``vocabulary``.

    Raises:
        CheckpointError: it is not, with the name that it asked for, or it is damaged.
    """
    machine = _Machine(data, vocabulary)
    try:
        return machine.run()
    except BaseException:
        machine.take_chains_apart()
        raise


def allowed_by_user() -> Vocabulary:
    """Return what the program has allowed with ``torch.serialization.add_safe_globals``.

    Not what torch allows there by itself for its tensors: making a ``DeviceMesh`` connects this process with others.
    """
    names: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals():
        what, path = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        if path.startswith(_TORCHS_OWN):
            continue
        names[path] = Maker(path, what, _bare(what) if isinstance(what, type) else None)
    return Vocabulary(names, frozenset(maker.make for maker in names.values() if isinstance(maker.make, type)))


def _bare(cls: Any) -> Callable[..., Any]:
    return lambda *args: cls.__new__(cls, *args)


def expect_key(key: Any, trusted: Collection[type] = ()) -> None:
    """Let pass what may be the key of a mapping in a file: plain data, and tuples and frozensets of little of it.

    Args:
        key: what is to be hashed.
        trusted: further classes.

    Raises:
        TypeError: it is something else.
    """
    left, items = [(key, 0)], 1
    while left:
        value, nested = left.pop()
        kind = type(value)
        if kind in (tuple, frozenset):
            items += len(value)
            if nested == _KEYS_NEST or items > _KEYS_ITEMS:
                raise TypeError(f"a {kind.__name__} of that much cannot be the key of an entry")
            left.extend((item, nested + 1) for item in value)
        elif kind not in _FLAT and kind is not Record and kind not in trusted:
            raise TypeError(f"a {kind.__name__} cannot be the key of an entry")


def dtypes() -> dict[str, torch.dtype]:
    """Return torch's dtypes by their dotted names."""
    return {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _counter(counts: dict[Any, Any]) -> Counter[Any]:
    return Counter(exactly(dict, counts))


def _defaultdict(factory: Factory | None = None) -> defaultdict[Any, Any]:
    return defaultdict(None if factory is None else exactly(Factory, factory).of)


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def exactly(kind: type[T], value: Any) -> T:
    """Return ``value`` if it is of that very type. Raises: ``TypeError``."""
    if type(value) is not kind:
        raise TypeError(f"there is a {type(value).__name__} where a {kind.__name__} belongs")
    return value


CONTAINERS = Vocabulary(
    {
        "collections.OrderedDict": Maker("collections.OrderedDict", _ordered),
        "collections.Counter": Maker("collections.Counter", _counter),
        "collections.defaultdict": Maker("collections.defaultdict", _defaultdict),
        "builtins.Ellipsis": ...,
        **{f"builtins.{kind.__name__}": Factory(kind) for kind in (bool, dict, float, int, list, set, str, tuple)},
        **dtypes(),
    }
)
"""The containers of a state dict, empty or with plain data in them."""

_ITEMS = frozenset({dict, OrderedDict, Counter, defaultdict})


class _Machine:
    """The stack machine for one pickle."""

    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.chained: list[defaultdict[Any, Any]] = []
        self.names = vocabulary.names
        self.trusted = vocabulary.trusted
        self.done = False

    def run(self) -> Any:
        data, acts = self.data, _ACTS
        try:
            while not self.done:
                opcode = data[self.at]
                self.at += 1
                act = acts[opcode]
                if act is None:
                    raise CheckpointError(
                        f"its pickle has the instruction {opcode:#04x}, which plain data does not need"
                    )
                act(self)
            self.expect_short_chains()
            return self.stack.pop()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"its pickle is damaged at byte {self.at} ({type(error).__name__}: {error})"
            ) from error

    def expect_short_chains(self) -> None:
        """Refuse many ``defaultdict`` inside each other; of all containers, these alone Python frees recursively."""
        inner = [value for each in self.chained for value in each.values() if type(value) is defaultdict]
        places = set(map(id, inner))
        layer, reached = [each for each in self.chained if id(each) not in places], 0
        for _ in range(_CHAINED if len(places) == len(inner) else 0):
            reached += len(layer)
            layer = [value for each in layer for value in each.values() if type(value) is defaultdict]
        if reached < len(self.chained):  # too deep, in a circle, or used twice
            raise CheckpointError("its pickle has mappings nested in a way that plain data does not need")

    def take_chains_apart(self) -> None:
        for each in self.chained:
            each.clear()

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes. Raises: ``ValueError`` if the file does not have them."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"it ends before the {size} bytes that it announces")
        return self.data[begin : self.at]

    def skip(self, size: int) -> None:
        self.take(size)

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def key(self, key: Any) -> Any:
        if type(key) not in _FLAT:
            expect_key(key, self.trusted)
        return key

    # -- what is called for the instructions

    def named(self, path: str) -> None:
        try:
            self.stack.append(self.names[path])
        except KeyError:
            raise CheckpointError(f"it names {path[:200]!r}, which is no plain data; nothing was imported") from None

    def global_(self) -> None:
        lines = []
        for _ in range(2):
            end = self.data.index(b"\n", self.at)
            lines.append(self.take(end - self.at).decode())
            self.at += 1
        self.named(".".join(lines))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.named(f"{exactly(str, module)}.{exactly(str, name)}")

    def call(self, how: str) -> None:
        args, maker = self.stack.pop(), self.stack.pop()
        if type(maker) is not Maker:
            raise CheckpointError("its pickle calls something that is not there to be called")
        made = getattr(maker, how)(*exactly(tuple, args))
        if type(made) is defaultdict:
            self.chained.append(made)
        self.stack.append(made)

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is Record:
            made.state = state
        elif type(made) in self.trusted and hasattr(made, "__setstate__"):
            made.__setstate__(state)
        elif type(made) in self.trusted or type(made) is OrderedDict:
            _set_attributes(made, state)
        else:
            raise TypeError(f"a {type(made).__name__} takes no state")

    def append(self, items: Iterable[Any]) -> None:
        into = self.stack[-1]
        if type(into) is not list and type(into) not in self.trusted:
            raise TypeError(f"a {type(into).__name__} is no list")
        into.extend(items)

    def set_items(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) not in _ITEMS and type(into) not in self.trusted:
            raise TypeError(f"a {type(into).__name__} is no mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[self.key(key)] = value

    def add_items(self, items: list[Any]) -> None:
        exactly(set, self.stack[-1]).update(map(self.key, items))

    def tuple_of(self, size: int) -> None:
        if size > len(self.stack):
            raise ValueError("its stack is empty")
        items = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.stack.append(items)


def _set_attributes(made: Any, state: Any) -> None:
    """Give an object its attributes, as pickle does where there is no ``__setstate__``; none may hide a method."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    for part in parts:
        for name, value in exactly(dict, {} if part is None else part).items():
            if type(made) is OrderedDict and hasattr(OrderedDict, exactly(str, name)):
                raise TypeError(f"an OrderedDict has a {name} of its own")
            setattr(made, name, value)


_Act = Callable[[_Machine], None]


def _push(read: Callable[[_Machine], Any]) -> _Act:
    return lambda m: m.stack.append(read(m))


def _sized(length: int, made_of: Callable[[bytes], Any]) -> _Act:
    return lambda m: m.stack.append(made_of(m.take(m.number(length))))


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _put(length: int) -> _Act:
    def act(m: _Machine) -> None:
        m.memo[m.number(length)] = m.stack[-1]

    return act


def _short_text(m: _Machine) -> None:
    m.stack.append(str(m.take(m.byte()), "utf-8", "surrogatepass"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _stop(m: _Machine) -> None:
    m.done = True


_NAMED_ACTS: dict[bytes, _Act] = {
    b".": _stop,
    b"\x80": lambda m: m.skip(1),
    b"\x95": lambda m: m.skip(8),
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"N": _push(lambda m: None),
    b"\x88": _push(lambda m: True),
    b"\x89": _push(lambda m: False),
    b"K": _push(_Machine.byte),
    b"M": _push(lambda m: m.number(2)),
    b"J": _push(lambda m: _integer(m.take(4))),
    b"G": _push(lambda m: struct.unpack(">d", m.take(8))[0]),
    b"\x8a": _sized(1, _integer),
    b"\x8b": _sized(4, _integer),
    b"\x8c": _short_text,
    b"X": _sized(4, _text),
    b"\x8d": _sized(8, _text),
    b"C": _sized(1, bytes),
    b"B": _sized(4, bytes),
    b"\x8e": _sized(8, bytes),
    b"\x96": _sized(8, bytearray),
    b"]": _push(lambda m: []),
    b"}": _push(lambda m: {}),
    b")": _push(lambda m: ()),
    b"\x8f": _push(lambda m: set()),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"t": _push(lambda m: tuple(m.since_mark())),
    b"\x91": _push(lambda m: frozenset(map(m.key, m.since_mark()))),
    b"a": lambda m: m.append([m.stack.pop()]),
    b"e": lambda m: m.append(m.since_mark()),
    b"s": lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    b"u": lambda m: m.set_items(m.since_mark()),
    b"\x90": lambda m: m.add_items(m.since_mark()),
    b"c": _Machine.global_,
    b"\x93": _Machine.stack_global,
    b"R": lambda m: m.call("make"),
    b"\x81": lambda m: m.call("new"),
    b"b": _Machine.build,
    b"q": _put(1),
    b"r": _put(4),
    b"\x94": _memoize,
    b"h": _push(lambda m: m.memo[m.byte()]),
    b"j": _push(lambda m: m.memo[m.number(4)]),
}
_ACTS: list[_Act | None] = [_NAMED_ACTS.get(bytes([opcode])) for opcode in range(256)]
