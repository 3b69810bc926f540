"""torch's stager by name: it runs on any machine, and raises in the same calls as the other stagers."""

from __future__ import annotations

import functools
from concurrent.futures import Future

import pytest
import torch

from stagereg.errors import StagerClosedError, StagingError

from ...support import states
from ...support.states import settled

HERE = torch.accelerator.is_available()


build = functools.partial(states.build, "torch_default")


@pytest.mark.parametrize("options", [{}, {"use_async_staging": True}])
def test_it_runs_with_and_without_an_accelerator(options: dict[str, bool]) -> None:
    stager = build(**options, use_shared_memory=True)
    assert stager.options.use_shared_memory is True
    assert (stager.options.use_pinned_memory, stager.options.use_non_blocking_copy) == (HERE, HERE)
    assert stager.options.use_async_staging is (bool(options) or HERE)
    staged = stager.stage({"w": torch.arange(9.0), "n": [1]})
    assert isinstance(staged, Future) == (bool(options) or HERE)
    stager.synchronize_staging()
    assert not isinstance(staged, Future) or staged.done()
    assert settled(staged)["w"].tolist() == list(range(9))
    assert settled(staged)["n"] == [1]
    stager.close()


def test_synchronize_staging_raises_a_failure_of_the_background() -> None:
    stager = build(use_async_staging=True)
    stager.stage({"bad": (i for i in ())})
    with pytest.raises(TypeError, match="generator"):
        stager.synchronize_staging()
    stager.close()


@pytest.mark.skipif(HERE, reason="an accelerator is there")
def test_options_that_torch_refuses_here_are_an_error() -> None:
    with pytest.raises(StagingError, match=r"use_non_blocking_copy=True.*accelerator is available"):
        build(use_non_blocking_copy=True)


def test_use_after_close_is_an_error() -> None:
    stager = build(use_async_staging=True)
    stager.close()
    stager.close()
    stager.synchronize_staging()
    with pytest.raises(StagerClosedError, match="closed; build a new one"):
        stager.stage({"w": torch.ones(3)})
