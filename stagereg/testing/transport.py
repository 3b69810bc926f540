"""Carry a function and its arguments into a fresh process that has none of the caller's modules.

Pickle names functions and classes by module and attribute; a test module that pytest imported by file path has a name
under which no other process finds it. So the names and files of the modules around the function, and around every
function and class among its arguments, travel along, and the other side imports them from the same files under the same
names, each when it is first needed. Nothing is added to ``sys.path``.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import operator
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["Shipment", "pack", "unpack"]


@dataclass(frozen=True)
class Shipment:
    """A call, in bytes and names only: unpickling it imports nothing."""

    module: str
    qualname: str
    arguments: bytes
    files: dict[str, str]


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shipment:
    """Describe the call ``fn(*args, **kwargs)``; ``ValueError`` when ``fn`` cannot be found by name elsewhere."""
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "<locals>")
    if module is None or "<" in qualname:
        raise ValueError(f"{fn!r} does not exist in other processes: define it with `def` at the top of a module")
    arguments = io.BytesIO()
    pickler = _Noting(arguments)
    try:
        pickler.dump((args, kwargs))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"the arguments for {qualname} cannot be sent to other processes: {error}") from error
    files = {name: file for each in sorted({module} | pickler.modules) for name, file in _files_around(each).items()}
    return Shipment(module, qualname, arguments.getvalue(), files)


def unpack(shipment: Shipment) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Import what the shipment names, from the files it names; return the function and its arguments."""
    sys.meta_path.insert(0, _SameFiles(shipment.files))
    module = importlib.import_module(shipment.module)
    args, kwargs = pickle.loads(shipment.arguments)
    return operator.attrgetter(shipment.qualname)(module), args, kwargs


class _Noting(pickle.Pickler):
    """Notes the modules of the functions and classes that it names.

    Attributes:
        modules: their names.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, FunctionType)) and thing.__module__ is not None:
            self.modules.add(thing.__module__)
        return NotImplemented


def _files_around(module: str) -> dict[str, str]:
    """Names and files of the loaded modules that share the top package with ``module``.

    ``__main__`` is multiprocessing's own affair, and what belongs to an importable package needs no help.
    """
    top = module.partition(".")[0]
    found = {
        name: str(file)
        for name, loaded in list(sys.modules.items())
        if name.partition(".")[0] == top
        and isinstance(loaded, ModuleType)
        and (file := loaded.__dict__.get("__file__"))
    }
    return {} if module == "__main__" or _finds_itself(module, found.get(module)) else found


def _finds_itself(module: str, file: str | None) -> bool:
    """Whether an ordinary import of ``module`` would load ``file``: no finder of the test runner is asked."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None:
            return file is None
        path = list(spec.submodule_search_locations or [])
    return spec is not None and spec.origin == file


class _SameFiles(MetaPathFinder):
    """Finds the modules of a shipment in their files, and the packages above them even where no file marks them."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        file = self._files.get(name)
        is_package = any(known.startswith(name + ".") for known in self._files)
        if file is None and not is_package:
            return None
        if file is None:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = self._folders(name)
            return spec
        folders = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)

    def _folders(self, package: str) -> list[str]:
        """Where a package without a file lies: above its modules, as far as their names show."""
        depth = package.count(".") + 1
        below = [(name, Path(file)) for name, file in self._files.items() if name.startswith(package + ".")]
        steps = [(file, name.count(".") - depth + (file.name == "__init__.py")) for name, file in below]
        return sorted({str(file.parents[up]) for file, up in steps})
