"""The errors of the project keep their message and attributes when a process sends them to another process."""

from __future__ import annotations

import copy
import pickle
import signal

import pytest

import stagereg.errors as errors

ERRORS = [
    errors.InstallationError("the installation is incomplete"),
    errors.UnknownNameError("no such name"),
    errors.StagingError(["model", 0], "it is a lock"),
    errors.StagerClosedError(),
    errors.UnevenInputsError("rank 3 ran out of inputs", 3),
    errors.PeerFailedError("rank 2 failed", 2, "ValueError"),
    errors.CheckpointError("\x1b[2Jescaped"),
    errors.Preempted(7, "runs/x", signal.SIGTERM),
    errors.Stopped(signal.SIGUSR1, "the disk is full"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_pickling(error: BaseException) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        assert vars(again) == vars(error)
        assert getattr(again, "code", None) == getattr(error, "code", None)
