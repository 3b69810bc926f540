"""Tensor subclasses as quantized weights and optimizer states are made of: they wrap other tensors, or name none."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


class Codes(torch.Tensor):
    """Bytes and a scale for each row, which stand for a matrix of float32. It can be sliced by rows and written."""

    codes: torch.Tensor
    scale: torch.Tensor
    signed: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> Codes:
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"signed": self.signed}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], context: Any, size: Any, stride: Any) -> Codes:
        return cls(parts["codes"], parts["scale"], context["signed"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({[*self.shape]})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        it = args[0]
        if function in (aten.detach.default, aten.alias.default):
            return cls(it.codes, it.scale, it.signed)
        if function in (aten.clone.default, aten._to_copy.default):
            return cls(it.codes.clone(), it.scale.clone(), it.signed)
        if function is aten.view.default and [*args[1]] == [*it.shape]:
            return cls(it.codes, it.scale, it.signed)
        if function is aten.slice.Tensor and args[1] == 0:
            return cls(it.codes[args[2] : args[3]], it.scale[args[2] : args[3]], it.signed)
        if function is aten.copy_.default and isinstance(args[1], Codes):
            it.codes.copy_(args[1].codes)
            it.scale.copy_(args[1].scale)
            return it
        if function is aten.is_pinned.default:
            return False
        if function is aten.copy_.default:  # of a plain tensor: rounds
            it.codes.copy_(args[1])
            return it
        raise NotImplementedError(str(function))


class Whole(Codes):
    """Likewise, but nothing can be taken out of it, and it does not answer all that torch's planner asks."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (aten.slice.Tensor, aten.is_pinned.default):
            raise NotImplementedError(str(function))
        return super().__torch_dispatch__(function, types, args, kwargs)


class Copied(Codes):
    """Likewise, but its slices are copies, so what is written into them is lost."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(function, types, args, kwargs)
        return found.clone() if function is aten.slice.Tensor else found


class OneScale(Codes):
    """Likewise, but it has one scale, which its slices share."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        it = args[0]
        if function is aten.slice.Tensor:
            return cls(it.codes[args[2] : args[3]], it.scale, it.signed)
        return super().__torch_dispatch__(function, types, args, kwargs)


class Nested(Codes):
    """One whose scale is of a subclass itself, as of doubly quantized weights."""


class Opaque(torch.Tensor):
    """One that does not name the tensor in it, so nothing can copy it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(str(function))


class Dense(torch.Tensor):
    """One that is a strided block, with another name."""


def codes(rows: int, columns: int = 3, first: int = 0, kind: type[Codes] = Codes) -> Codes:
    """Return some, each row different; ``first`` is the number of the first row."""
    numbers = torch.arange(first * columns, (first + rows) * columns).view(rows, columns)
    return kind(numbers.to(torch.int8), torch.arange(first, first + rows) + 0.5)


def nested(rows: int, columns: int = 3, first: int = 0) -> Codes:
    """Return some of which the scale is some, too."""
    plain = codes(rows, columns, first)
    return Nested(plain.codes, codes(rows, 1, first))


torch.serialization.add_safe_globals([Codes, Copied, OneScale, Whole, Nested, Dense])
