"""Helpers for the adapters: run a function on rank 0 for all ranks, and check the version of a trainer library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from stagereg.errors import CheckpointError, InstallationError, StageregError


def _of_first(found: Any) -> Any:
    boxed = [found]
    if dist.is_initialized():
        dist.broadcast_object_list(boxed, src=0)
    return boxed[0]


def agreed(decide: Callable[[], Any], is_first: bool | None = None, broadcast: Callable[[Any], Any] = _of_first) -> Any:
    """Call ``decide`` on the first rank, and return its result or raise its error on all ranks. Collective.

    The result must be picklable, and so must a ``StageregError``. Any other error becomes a ``CheckpointError`` that
    contains the type and message. ``is_first``: whether this is the first rank; ``None`` means rank 0 of the default
    process group. ``broadcast``: returns the first rank's value on all ranks; the default uses that group.
    """
    answer: Any = None
    if is_first or (is_first is None and not (dist.is_initialized() and dist.get_rank())):
        try:
            answer = decide()
        except Exception as error:  # The error is broadcast, so that all ranks raise it.
            known = isinstance(error, StageregError)
            answer = error if known else CheckpointError(f"{type(error).__name__}: {error}")
    answer = broadcast(answer)
    if isinstance(answer, StageregError):
        raise answer
    return answer


def expect_known(
    package: str, written_for: str, kind: type, methods: Mapping[str, Iterable[str]], lacks: Sequence[str] = ()
) -> None:
    """Raise ``InstallationError`` if the installed version of ``package`` has an unexpected interface.

    ``written_for``: version specifier of the supported releases, for pip. ``kind``: the class to check. ``methods``:
    expected argument names, including ``self``, by method name. ``lacks``: required attributes that are missing.
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
