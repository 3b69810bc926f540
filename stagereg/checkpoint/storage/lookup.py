"""Which storage wrote a checkpoint: its name for the manifest, and the storage for a name.

A registered storage goes by its name, another one by the dotted path of its class. A storage of the project goes by its
bare name, so that a checkpoint can be read where no other package claims the name, and where one does.
"""

from __future__ import annotations

import stagereg.registry as registry
from stagereg.checkpoint.storage.protocol import Storage, WrapsStorage, WritesUrls
from stagereg.checkpoint.store.open_store import is_url
from stagereg.errors import CheckpointError, StageregError
from stagereg.installed import DISTRIBUTION

__all__ = ["expect_fit", "name_of", "named"]

_OURS = f"@{DISTRIBUTION}"
_MEMORY = "memory://"
_FORMER = {"direct": "dcp"}  # names in manifests of storages that have another one now


def name_of(storage: Storage) -> str:
    """Return what the manifest calls ``storage``; one that wraps another (``wraps``) goes by the name of that."""
    storage = storage.wraps if isinstance(storage, WrapsStorage) else storage
    path = f"{type(storage).__module__}.{type(storage).__qualname__}"
    entry = registry.find_target(path)
    if entry is None or entry.kind != "storage":
        return path
    return entry.name.removesuffix(_OURS)


def expect_fit(storage: Storage, path: str, processes: int = 1) -> None:
    """Raise ``CheckpointError`` if ``storage`` cannot write to ``path``, or not from several ``processes``.

    One whose ``remote`` is false writes to no URL.
    """
    if is_url(path) and isinstance(storage, WritesUrls) and not storage.remote:
        raise CheckpointError(
            f"storage={name_of(storage)} writes to file systems of this machine alone, not to {path}; use storage=dcp."
        )
    if processes > 1 and path.startswith(_MEMORY):
        raise CheckpointError(
            f"{path} is in the memory of one process, and here {processes} write: the ranks, and with stager=shared a "
            "process of its own. Use a directory or the URL of a store."
        )


def named(name: str, own: Storage) -> Storage:
    """Return the storage for a name from a manifest: ``own`` if it is that one, else one built without arguments.

    Raises:
        CheckpointError: it is not there, or cannot be built.
    """
    name = _FORMER.get(name, name)
    if name == name_of(own):
        return own
    known = registry.names("storage")
    chosen = name + _OURS if name + _OURS in known else name
    try:
        registry.find("storage", chosen)
    except StageregError as error:
        raise CheckpointError(
            f"It was written by the storage {name!r}, which is not registered here. There is: {', '.join(known)}. "
            "Install or import what has it, or pass it to the Checkpointer."
        ) from error
    try:
        storage: Storage = registry.build("storage", chosen)
    except (StageregError, TypeError) as error:
        raise CheckpointError(f"It was written by the storage {name!r}, which cannot be built: {error}") from error
    return storage
