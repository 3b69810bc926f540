"""Which storage wrote a checkpoint: its name for the manifest, and the storage for a name.

A registered storage goes by its name, another one by the dotted path of its class. A storage of the project goes by its
bare name, so that a checkpoint can be read where no other package claims the name, and where one does.
"""

from __future__ import annotations

import stagereg.registry as registry
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.checkpoint.store.open_store import is_url
from stagereg.errors import CheckpointError, StageregError
from stagereg.installed import DISTRIBUTION

__all__ = ["expect_fit", "name_of", "named"]

_OURS = f"@{DISTRIBUTION}"
_FORMER = {"direct": "dcp"}  # names in manifests of storages that have another one now


def name_of(storage: Storage) -> str:
    """Return what the manifest calls ``storage``; one that wraps another (``wraps``) goes by the name of that."""
    storage = (storage.wraps if isinstance(storage, Storage) else None) or storage
    path = f"{type(storage).__module__}.{type(storage).__qualname__}"
    entry = registry.find_target(path)
    if entry is None or entry.kind != "storage":
        return path
    return entry.name.removesuffix(_OURS)


def expect_fit(storage: Storage, path: str) -> None:
    """Raise ``CheckpointError`` if ``path`` is a URL and ``storage`` writes to none."""
    if is_url(path) and isinstance(storage, Storage) and not storage.remote:
        raise CheckpointError(
            f"storage={name_of(storage)} writes to file systems of this machine alone, not to {path}; use storage=dcp."
        )


def named(name: str, own: Storage) -> Storage:
    """Return the storage for a name from a manifest: ``own`` if it is that one, else one built without arguments.

    Raises:
        CheckpointError: it is not there, or cannot be built.
    """
    name = _FORMER.get(name, name)
    if name == name_of(own):
        return own
    try:
        storage: Storage = registry.build(
            "storage", name + _OURS if name + _OURS in registry.names("storage") else name
        )
    except (StageregError, TypeError) as error:
        raise CheckpointError(
            f"It was written by the storage {name!r}, which cannot be built; install or import what has it, or pass it "
            f"to the Checkpointer: {error}"
        ) from error
    return storage
