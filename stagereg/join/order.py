"""The order in which a rank runs the models of a join within a step of a plain loop.

In each step, a rank without data runs one backward for each model, in the order of the list of joinables. A loop that
runs its models in a different order works only while all ranks have data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from stagereg.errors import JoinError


class ModelOrder:
    """The order of the models in the steps of one rank with data, in a plain loop.

    ``models``: the joinables that reduce gradients, in the order of the list, by the name that messages print. ``step``
    returns the number of the last announced step. ``all_are_active`` returns whether all ranks take part in that step,
    and may wait for other ranks.
    """

    def __init__(self, models: Mapping[str, Any], step: Callable[[], int], all_are_active: Callable[[], bool]) -> None:
        self.models = list(models.values())
        self._names = list(models)
        self._step, self._all_are_active = step, all_are_active
        self._used: list[tuple[Any, bool]] = []  # the backwards in this step: (model, whether it reduced gradients)
        self._reduces: bool | None = True  # whether this step was announced as one that reduces gradients
        self._is_open = False  # whether the announced step still lacks the backward of some model
        self._is_followed = False  # whether ranks without data run collectives of every model in this step
        self._graph_task = -1  # torch's graph task id of the last backward

    def starts_step(self, model: Any) -> bool:
        """Return whether a forward of this model begins a step that no rank has announced."""
        return not self._is_open or any(model is used for used, _ in self._used)

    def step_begins(self, reduces: bool | None, is_followed: bool) -> None:
        """Begin a step. ``is_followed``: whether ranks without data run collectives of every model in the step."""
        self.end_step("began another step")
        self._is_open, self._reduces = True, reduces
        self._is_followed = is_followed or any(each.gathers for each in self.models)

    def end_step(self, then: str) -> None:
        """End the step. ``then`` describes the call of this rank after which the step is over.

        Raises: ``JoinError`` if a backward is missing and a rank without data waits for it.
        """
        if self.missing and not self._all_are_active():
            raise self.refusal(then)
        self._used, self._is_open = [], False

    @property
    def missing(self) -> str:
        """The names of the models without a backward in this step, if another model had a backward; otherwise empty."""
        return ", ".join(self._names[len(self._used) :]) if self._is_open and self._is_followed and self._used else ""

    def check(self, model: Any, call: str = "forward") -> None:
        """Check that ``model`` is next in the order; called before its collectives.

        Raises: ``JoinError`` if another model is next and some rank has no data.
        """
        turn = self.models[len(self._used)] if self._is_open else None
        if model is not turn:
            instead = f", although a backward of {self._name(turn)} is next in the list" if turn else ""
            self._refuse_if_uneven(f"began a {call} of {self._name(model)}{instead}")

    def backward_begins(self, model: Any, reduces: bool, gathers: bool) -> None:
        """Record that a backward begins. Raises: ``JoinError`` if a rank without data cannot match it.

        ``reduces``: whether the backward reduces gradients; ``gathers``: whether it gathers parameters.
        """
        before, self._graph_task = self._graph_task, torch._C._current_graph_task_id()
        if reduces != self._reduces:
            self._refuse_if_uneven(f"began a backward of {self._name(model)}{'' if reduces else ' under no_sync'}")
        elif reduces and self._graph_task == before:  # torch chooses the order of the reductions in one backward
            self._refuse_if_uneven(f"reduced gradients of {self._name(model)} in the same backward")
        elif reduces or gathers:
            self.check(model, "backward")
        self._used.append((model, reduces))
        self._is_open = self._is_open and len(self._used) < len(self.models)

    def _name(self, model: Any) -> str:
        return self._names[self.models.index(model)]

    def _refuse_if_uneven(self, then: str) -> None:
        if not self._all_are_active():
            raise self.refusal(then)

    def refusal(self, then: str) -> JoinError:
        """Return the ``JoinError`` for this step. ``then`` describes the last call of this rank."""
        pairs = ((self._name(model), "" if reduces else " under no_sync") for model, reduces in self._used)
        used = "".join(f"ran a backward of {name}{how}, then " for name, how in pairs)
        return JoinError(
            f"in step {self._step()} this rank {used}{then}. A rank without data cannot match this order: in a plain "
            "loop it runs one backward of each model in each step, in the order of the list: "
            f"{', '.join(self._names)}. Loop over join.iterate(loader), in any mode but torch: all ranks then run the "
            "loop's body, in any order."
        )
