"""stagereg: a Hydra-configurable registry of checkpoint stagers, join hooks and joinables for PyTorch training.

The public names are those of ``__init__.pyi``, beside this file. Each is imported when it is first used: ``import
stagereg`` imports no torch, so listing options and completing a command line stay instant.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
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
    """Return an attribute of the module ``owner`` that its stub file imports; imports it now."""
    if name == "__all__":
        return sorted(_modules(stub))
    module = _modules(stub).get(name)
    if module is None:
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    if module == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    if why := missing(module):
        raise InstallationError(f"There is no {owner}.{name}. {why}")
    return getattr(importlib.import_module(module), name)


def __getattr__(name: str) -> Any:
    return _attribute(__name__, _STUB, name)


def __dir__() -> list[str]:
    return sorted(_modules(_STUB))


def _refuse_foreign(folder: Path) -> None:
    """Refuse to run if the unrelated distribution ``stagereg`` is in ``folder`` too: both write ``folder/stagereg``."""
    for found in folder.glob("stagereg-*.dist-info"):
        raise InstallationError(
            f"Two projects are installed into {folder / 'stagereg'}: hydra-stagereg, and stagereg, which is an "
            f"unrelated project or an old name of this one ({found.name}).\n"
            "Run: pip uninstall stagereg && pip install --force-reinstall --no-deps hydra-stagereg"
        )


def _offer_options() -> None:
    """Offer the registry's options to Hydra from a checkout on the path; installed, ``hydra_plugins`` has a file."""
    try:
        found = importlib.util.find_spec("hydra_plugins.stagereg_plugin") is not None
    except ImportError:  # no plugin of any package is installed
        found = False
    if not found and importlib.util.find_spec("hydra") is not None:
        importlib.import_module("stagereg.hydra_plugins.stagereg_plugin").offer()


def _begin_rank() -> None:
    """In a rank that ``stagereg run`` has started, have a signal before the first step exit with 75."""
    if os.environ.get("STAGEREG_KEEPS_CODE") == str(os.getppid()):
        importlib.import_module("stagereg.launch.extension").begin()


_refuse_foreign(Path(__file__).parents[1])
_offer_options()
_begin_rank()
