"""Convert the errors of reading untrusted files to ``CheckpointError``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from stagereg.errors import CheckpointError, StageregError, reason


@contextlib.contextmanager
def refusing(what: str) -> Generator[None, None, None]:
    """Convert any error, except a ``StageregError``, to a ``CheckpointError`` with the message "WHAT was not read".

    Reading untrusted files may raise any error, including ``RecursionError`` and ``MemoryError``.
    """
    try:
        yield
    except StageregError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what} was not read: {reason(error)}") from error
