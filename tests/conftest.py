"""What holds for all tests: those that need an accelerator are skipped without one, and programs can be interrupted."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    # A shell's background job ignores SIGINT, and the programs that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and this machine has none"))
