"""Which storage wrote a checkpoint: its name for the manifest, and the storage for a name.

A registered storage goes by its name, another one by the dotted path of its class.
"""

from __future__ import annotations

from stagereg import registry
from stagereg.checkpoint.storage.protocol import Storage
from stagereg.errors import CheckpointError, StageregError

__all__ = ["name_of", "named"]


def name_of(storage: Storage) -> str:
    """Return what the manifest calls ``storage``."""
    path = f"{type(storage).__module__}.{type(storage).__qualname__}"
    entry = registry.find_target(path)
    return entry.name if entry is not None and entry.kind == "storage" else path


def named(name: str, own: Storage) -> Storage:
    """Return the storage for a name from a manifest: ``own`` if it is that one, else one built without arguments.

    Raises:
        CheckpointError: it is not there, or cannot be built.
    """
    if name == name_of(own):
        return own
    if name not in registry.names("storage"):
        raise CheckpointError(
            f"It was written by the storage {name!r}, which is not registered here. There is: "
            f"{', '.join(registry.names('storage'))}. Install or import what has it, or pass it to the Checkpointer."
        )
    try:
        storage: Storage = registry.build("storage", name)
    except (StageregError, TypeError) as error:
        raise CheckpointError(f"It was written by the storage {name!r}, which cannot be built: {error}") from error
    return storage
