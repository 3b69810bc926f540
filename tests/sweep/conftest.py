"""A program that sweeps, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import programs
from .programs import App


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, programs.PLAIN, programs.PLAIN_CONFIG)
