"""``incremental``: copies only what changed; the rest is shared with earlier copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from stagereg.errors import StagingError, nearest
from stagereg.kernel.memory import Pool
from stagereg.kernel.state_dict import flatten, path_to
from stagereg.registry import register
from stagereg.stagers.delta import DeltaCopier, Treatment
from stagereg.stagers.host import HostStager


@register("stager", "incremental")
class IncrementalStager(HostStager):
    """Copies what changed, and hands out the memory of earlier copies again for what did not.

    What did not change is never guessed from ``Tensor._version``: fused optimizers, gloo collectives, ZeRO, ``.data``
    and numpy write without moving it. There are two ways to know:

    - *declared*. A tensor whose dotted name matches a pattern of ``frozen``, such as the base weights under an adapter,
      is copied once. It is copied again when its address, shape, stride, dtype or device changes, and at no other time:
      the user declares that its content stays. That must also be true where other weights are loaded into the same
      memory, or another tensor of that shape comes to lie at the same address; call :meth:`forget` after doing so on
      purpose. ``verify=True`` checks the declaration on each call.
    - *content*. Every other tensor is compared, byte by byte, with its last copy. That reads as much memory as a copy
      does, so it saves memory and writing, not time. A reader that wrote into its copy is found out here too.

    A declared tensor that overlaps others in memory is treated as they are, unless declared ones cover them. Without
    ``frozen`` and with ``detect="declared"``, everything is copied each time, as ``pinned_cached`` does.

    Readers of several copies may read the same memory, so none must write into it. ``stage`` also raises a
    ``StagingError`` if a pattern of ``frozen`` matches nothing, or, with ``verify``, if a declared tensor changed.

    Args:
        frozen: patterns (``*``, ``?``, ``[a-z]``) over dotted names, such as ``"model.base.*"``; ``*`` takes in dots.
            Each must match a tensor of the state dict.
        detect: how it is known that other tensors did not change: not at all (``"declared"``), or by ``"content"``.
        verify: compare declared tensors with their copies on each call, which reads them: a mode to find wrong
            declarations with.
        threads: threads that copy and compare in host memory, the caller's among them.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        frozen: list[str] = (),  # type: ignore[assignment]  # an immutable default for a list in a config
        detect: Literal["declared", "content"] = "declared",
        verify: bool = False,
        max_in_flight: int = 2,
        wait_s: float = 60.0,
        threads: int = 2,
        pin: bool | None = None,
        type_check: bool = False,
    ) -> None:
        if isinstance(frozen, str):
            raise StagingError([], f"frozen must be a list of patterns, not a single one: [{frozen!r}]")
        if detect not in ("declared", "content"):
            raise StagingError([], f"detect must be 'declared' or 'content', not {detect!r}")
        otherwise: Treatment = "compare" if detect == "content" else "always"
        treat = functools.partial(_treatments, tuple(frozen), otherwise)
        pool = Pool(max_in_flight, wait_s, pin=pin, threads=threads)
        self._delta = DeltaCopier(pool, treat, verify, threads, type_check)
        super().__init__(self._delta)

    def forget(self) -> None:
        """Copy everything afresh in the next ``stage``, as after loading other weights into declared tensors."""
        self._delta.forget()


def _treatments(
    frozen: Sequence[str], otherwise: Treatment, state: Any, tensors: Sequence[torch.Tensor]
) -> list[Treatment]:
    """How each tensor is treated. Raises: ``StagingError`` if a pattern of ``frozen`` matches none."""
    if not frozen:
        return [otherwise] * len(tensors)
    names = names_of(state, tensors)
    known = [name for each in names for name in each]
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in known):
            folders = {name.rpartition(".")[0] + ".*" for name in known if "." in name}
            near = nearest(pattern, [*known, *sorted(folders)])
            example = f" Names are dotted paths, such as {known[0]!r}." if known else " The state dict has none."
            raise StagingError([], f"the pattern {pattern!r} of 'frozen' matches no tensor.{near}{example}")
    declared = (any(fnmatchcase(name, p) for name in each for p in frozen) for each in names)
    return ["once" if so else otherwise for so in declared]


def names_of(state: Any, tensors: Sequence[torch.Tensor]) -> list[list[str]]:
    """Return the dotted names of each of ``tensors``, which are what ``flatten(state)`` lists; for patterns.

    A tensor inside of a DTensor or another wrapper has the wrapper's name; one that is met at several keys has a name
    for each.
    """
    names: dict[int, list[str]] = {}
    entered: set[int] = set()
    alive: list[Any] = []  # a dict may make its values, and what is gone leaves its id to another

    def visit(x: Any, path: tuple[str, ...]) -> None:
        alive.append(x)
        if isinstance(x, torch.Tensor):
            for part in [x] if type(x) in (torch.Tensor, torch.nn.Parameter) else flatten(x).tensors:
                alive.append(part)
                names.setdefault(id(part), []).append(".".join(path))
        elif isinstance(x, (dict, list, tuple)) and id(x) not in entered:
            entered.add(id(x))
            for key, value in x.items() if isinstance(x, dict) else enumerate(x):
                visit(value, (*path, str(key)))

    visit(state, ())
    return [names.get(id(x)) or [".".join(map(str, path_to(state, i)))] for i, x in enumerate(tensors)]
