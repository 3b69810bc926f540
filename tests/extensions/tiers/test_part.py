"""The manifest of a part: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stagereg.checkpoint.format.checksum import crc32
from stagereg.checkpoint.storage.aligned import BLOCK_BYTES
from stagereg.extensions.tiers.part import Part, PartFile, SaveId, is_manifest, manifest_name

TOKENS = some.text("0123456789abcdef", min_size=8, max_size=64)
NAMES = some.from_regex(r"__\d{1,5}_\d{1,5}\.distcp", fullmatch=True) | some.just("index.json")
NUMBERS = some.integers(0, 2**63 - 1)


@some.composite
def parts(draw: some.DrawFn) -> Part:
    world = draw(some.integers(1, 1 << 24))
    save = SaveId(draw(TOKENS), draw(NUMBERS), draw(NUMBERS), draw(NUMBERS), draw(TOKENS), world)
    files = {}
    for name in draw(some.sets(NAMES, max_size=4)):
        nbytes = draw(some.integers(0, 3 * BLOCK_BYTES))
        count = -(-nbytes // BLOCK_BYTES)
        crcs = draw(some.lists(some.integers(0, 2**32 - 1), min_size=count, max_size=count))
        files[name] = PartFile(nbytes, tuple(crcs))
    return Part(save, draw(some.integers(0, world - 1)), files)


@given(parts())
def test_what_is_written_is_read(part: Part) -> None:
    assert Part.loads(part.dumps()) == Part.loads(part.dumps().encode()) == part


@given(parts(), some.data())
def test_a_change_of_any_byte_is_refused(part: Part, data: some.DataObject) -> None:
    text = bytearray(part.dumps().encode())
    at = data.draw(some.integers(0, len(text) - 1))
    text[at] ^= data.draw(some.integers(1, 255))
    with pytest.raises(ValueError):  # noqa: PT011  # each has a reason of its own
        Part.loads(bytes(text))


@given(some.binary(max_size=200) | some.recursive(some.none() | some.integers() | some.text(), some.lists).map(
    lambda value: json.dumps(value).encode()
) | some.integers() | some.none())  # fmt: skip
def test_whatever_else_is_refused(text: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # each has a reason of its own
        Part.loads(text)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "", "a\\b", "part-0.json", ".part-1.json.tmp", "/etc/x"])
def test_a_name_that_leads_elsewhere_or_is_a_manifests_is_refused(name: str) -> None:
    part = Part(SaveId("0" * 8, 1, 1, 1, "1" * 8, 1), 0, {name: PartFile(0, ())})
    with pytest.raises(ValueError, match="is not a plain file name"):
        Part.loads(part.dumps())


def test_the_blocks_of_a_file_are_those_of_its_bytes() -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256) + b"more"
    file = PartFile.of_bytes(data)
    assert [len(file.block(number)) for number in range(2)] == [BLOCK_BYTES, 4]
    assert file.blocks == (crc32(data[:BLOCK_BYTES]), crc32(b"more"))
    assert (file.mark.bytes, file.mark.crc32) == (len(data), crc32(data))
    assert PartFile.of_bytes(b"") == PartFile(0, ())


def test_manifests_are_told_by_their_names() -> None:
    assert is_manifest(manifest_name(7))
    assert is_manifest(f".{manifest_name(7)}.tmp")
    assert not is_manifest("part-x.json")
    assert not is_manifest("__0_0.distcp")
