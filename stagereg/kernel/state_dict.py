"""Take a state dict apart into plain tensors, and put a copy of it together around other ones.

:func:`flatten` walks a state dict once. It makes the copy's containers on the way (same types, same order, same keys,
same sharing, cycles included), copies everything that is no tensor, and lists the plain strided tensors it met.
:meth:`TreeSpec.unflatten` then puts the staged tensors where the source had theirs: wrapped again as ``Parameter``,
DTensor, ShardedTensor or whatever traceable subclass they were, with their Python attributes.

What cannot be staged is refused here, with its path in the dict. Where bytes go, and how, is left to ``layout`` and
``copy``.
"""

from __future__ import annotations

import copy
import io
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.errors import StagingError, UnstageableTypeError
from stagereg.kernel.leaves import attempt, clone, flip, sharded_over, tuple_maker, why_without_data

__all__ = ["ATOMS", "TreeSpec", "flatten", "path_to"]

# Values that nobody can change under the copy, so the copy may hold the very same object.
ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, type, slice, type(Ellipsis),
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
        types.FunctionType, types.BuiltinFunctionType,
    }
)  # fmt: skip

# What torch's type_check admits besides containers and tensors.
_CHECKED = (bool, int, float, str, bytes, io.BytesIO, type(None))

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_STRIDED = torch.strided


class _Slot:
    """A place in the copy that gets its value once the staged tensors are there."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[Sequence[torch.Tensor]], Any]) -> None:
        self._make: Callable[[Sequence[torch.Tensor]], Any] | None = make
        self._value: Any = None

    def resolve(self, staged: Sequence[torch.Tensor]) -> Any:
        if self._make is not None:
            self._value = self._make(staged)
            self._make = None
        return self._value


class _Index(int):
    """The commonest slot: for the staged tensor of that index, as it is."""

    __slots__ = ()

    def resolve(self, staged: Sequence[torch.Tensor]) -> torch.Tensor:
        return staged[self]


_SLOTS = frozenset({_Slot, _Index})


class TreeSpec:
    """A state dict's copy without its tensors.

    Attributes:
        tensors: the plain strided tensors of the source, each object once, in the order they were met; any device.
            They are detached from nothing and copied by nobody yet.
        layout: None; only a state dict that was recognised (``replay``) comes with a plan.
    """

    layout: None = None

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._root: Any = None
        self._holes: list[tuple[Any, Any, _Slot | _Index]] = []
        self._dresses: list[tuple[_Slot, dict[str, Any]]] = []

    def unflatten(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, ``staged[i]`` standing where ``tensors[i]`` stood. To be called once."""
        for container, key, slot in self._holes:
            container[key] = slot.resolve(staged)
        for slot, attributes in self._dresses:  # last, for an attribute may be any tensor, even the one it is of
            vars(slot.resolve(staged)).update(attributes)
        return self._root.resolve(staged) if type(self._root) in _SLOTS else self._root


def flatten(state: Any, type_check: bool = False) -> TreeSpec:
    """Take ``state`` apart.

    Args:
        state: nested dicts, lists and tuples of tensors and other values.
        type_check: refuse leaves that are no tensor, number, string, bytes, ``BytesIO`` or None, as torch does under
            that name; otherwise such a leaf is deep-copied.

    Raises:
        StagingError: an entry cannot be staged; the message has its path.
    """
    walker = _Walker(type_check)
    walker.spec._root = walker.visit(state)
    return walker.spec


def path_to(state: Any, index: int) -> tuple[object, ...]:
    """Return the keys that lead to the tensor that :func:`flatten` lists at ``index``; for error messages."""
    walker = _Walker(type_check=False)
    walker.spec.tensors = _Tripwire(index)
    try:
        walker.visit(state)
    except StagingError as error:
        return error.path
    return ()


class _Tripwire(list[torch.Tensor]):
    """A list that refuses what would be at ``index``."""

    def __init__(self, index: int) -> None:
        self._index = index

    def append(self, x: torch.Tensor) -> None:
        if len(self) == self._index:
            raise StagingError([], "here")
        super().append(x)


class _Walker:
    def __init__(self, type_check: bool) -> None:
        self.spec = TreeSpec()
        self._type_check = type_check
        self._memo: dict[int, Any] = {}
        self._own: dict[type, frozenset[str]] = {}
        self._alive: list[Any] = []  # what has its id in the memo must outlive the walk; a dict may make its values

    def visit(self, x: Any) -> Any:
        kind = type(x)
        if kind in ATOMS:
            return self._checked(x) if self._type_check else x
        known = self._memo.get(id(x), self)
        if known is not self:
            return known
        self._alive.append(x)
        if kind in _PLAIN:
            made: Any = self._plain(x)
        elif issubclass(kind, dict):
            return self._dict(x)
        elif issubclass(kind, list):
            return self._list(x)
        elif issubclass(kind, tuple):
            made = self._tuple(x)
        elif issubclass(kind, torch.Tensor):
            made = self._tensor(x)
        else:
            made = self._opaque(x)
        self._memo[id(x)] = made
        return made

    # -- containers

    def _dict(self, x: dict[Any, Any]) -> dict[Any, Any]:
        kind = type(x)
        new: dict[Any, Any]
        if kind is dict:
            new = {}
        elif kind is OrderedDict:
            new = OrderedDict()
        elif kind is defaultdict:
            new = defaultdict(x.default_factory)  # type: ignore[attr-defined]
        else:
            new = attempt(copy.copy, x)  # keeps what the subclass is; its values are replaced below
        self._memo[id(x)] = new
        self._items(x.items(), new, new)
        self._attributes(x, new)
        return new

    def _list(self, x: list[Any]) -> list[Any]:
        new = [None] * len(x) if type(x) is list else attempt(copy.copy, x)
        self._memo[id(x)] = new
        self._items(enumerate(x), new, new)
        self._attributes(x, new)
        return new

    def _tuple(self, x: tuple[Any, ...]) -> Any:
        parts: list[Any] = [None] * len(x)
        before = len(self.spec._holes)
        self._items(enumerate(x), parts, parts)
        if id(x) in self._memo:  # a cycle through this tuple has already made it
            return self._memo[id(x)]
        if len(self.spec._holes) == before and all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        make = tuple_maker(type(x))
        if any(container is parts for container, _, _ in self.spec._holes[before:]):
            return _Slot(lambda staged: make(parts))
        return make(parts)

    def _items(self, items: Any, new: Any, holder: Any) -> None:
        key: Any = None
        holes = self.spec._holes
        visit = self.visit
        try:
            for key, value in items:
                made = visit(value)
                if type(made) in _SLOTS:
                    new[key] = None  # keeps the order of the keys
                    holes.append((holder, key, made))
                else:
                    new[key] = made
        except StagingError as error:
            raise _under(error, key) from error.__cause__

    def _attributes(self, x: Any, new: Any) -> None:
        """Copy Python attributes, such as ``_metadata`` of a module's state dict."""
        attributes = getattr(x, "__dict__", None)
        if attributes:
            self._items(attributes.items(), new.__dict__, new.__dict__)

    # -- leaves

    def _checked(self, x: Any) -> Any:
        if not isinstance(x, _CHECKED):
            raise UnstageableTypeError([], f"Unexpected value type {type(x)}")
        return x

    def _opaque(self, x: Any) -> Any:
        if self._type_check:
            self._checked(x)
        return attempt(copy.deepcopy, x)

    def _tensor(self, x: Any) -> _Slot | _Index:
        if hasattr(x, "trigger_wait"):  # an asynchronous collective's result: its value is there after the wait
            made: _Slot | _Index = self.visit(x.trigger_wait())
            return made
        if isinstance(x, ShardedTensor):
            return self._sharded(x)
        if is_traceable_wrapper_subclass(x):
            return self._wrapper(x)
        if why := why_without_data(x):
            raise StagingError([], why)
        return self._plain(x)

    def _plain(self, x: torch.Tensor) -> _Slot | _Index:
        if x.layout is not _STRIDED or x.is_quantized or x.is_nested:
            loose = attempt(clone, x)  # no single strided block to plan for
            return self._dressed(x, lambda staged: loose)
        slot: _Slot | _Index = _Index(len(self.spec.tensors))
        negative, conjugate = x.is_neg(), x.is_conj()
        if negative or conjugate:
            self.spec.tensors.append(flip(x.detach(), negative, conjugate))
            lifted = slot.resolve
            slot = _Slot(lambda staged: flip(lifted(staged), negative, conjugate))
        else:
            self.spec.tensors.append(x)
        if x.requires_grad or type(x) is not torch.Tensor or x.__dict__:
            return self._dressed(x, slot.resolve)
        return slot

    def _dressed(self, x: torch.Tensor, bare: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> _Slot:
        """The staged tensor with the source's class, ``requires_grad`` and attributes."""
        kind = type(x)
        wants_grad = x.requires_grad and x.is_leaf

        def make(staged: Sequence[torch.Tensor]) -> torch.Tensor:
            y = bare(staged)
            if kind is torch.nn.Parameter:
                return torch.nn.Parameter(y, requires_grad=wants_grad)
            if kind is not torch.Tensor:
                y = y.as_subclass(kind)
            return y.requires_grad_() if wants_grad else y

        slot = _Slot(make)
        self._attributes_of(x, slot, vars(x))
        return slot

    def _attributes_of(self, x: torch.Tensor, slot: _Slot, attributes: dict[str, Any]) -> None:
        if attributes:
            self._memo[id(x)] = slot  # an attribute may lead back here
            copied: dict[str, Any] = {}
            self._items(list(attributes.items()), copied, copied)
            self.spec._dresses.append((slot, copied))

    def _wrapper(self, x: Any) -> _Slot:
        """DTensor and other traceable wrappers, through their own flatten protocol."""
        names, context = x.__tensor_flatten__()
        size, stride, kind = x.size(), x.stride(), type(x)
        parts = {name: getattr(x, name) for name in names}
        inner: dict[str, Any] = {}
        self._items(parts.items(), inner, inner)

        def make(staged: Sequence[torch.Tensor]) -> Any:
            return kind.__tensor_unflatten__(inner, context, size, stride)

        slot = _Slot(make)
        if kind not in self._own:  # the attributes that the protocol brings back by itself
            self._own[kind] = frozenset(vars(kind.__tensor_unflatten__(parts, context, size, stride))).union(names)
        self._attributes_of(x, slot, {k: v for k, v in vars(x).items() if k not in self._own[kind]})
        return slot

    def _sharded(self, x: ShardedTensor) -> _Slot:
        """A ShardedTensor over staged shards; its metadata says where they lie now: on the CPU."""
        shards = [shard.tensor for shard in x.local_shards()]
        parts: list[Any] = [None] * len(shards)
        self._items(enumerate(shards), parts, parts)

        return _Slot(lambda staged: sharded_over(parts, x))


def _under(error: StagingError, key: Any) -> StagingError:
    return type(error)([key, *error.path], error.reason)
