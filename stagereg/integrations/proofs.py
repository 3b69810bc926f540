"""Reports the steps of a trainer to ``stagereg prove``, for trainers that do not call ``maybe_save`` after each step.

In a run, the recorder of each checkpointer observes the steps. In a proof (a program that ``stagereg prove`` has
started), the adapters restore the checkpoint of the proof, and do not save or delete anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagereg.assembly import Checkpointer
from stagereg.base.providers import has

_ENVIRONMENT = "STAGEREG_PROVE"


def is_proof() -> bool:
    """Return whether ``stagereg prove`` has started this program, so that adapters must not change files."""
    return has("prove") and _ENVIRONMENT in os.environ


class Proofs:
    """The observers of one trainer: one for each checkpointer of a run, or one for the checkpoint of a proof.

    ``options``: options of the trainer's checkpointers. ``ends_at_forward``: whether a step ends when a forward follows
    an optimizer step; otherwise the trainer calls :meth:`end_step`. ``checkpointer``: restores the proof's checkpoint.
    """

    def __init__(self, options: Mapping[str, Any], ends_at_forward: bool = False) -> None:
        self._options = {name: options[name] for name in options.keys() & {"restore", "failure", "storage"}}
        self._ends_at_forward = ends_at_forward
        self._objects: Mapping[str, Any] | None = None
        self.observers: list[Any] = []
        self.checkpointer: Checkpointer | None = None

    def add(self, checkpointer: Checkpointer) -> None:
        """Report the following steps to the observer of a checkpointer, if it has one."""
        observer = checkpointer.observer
        if observer is not None and observer not in self.observers:
            observer.ends_at_forward = self._ends_at_forward
            self.observers.append(observer)
            if self._objects is not None:
                observer.observe(self._objects, hooked=False)

    def checkpoint(self, path: str) -> str | None:
        """Return the checkpoint of this proof; ``None`` without a proof, or in another parent directory. Collective."""
        if not is_proof():
            return None
        asked = json.loads(Path(os.environ[_ENVIRONMENT]).read_text())["checkpoint"]
        parent = os.path.dirname(path if "://" in path else os.path.realpath(path))
        if not asked.startswith(f"{parent}/"):  # another trainer of the program loads
            return None
        if self.checkpointer is None:
            self.checkpointer = Checkpointer("proof", resume="never", save_last=False, **self._options)
            self.add(self.checkpointer)
            self.checkpointer.resume = self.observers[0].claim()
        return self.checkpointer.resume

    def observe(self, objects: Mapping[str, Any]) -> None:
        """Observe ``objects`` instead of saved states, and the batches that the trainer passes to :meth:`batch`."""
        self._objects = objects
        for each in self.observers:
            each.observe(objects, hooked=False)

    def begin(self) -> None:
        """Observe the following steps of a proof, after a trainer has restored its checkpoint."""
        for each in self.observers:
            each.begin(-1)

    def batch(self, batch: Any) -> None:
        for each in self.observers:
            each.forward((batch,))

    def end_step(self) -> None:
        """End the current step, if an optimizer has stepped in it."""
        for each in self.observers:
            each.next_step()

    def close(self) -> None:
        """Write the results of a proof, if the trainer has ended before all steps. Collective."""
        self.observers.clear()
        if self.checkpointer is not None:
            self.checkpointer.close()
