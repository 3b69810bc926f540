"""stagereg: a Hydra-configurable registry of checkpoint stagers, join hooks and joinables for PyTorch training.

Everything public is reachable from here by name, and each name is imported when it is first used: ``import stagereg``
imports no torch, so listing options and completing a command line stay instant.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from stagereg._version import __version__ as __version__
from stagereg.errors import PeerFailedError, Preempted, StageregError, UnevenInputsError
from stagereg.registry import build, names, register

if TYPE_CHECKING:
    import stagereg.testing as testing
    from stagereg.checkpoint.checkpointer import Checkpointer
    from stagereg.config.instantiate import instantiate
    from stagereg.join.context import Join
    from stagereg.join.joinable import Joinable, JoinHook
    from stagereg.launch.main import main
    from stagereg.record import log
    from stagereg.sizes import ByteSize
    from stagereg.stagers.async_stager import AsyncStager
    from stagereg.stagers.blocking import BlockingAsyncStager

__all__ = [
    "AsyncStager",
    "BlockingAsyncStager",
    "ByteSize",
    "Checkpointer",
    "Join",
    "JoinHook",
    "Joinable",
    "PeerFailedError",
    "Preempted",
    "StageregError",
    "UnevenInputsError",
    "build",
    "instantiate",
    "log",
    "main",
    "names",
    "register",
    "testing",
]

_LAZY = {
    "AsyncStager": "stagereg.stagers.async_stager",
    "BlockingAsyncStager": "stagereg.stagers.blocking",
    "ByteSize": "stagereg.sizes",
    "Checkpointer": "stagereg.checkpoint.checkpointer",
    "Join": "stagereg.join.context",
    "JoinHook": "stagereg.join.joinable",
    "Joinable": "stagereg.join.joinable",
    "instantiate": "stagereg.config.instantiate",
    "log": "stagereg.record",
    "main": "stagereg.launch.main",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("stagereg.testing")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stagereg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _offer_options() -> None:
    """Offer the registry's options to Hydra where its scan for installed plugins does not find them by itself.

    An installed stagereg brings a file in ``hydra_plugins``; only a checkout that is merely on the path pays for
    importing Hydra here.
    """
    try:
        found = importlib.util.find_spec("hydra_plugins.stagereg_plugin") is not None
    except ImportError:  # no plugin of any package is installed
        found = False
    if not found and importlib.util.find_spec("hydra") is not None:
        importlib.import_module("stagereg.config.source").offer()


_offer_options()
