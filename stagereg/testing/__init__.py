"""Test tools for plugin authors and the project's own tests. Importing this package does not import torch.

``run_ranks`` runs a function on several local ranks with a time limit; ``RankFailure`` lists the ranks that failed,
died or hung, with their stacks.

``StagerContract``, ``JoinHookContract``, ``JoinableContract``, ``OnCommitContract``, ``KeepContract``,
``StorageContract`` and ``TierContract`` are base classes of tests. Each test method checks one promise of plugin
components of a kind, such as stagers. The tests run with or without pytest (``Contract``, ``Outcome``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stagereg.base.providers import missing
from stagereg.errors import InstallationError
from stagereg.testing.contract import Contract, Outcome
from stagereg.testing.ranks import RankFailure, run_ranks

if TYPE_CHECKING:
    from stagereg.testing.join import JoinableContract, JoinHookContract
    from stagereg.testing.keep_contract import KeepContract
    from stagereg.testing.on_commit_contract import OnCommitContract
    from stagereg.testing.stager import StagerContract
    from stagereg.testing.storage_contract import StorageContract
    from stagereg.testing.tier_contract import TierContract

__all__ = [
    "Contract",
    "JoinHookContract",
    "JoinableContract",
    "KeepContract",
    "OnCommitContract",
    "Outcome",
    "RankFailure",
    "StagerContract",
    "StorageContract",
    "TierContract",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'stagereg.testing' has no attribute {name!r}")
    modules = {
        "StagerContract": "stager",
        "OnCommitContract": "on_commit_contract",
        "KeepContract": "keep_contract",
        "StorageContract": "storage_contract",
        "TierContract": "tier_contract",
    }
    extension = {"OnCommitContract": "callbacks", "TierContract": "tiers"}.get(name)
    if extension and (why := missing(f"stagereg.extensions.{extension}")):
        raise InstallationError(f"stagereg.testing.{name} is not available. {why}")
    return getattr(importlib.import_module(f"stagereg.testing.{modules.get(name, 'join')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
