"""The causes of an error are all listed, each once."""

from __future__ import annotations

import errno

from torch.distributed.checkpoint.api import CheckpointException

from stagereg.checkpoint.advice import advice, causes


def test_an_error_wrapped_by_torch_is_found_behind_other_errors() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = CheckpointException("write", {0: (ValueError("odd"), None), 1: (full, None)})  # type: ignore[dict-item]
    error = RuntimeError("the save failed")
    error.__cause__ = wrapped
    wrapped.__context__ = error  # and no circle is walked twice
    assert [type(each) for each in causes(error)] == [RuntimeError, CheckpointException, ValueError, OSError]
    assert "full" in advice(error, "runs/gpt")
