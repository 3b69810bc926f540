"""A checkpoint names the storage that wrote it."""

from __future__ import annotations

import pytest

import stagereg
from stagereg.checkpoint.storage.dcp import DcpStorage
from stagereg.checkpoint.storage.lookup import name_of, named
from stagereg.errors import CheckpointError


def test_a_storage_is_found_by_the_name_that_it_has() -> None:
    own = stagereg.build("storage", "torch_dcp")
    assert name_of(DcpStorage()) == "dcp"
    assert named("torch_dcp", own) is own
    for name in ("dcp", "direct"):  # the former name is in older manifests
        assert type(named(name, own)) is DcpStorage


def test_an_unknown_storage_is_reported_with_the_list() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)storage 'gone', which cannot be built.*There is: dcp, direct"):
        named("gone", DcpStorage())
