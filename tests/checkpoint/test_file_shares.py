"""Ranks read every byte of a checkpoint's files between them, once, and put the checksums of the parts together."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagereg.checkpoint.store.checkpoint_store as local
from stagereg.checkpoint.checksum import combined
from stagereg.checkpoint.damage import differences
from stagereg.checkpoint.file_shares import WHOLE, marks_of_shares, share
from stagereg.checkpoint.manifest import FileMark, Manifest
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore, mark_file

FILES = st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=40), max_size=6)


@given(st.binary(), st.binary())
def test_the_checksum_of_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(FILES, st.integers(1, 7))
def test_shares_have_every_byte_once_and_are_balanced(files: dict[str, bytes], size: int) -> None:
    marks = {name: FileMark(len(content), zlib.crc32(content)) for name, content in files.items()}
    shares = [share(marks, rank, size) for rank in range(size)]
    parts = [[(name, files[name][part.start : part.stop]) for name, part in each.items()] for each in shares]
    for name, content in files.items():
        assert b"".join(part for each in parts for other, part in each if other == name) == content
        assert sum(name in each for each in shares) >= 1, "an empty file is looked at too"
    nbytes = [sum(len(part) + 1 for _, part in each) for each in parts]
    assert max(nbytes) - min(nbytes) <= len(files) + 1
    found = [{name: FileMark(len(part), zlib.crc32(part)) for name, part in each} for each in parts]
    assert marks_of_shares(found) == marks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_damage_is_found_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(local, "_PIECE_BYTES", 7)
    monkeypatch.setattr(local, "_BLOCK_BYTES", 3)
    files = {"a": bytes(range(50)), "b": b"", "c": bytes(range(23))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    manifest = Manifest(1, size, 1, {name: mark_file(tmp_path / name) for name in files})
    assert manifest.files == {name: FileMark(len(content), zlib.crc32(content)) for name, content in files.items()}

    def damages() -> dict[str, str]:
        store = CheckpointStore(tmp_path)
        shares = [store.contents(str(tmp_path), share(manifest.files, rank, size)) for rank in range(size)]
        return differences(manifest, marks_of_shares(shares))

    assert damages() == {}
    for change, what in {files["a"][:49] + b"x": "flipped", files["a"][:11]: "truncated: 11 of 50"}.items():
        (tmp_path / "a").write_bytes(change)
        assert damages()["a"].startswith(what)
    (tmp_path / "b").write_bytes(b"longer")
    (tmp_path / "c").unlink()
    assert damages()["b"] == "too long: 6 of 0 bytes"
    assert damages()["c"] == "missing"
    assert mark_file(tmp_path / "b", WHOLE).bytes == 6
