"""What the adapters share: what one rank finds out for all, and whether a trainer is as they were written for."""

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
    """Return what ``decide`` returns on the first rank, or raise its error, on all ranks. Collective.

    ``decide`` is called on the first rank alone; its value, and a ``StageregError``, must be picklable. ``broadcast``
    returns the value of the first rank on each; the default ranks are those of the default process group. Any other
    error becomes a ``CheckpointError`` with its type and text.
    """
    answer: Any = None
    if is_first or (is_first is None and not (dist.is_initialized() and dist.get_rank())):
        try:
            answer = decide()
        except Exception as error:  # that the others must not wait for
            known = isinstance(error, StageregError)
            answer = error if known else CheckpointError(f"{type(error).__name__}: {error}")
    answer = broadcast(answer)
    if isinstance(answer, StageregError):
        raise answer
    return answer


def expect_known(
    package: str, written_for: str, kind: type, methods: Mapping[str, Iterable[str]], lacks: Sequence[str] = ()
) -> None:
    """Raise ``InstallationError`` where a class of ``package`` is not as it was when the adapter was written.

    ``written_for`` are releases, as pip takes them; ``methods`` have the names of their arguments, ``self`` among
    them; ``lacks`` are attributes that instances should have.
    """
    wrong = [f"has no {name}" for name in lacks]
    for name, expected in methods.items():
        method = getattr(kind, name, None)
        found = None if method is None else list(inspect.signature(method).parameters)
        if found != list(expected):
            has = f"has no {name}" if found is None else f"has {name}({', '.join(found)})"
            wrong.append(f"{has}, not {name}({', '.join(expected)})")
    if wrong:
        raise InstallationError(
            f"{package} {version(package)} is not as stagereg was written for: its {kind.__name__} {wrong[0]}. "
            f"Run: pip install '{package}{written_for}'"
        )
