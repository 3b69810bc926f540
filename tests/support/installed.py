"""Marks what needs an extension, so that the tests of the core pass where the extension was deleted."""

from __future__ import annotations

import pytest

from stagereg.base.providers import has


def needs(extension: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has(extension), reason=f"it needs stagereg/extensions/{extension}")
