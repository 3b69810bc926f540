"""Take a state dict apart into plain tensors, and put a copy of it together around other ones.

:func:`unravel` walks a state dict once. It makes the copy's containers on the way (same types, same order, same keys,
same sharing, cycles included), copies everything that is no tensor, and lists the plain strided tensors it met.
:meth:`Skeleton.fill` then puts the staged tensors where the source had theirs: wrapped again as ``Parameter``, DTensor,
ShardedTensor or whatever traceable subclass they were, with their Python attributes.

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
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stagereg.errors import StagingError, UnstageableTypeError

__all__ = ["Skeleton", "unravel"]

# Values that nobody can change under the copy, so the copy may hold the very same object.
_ATOMS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, range, type, slice, type(Ellipsis),
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
        types.FunctionType, types.BuiltinFunctionType,
    }
)  # fmt: skip

# What torch's type_check admits besides containers and tensors.
_CHECKED = (bool, int, float, str, bytes, io.BytesIO, type(None))

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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


class _Index(_Slot):
    """The commonest slot: the staged tensor of that index, as it is."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def resolve(self, staged: Sequence[torch.Tensor]) -> Any:
        return staged[self._index]


class Skeleton:
    """A state dict's copy without its tensors.

    Attributes:
        tensors: the plain strided tensors of the source, each object once, in the order they were met; any device.
            They are detached from nothing and copied by nobody yet.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._root: Any = None
        self._holes: list[tuple[Any, Any, _Slot]] = []

    def fill(self, staged: Sequence[torch.Tensor]) -> Any:
        """Return the finished copy, ``staged[i]`` standing where ``tensors[i]`` stood. To be called once."""
        for container, key, slot in self._holes:
            container[key] = slot.resolve(staged)
        return self._root.resolve(staged) if isinstance(self._root, _Slot) else self._root


def unravel(state: Any, type_check: bool = False) -> Skeleton:
    """Take ``state`` apart.

    Args:
        state: nested dicts, lists and tuples of tensors and other values.
        type_check: refuse leaves that are no tensor, number, string, bytes, ``BytesIO`` or None, as torch does under
            that name; otherwise such a leaf is deep-copied.

    Raises:
        StagingError: an entry cannot be staged; the message has its path.
    """
    walker = _Walker(type_check)
    walker.skeleton._root = walker.visit(state)
    return walker.skeleton


class _Walker:
    def __init__(self, type_check: bool) -> None:
        self.skeleton = Skeleton()
        self._type_check = type_check
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # temporaries whose id is in the memo must outlive the walk

    def visit(self, x: Any) -> Any:
        kind = type(x)
        if kind in _ATOMS:
            return self._checked(x) if self._type_check else x
        known = self._memo.get(id(x), self)
        if known is not self:
            return known
        if isinstance(x, torch.Tensor):
            made: Any = self._tensor(x)
        elif isinstance(x, dict):
            return self._dict(x)
        elif isinstance(x, list):
            return self._list(x)
        elif isinstance(x, tuple):
            made = self._tuple(x)
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
            new = copy.copy(x)  # keeps what the subclass is; its values are replaced below
        self._memo[id(x)] = new
        self._items(x.items(), new, new)
        self._attributes(x, new)
        return new

    def _list(self, x: list[Any]) -> list[Any]:
        new = [None] * len(x) if type(x) is list else copy.copy(x)
        self._memo[id(x)] = new
        self._items(enumerate(x), new, new)
        self._attributes(x, new)
        return new

    def _tuple(self, x: tuple[Any, ...]) -> Any:
        parts: list[Any] = [None] * len(x)
        before = len(self.skeleton._holes)
        self._items(enumerate(x), parts, parts)
        if id(x) in self._memo:  # a cycle through this tuple has already made it
            return self._memo[id(x)]
        if len(self.skeleton._holes) == before and all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        make = getattr(type(x), "_make", type(x))
        if any(container is parts for container, _, _ in self.skeleton._holes[before:]):
            return _Slot(lambda staged: make(parts))
        return make(parts)

    def _items(self, items: Any, new: Any, holder: Any) -> None:
        key: Any = None
        holes = self.skeleton._holes
        visit = self.visit
        try:
            for key, value in items:
                made = visit(value)
                if isinstance(made, _Slot):
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
        try:
            return copy.deepcopy(x)
        except StagingError:
            raise
        except Exception as error:
            raise UnstageableTypeError(
                [], f"a {type(x).__module__}.{type(x).__qualname__} cannot be copied ({type(error).__name__}: {error})"
            ) from error

    def _tensor(self, x: torch.Tensor) -> _Slot:
        kind = type(x)
        if kind not in _PLAIN:
            if hasattr(x, "trigger_wait"):  # an asynchronous collective's result: its value is there after the wait
                self._alive.append(x := x.trigger_wait())
                return self._tensor(x)
            if isinstance(x, ShardedTensor):
                return self._sharded(x)
            if is_traceable_wrapper_subclass(x):
                return self._wrapper(x)
        _refuse_without_data(x)
        if x.layout is not torch.strided or x.is_quantized or x.is_nested or x.is_mkldnn:
            loose = x.detach().to("cpu", copy=True)  # no single strided block to plan for
            return self._dressed(x, lambda staged: loose)
        source = x
        if x.is_neg() or (x.is_complex() and x.is_conj()):
            source = x.detach().resolve_conj().resolve_neg()
            self._alive.append(source)
        slot = _Index(len(self.skeleton.tensors))
        self.skeleton.tensors.append(source)
        if kind is torch.Tensor and not x.__dict__ and not x.requires_grad:
            return slot
        return self._dressed(x, slot.resolve)

    def _dressed(self, x: torch.Tensor, bare: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> _Slot:
        """The staged tensor with the source's class, ``requires_grad`` and attributes."""
        kind = type(x)
        wants_grad = x.requires_grad and x.is_leaf
        attributes: dict[str, Any] = {}
        self._items(dict(x.__dict__).items(), attributes, attributes)

        def make(staged: Sequence[torch.Tensor]) -> torch.Tensor:
            y = bare(staged)
            if kind is torch.nn.Parameter:
                y = torch.nn.Parameter(y, requires_grad=wants_grad)
            else:
                if kind is not torch.Tensor:
                    y = y.as_subclass(kind)
                if wants_grad:
                    y.requires_grad_()
            y.__dict__.update(attributes)
            return y

        return _Slot(make)

    def _wrapper(self, x: Any) -> _Slot:
        """DTensor and other traceable wrappers, through their own flatten protocol."""
        names, context = x.__tensor_flatten__()
        size, stride, kind = x.size(), x.stride(), type(x)
        inner: dict[str, Any] = {}
        self._items(((name, getattr(x, name)) for name in names), inner, inner)
        attributes = {k: v for k, v in x.__dict__.items() if k not in names}

        def make(staged: Sequence[torch.Tensor]) -> Any:
            y = kind.__tensor_unflatten__(inner, context, size, stride)
            for name, value in attributes.items():
                y.__dict__.setdefault(name, value)
            return y

        return _Slot(make)

    def _sharded(self, x: ShardedTensor) -> _Slot:
        """A ShardedTensor over staged shards; its metadata says where they lie now: on the CPU."""
        shards = [shard.tensor for shard in x.local_shards()]
        parts: list[Any] = [None] * len(shards)
        self._items(enumerate(shards), parts, parts)

        def make(staged: Sequence[torch.Tensor]) -> ShardedTensor:
            metadata = copy.deepcopy(x.metadata())
            before = [shard.metadata for shard in x.local_shards()]
            local = [Shard(part, copy.deepcopy(meta)) for part, meta in zip(parts, before, strict=True)]
            for meta in [*metadata.shards_metadata, *(shard.metadata for shard in local)]:
                if meta.placement is not None:
                    meta.placement._device = torch.device("cpu")
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                local, metadata, process_group=x._process_group, init_rrefs=x._init_rrefs
            )

        return _Slot(make)


def _refuse_without_data(x: torch.Tensor) -> None:
    what = None
    if x.device.type == "meta":
        what = "it lies on the meta device; materialize it first"
    elif isinstance(x, (UninitializedParameter, UninitializedBuffer)):
        what = "it is an uninitialized lazy parameter; run a forward pass first"
    if what:
        raise StagingError([], f"a {type(x).__name__} has no data to stage: {what}")


def _under(error: StagingError, key: Any) -> StagingError:
    return type(error)([key, *error.path], error.reason)
