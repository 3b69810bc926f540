"""Helpers for the adapters: a decision of one rank for all, and a check that the installed trainer is supported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from stagereg.errors import CheckpointError, InstallationError, StageregError


def _from_first(found: Any) -> Any:
    boxed = [found]
    if dist.is_initialized():
        dist.broadcast_object_list(boxed, src=0)
    return boxed[0]


def agreed(
    decide: Callable[[], Any], is_first: bool | None = None, broadcast: Callable[[Any], Any] = _from_first
) -> Any:
    """Return on all ranks the result of ``decide`` on the first rank, or raise its error. Collective.

    ``decide`` runs only on the first rank. Its result, or a ``StageregError`` it raises, must be picklable; any other
    error becomes a ``CheckpointError`` with its type and text. ``broadcast`` returns the value of the first rank on all
    ranks, by default in the default process group.
    """
    answer: Any = None
    if is_first or (is_first is None and not (dist.is_initialized() and dist.get_rank())):
        try:
            answer = decide()
        except Exception as error:  # broadcast, so that the other ranks raise it, too
            known = isinstance(error, StageregError)
            answer = error if known else CheckpointError(f"{type(error).__name__}: {error}")
    answer = broadcast(answer)
    if isinstance(answer, StageregError):
        raise answer
    return answer


def expect_known(
    package: str, written_for: str, kind: type, methods: Mapping[str, Iterable[str]], lacks: Sequence[str] = ()
) -> None:
    """Raise ``InstallationError`` if a class of ``package`` differs from the releases that the adapter supports.

    ``written_for`` is pip's version specifier of these releases. ``methods`` maps method names to argument names,
    including ``self``. ``lacks`` names the missing attributes of an instance.
    """
    wrong = [f"has no {name}" for name in lacks]
    for name, expected in methods.items():
        method = getattr(kind, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != list(expected):
            has = f"has no {name}" if found is None else f"has {name}({', '.join(found)})"
            wrong.append(f"{has}, expected {name}({', '.join(expected)})")
    if wrong:
        raise InstallationError(
            f"{package} {version(package)} is not supported: its {kind.__name__} {wrong[0]}. "
            f"Run: pip install '{package}{written_for}'"
        )
