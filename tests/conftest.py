"""Applies to all tests: those that need an accelerator are skipped without one, and programs can be interrupted.

Property-based tests take the same examples every time, so that a failure is one of the change that it comes with, and
have no deadline, which a busy machine misses.
``make nightly`` looks for new ones (``--hypothesis-profile=explore``), ``make test`` takes half as many (``quick``).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hypothesis import settings

from stagereg.registry import REGISTRY

from .support.forks import ADDRESS, share_server_of_ranks, start_server
from .support.planted import MINE

settings.register_profile("same", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("quick", derandomize=True, print_blob=True, deadline=None, max_examples=50)
settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("same")

SLOW_TIMEOUT_S = 900


@pytest.fixture
def registry_as_before() -> Iterator[None]:
    """Forgets what a test registers; the project's own components, imported meanwhile, register only once."""
    before = REGISTRY.decorated
    yield
    built_in = set(REGISTRY.built_in.values())
    REGISTRY.decorated = [each for each in REGISTRY.decorated if each in before or each.target in built_in]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the stagers take host memory for the memory of an accelerator; see :class:`.FakeDevice`."""
    from .support.fake_device import FakeDevice  # imports torch

    return FakeDevice(monkeypatch)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a package made of one module; its entry points are given as ``"kind.name"`` to ``module:Name``."""

    def install(name: str, source: str, requires: str = "hydra", contracts: str = "", **points: str) -> Path:
        file, info = tmp_path / f"{name}.py", tmp_path / f"{name}-1.2.dist-info"
        file.write_text(source)
        info.mkdir()
        needs = f"Requires-Dist: torch\nRequires-Dist: {requires}\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{needs}")
        lines = "".join(f"{point} = {target}\n" for point, target in points.items())
        (info / "entry_points.txt").write_text(f"[stagereg.plugins]\n{lines}[stagereg.contracts]\n{contracts}")
        REGISTRY._path = None
        return file

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield install
    for module in set(sys.modules) - before:
        if Path(getattr(sys.modules[module], "__file__", None) or "").parent == tmp_path:
            del sys.modules[module]
    REGISTRY._path = None


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores SIGINT, and the programs that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Looks for plugins once for each process. In the middle of a test that would replace the ones it works with.
    Plugins.instance()
    if config.getoption("numprocesses", None) or ADDRESS in os.environ:
        share_server_of_ranks()
    if config.getoption("numprocesses", None) and ADDRESS not in os.environ:
        start_server()


def pytest_collection_finish() -> None:
    # Many tests collect garbage, and would walk over all modules and all collected tests each time.
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # The tests of each file begin with what the tests of a file alone would have to walk over.
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, and this machine has none"))


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A file of the user, which must stay as it is."""
    file = tmp_path / "mine"
    file.write_text(MINE)
    yield file
    assert file.read_text() == MINE
