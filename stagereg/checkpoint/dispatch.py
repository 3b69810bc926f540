"""Calls the extensions of a checkpointer in order. :mod:`.extension` lists the methods whose exceptions propagate."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from stagereg.checkpoint.extension import EXTENSIONS, CheckpointExtension, Due
from stagereg.checkpoint.format.manifest import Manifest
from stagereg.checkpoint.targets import SaveTarget
from stagereg.errors import reason

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Extensions:
    """Forwards each call to all extensions of a checkpointer. Thread-safe if the extensions are thread-safe."""

    def __init__(self, extensions: Sequence[CheckpointExtension]) -> None:
        self.all = tuple(extensions)
        self._failed: set[tuple[str, str]] = set()  # names of extensions and methods with a logged error
        self._answered: tuple[int, Due] | None = None  # the last step and result of :meth:`due`

    def options(self) -> dict[str, Any]:
        """Return the options and the ordered names of all extensions, which must be the same on all ranks."""
        found: dict[str, Any] = {}
        for each in self.all:
            found |= each.options
        return {**found, EXTENSIONS: [each.name for each in self.all]}

    def due(self, step: int) -> Due:
        """Call ``due()`` of every extension, once per step, and return the largest result. Exceptions propagate."""
        answer = max([each.due(step) for each in self.all], default=Due.NO)
        self._answered = step, answer
        return answer

    def leaves_after(self, step: int) -> bool:
        """Return whether all ranks will exit after saving ``step``. Calls :meth:`due`, at most once per step."""
        known = self._answered
        return (known[1] if known is not None and known[0] == step else self.due(step)) is Due.LEAVE

    def is_urged(self) -> bool:
        """Return whether an extension on this rank requests the exit of all ranks. Any thread."""
        return any(self.notify(CheckpointExtension.urges))

    def capturing(self, state: Mapping[str, Any], captured: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
        """Call ``capturing()`` of every extension; return a function that calls the returned functions."""
        name, found = CheckpointExtension.capturing.__name__, []
        for each in self.all:
            with self._logs(each, name):
                found.append((each, each.capturing(state, captured)))

        def inspect(copy: dict[str, Any]) -> None:
            for each, look in found:
                with self._logs(each, name):
                    if look is not None:
                        look(copy)

        return inspect

    def manifest_fields(self, step: int) -> dict[str, Any]:
        """Return additional manifest fields from all extensions for a step. Invalid fields are logged and omitted."""
        found: dict[str, Any] = {}
        for each in self.all:
            with self._logs(each, CheckpointExtension.manifest_fields.__name__):
                fields = each.manifest_fields(step)
                alone = Manifest(step, world_size=1, serial=0, files={}, storage="dcp", command="", **fields)
                Manifest.loads(alone.dumps())
                if both := sorted(found.keys() & fields.keys()):
                    raise ValueError(f"an earlier extension already provides {', '.join(both)}")
                found |= fields
        return found

    def committed(self, where: str, target: SaveTarget, step: int) -> None:
        """Report a completed save to ``"store"`` or ``"tier"`` to all extensions. On the thread of ``target``."""
        self.notify(CheckpointExtension.committed, step, where, target.committed)

    def locked(self) -> None:
        """Report to all extensions that the run has locked the checkpoint directory. Called on rank 0."""
        self.notify(CheckpointExtension.locked)

    def outlook(self) -> str:
        """Return the messages of all extensions about unexpected behavior of the next start of the run."""
        return " ".join(filter(None, self.notify(CheckpointExtension.outlook)))

    def notify(
        self, method: Callable[Concatenate[CheckpointExtension, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method of all extensions, and return the results. Logs exceptions, and calls the other extensions."""
        name, found = method.__name__, []
        for each in self.all:
            with self._logs(each, name):
                found.append(getattr(each, name)(*args, **kwargs))
        return found

    @contextmanager
    def _logs(self, extension: CheckpointExtension, method: str) -> Iterator[None]:
        """Log an exception in the ``with`` block: at level ERROR the first time, at level DEBUG later."""
        try:
            yield
        except Exception as error:
            key = extension.name, method
            level = logging.DEBUG if key in self._failed else logging.ERROR
            self._failed.add(key)
            text = "stagereg: %s() of the extension %s failed, but will be called again as usual: %s"
            _log.log(level, text, method, extension.name, reason(error), exc_info=error)


def weakly(method: Callable[P, T], otherwise: T) -> Callable[P, T]:
    """Return a function that calls a bound method through a weak reference. A dead reference returns ``otherwise``."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = found()
        return otherwise if alive is None else alive(*args, **kwargs)

    return call
