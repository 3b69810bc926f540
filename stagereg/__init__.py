"""stagereg: a Hydra-configurable registry of checkpoint stagers, join hooks and joinables for PyTorch training.

The public names are listed in ``__init__.pyi``. Each is imported at its first use: ``import stagereg`` does not import
torch, so listing options and completing a command line stay fast.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
from pathlib import Path
from typing import Any

from stagereg.base.providers import missing
from stagereg.errors import InstallationError

_STUB = Path(__file__).with_suffix(".pyi")


@functools.cache
def _modules(stub: Path) -> dict[str, str]:
    imports = [statement for statement in ast.parse(stub.read_text()).body if isinstance(statement, ast.ImportFrom)]
    return {name.name: str(statement.module) for statement in imports for name in statement.names}


def _attribute(owner: str, stub: Path, name: str) -> Any:
    """Import and return an attribute of the module ``owner``. The stub file lists its attributes."""
    if name == "__all__":
        return sorted(name for name, module in _modules(stub).items() if not missing(module))
    module = _modules(stub).get(name)
    if module is None:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    if module == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    if why := missing(module):
        raise InstallationError(f"{owner}.{name} is not available. {why}")
    return getattr(importlib.import_module(module), name)


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _STUB, name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))


def _refuse_foreign(folder: Path) -> None:
    """Raise ``InstallationError`` if an unrelated distribution named ``stagereg`` is also installed in ``folder``."""
    for found in folder.glob("stagereg-*.dist-info"):
        raise InstallationError(
            f"Two projects are installed in {folder / 'stagereg'}: hydra-stagereg, and stagereg, which is an "
            f"unrelated project or an old name of this project ({found.name}).\n"
            "Next to the checkout, run: pip uninstall stagereg && pip install --force-reinstall --no-deps ./stagereg"
        )


def _begin_rank() -> None:
    """In a rank that ``stagereg run`` started, make a signal before the first step exit with code 75."""
    if os.environ.get("STAGEREG_KEEPS_CODE") == str(os.getppid()):
        importlib.import_module("stagereg.launch.extension").begin()


_refuse_foreign(Path(__file__).parents[1])
_begin_rank()
