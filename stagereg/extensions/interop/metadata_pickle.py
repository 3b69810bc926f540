"""Reject a ``.metadata`` file that torch did not write, without the slow import of torch."""

from __future__ import annotations

from typing import Any

from stagereg.checkpoint.format.unpickler import BoundedUnpickler

_METADATA = "torch.distributed.checkpoint.metadata.Metadata"
_SMALL_BYTES = 1 << 20  # largest content that is checked, so that a check takes only milliseconds


class _Look(BoundedUnpickler):
    """An unpickler that constructs no objects: it replaces each object with the name of its class."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("torch", "builtins", "pathlib"):
            text = f"the file names {module:.100}.{name:.100}, which is not torch metadata. Nothing was imported."
            raise ValueError(text)
        return super().find_class(module, name)

    def call(self, of: Any, given: Any) -> Any:
        return of

    def build(self, made: Any, state: Any) -> None: ...

    def make_tuple(self, items: list[Any]) -> Any:
        return ()

    def set_items(self, of: Any, items: list[Any]) -> None: ...


def expect_metadata(content: bytes) -> None:
    """Raise ``ValueError`` if ``content`` is not torch metadata. Accepts any content above 1 MiB. Imports no torch."""
    if len(content) > _SMALL_BYTES:
        return
    try:
        found = _Look(content).load()
    except Exception as error:  # any error, since the file is untrusted
        raise ValueError(f"{type(error).__name__}: {error!s:.200}") from error
    if found != _METADATA:
        raise ValueError(f"not torch metadata: {found!r:.100}")
