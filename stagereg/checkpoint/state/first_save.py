"""What is looked at in the first save of a run, and logged where a resume would not bring the run back.

A stager that changes dtypes or shapes makes checkpoints that the objects refuse, and an optimizer of other parameters
than those in the state trains what is not saved. Both would be found by the next run only. A check that fails is
skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

import stagereg.checkpoint.state.module_state as module_state
import stagereg.checkpoint.state.optimizer_state as optimizer_state
from stagereg.checkpoint.format.encoding import leaves
from stagereg.checkpoint.state.entries import TensorKind, memory_of
from stagereg.checkpoint.state.looking import only_looks
from stagereg.data import is_stateful
from stagereg.errors import listed

_log = logging.getLogger(__name__)


@only_looks
def kinds_of(state: Mapping[str, Any], captured: Mapping[str, Any], cast: bool) -> dict[str, tuple[TensorKind, bool]]:
    """Return of each tensor of an object, by its dotted name, what its copy has to be, and whether dtypes may differ.

    Of ``state`` the entries ``captured`` are staged.
    """
    found: dict[str, tuple[TensorKind, bool]] = {}
    for name, value in state.items():
        converts = cast or bool(optimizer_state.optimizers_of(value))  # which torch gives the parameters' dtypes
        if name in captured and (converts or module_state.modules_of(value) or is_stateful(value)):
            tensors = ((path, x) for path, x in leaves(captured[name], name) if isinstance(x, torch.Tensor))
            found |= {path: (TensorKind.of(x), converts) for path, x in tensors}
    return found


@only_looks
def warn_of_other_kinds(kinds: Mapping[str, tuple[TensorKind, bool]], stager: str, copy: Mapping[str, Any]) -> None:
    """Log what has another dtype or shape in a copy. Any thread."""
    every = (pair for name, value in copy.items() for pair in leaves(value, name))
    there = {path: TensorKind.of(x) for path, x in every if isinstance(x, torch.Tensor) and path in kinds}
    other = {path: kind for path, kind in there.items() if not kind.fits(*kinds[path])}
    if not other:
        return
    if all(each.fits(kinds[path][0], True) for path, each in other.items()):
        what = "If smaller checkpoints are meant, checkpoint.restore.cast=true has restore() convert them; else take"
    else:
        what = "Take"
    _log.warning(
        "stagereg: stage() of %s makes %d tensor%s of another dtype or shape, which restore() does not take: %s. "
        "%s another stager, such as 'overlapped'.",
        stager,
        len(other),
        "s" * (len(other) > 1),
        listed([f"{path} ({each} in place of {kinds[path][0]})" for path, each in other.items()], 3),
        what,
    )


@only_looks
def warn_of_foreign_parameters(state: Mapping[str, Any], captured: Mapping[str, Any]) -> None:
    """Log which optimizers train parameters that are nowhere in the state."""
    optimizers = {name: each for name, value in state.items() if (each := optimizer_state.optimizers_of(value))}
    others = {name: value for name, value in state.items() if name not in optimizers and name in captured}
    known: set[Any] = set()
    for name, value in others.items():
        tensors = [x for _, x in leaves(captured[name], name) if isinstance(x, torch.Tensor)]
        modules = module_state.modules_of(value)
        if tensors and not modules and is_stateful(value):
            return  # it may have copies of them
        known.update(*(module.parameters() for module in modules), map(memory_of, tensors))
    known.discard(0)  # of empty ones
    for name, each in optimizers.items() if known else ():
        trained = [x for one in each for x in optimizer_state.parameters_of(one) if x.requires_grad and memory_of(x)]
        if foreign := [x for x in trained if x not in known and memory_of(x) not in known]:
            _log.warning(
                "stagereg: %d of the %d parameters that %r trains are nowhere in the state: they are not saved, and a "
                "resumed run starts with new ones. Put their module into the state, too. If they should be those of "
                "the model there, make the optimizer anew, of model.parameters(), after the model was replaced or "
                "wrapped, as by fully_shard.",
                len(foreign),
                len(trained),
                name,
            )
