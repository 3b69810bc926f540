"""Ranks read every byte of a checkpoint's files between them, once, and put the checksums of the parts together."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stagereg.checkpoint.load.restoring as restoring
import stagereg.checkpoint.store.local_files as local
from stagereg.assembly import Checkpointer, Replicas
from stagereg.checkpoint.format.checksum import combined
from stagereg.checkpoint.format.damage import WHOLE, differences, marks_of_shares, share_of_rank
from stagereg.checkpoint.format.manifest import FileDigest, Manifest
from stagereg.checkpoint.options import Restore
from stagereg.checkpoint.store.local_files import mark_file
from stagereg.checkpoint.store.open_store import open_store
from stagereg.stagers.blocking import BlockingAsyncStager
from stagereg.testing.ranks import run_ranks

FILES = st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=40), max_size=6)


@given(st.binary(), st.binary())
def test_the_checksum_of_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(FILES, st.integers(1, 7))
def test_shares_have_every_byte_once_and_are_balanced(files: dict[str, bytes], size: int) -> None:
    marks = {name: FileDigest(len(content), zlib.crc32(content)) for name, content in files.items()}
    shares = [share_of_rank(marks, rank, size) for rank in range(size)]
    parts = [[(name, files[name][part.start : part.stop]) for name, part in each.items()] for each in shares]
    for name, content in files.items():
        assert b"".join(part for each in parts for other, part in each if other == name) == content
        assert sum(name in each for each in shares) >= 1, "an empty file is looked at too"
    nbytes = [sum(len(part) + 1 for _, part in each) for each in parts]
    assert max(nbytes) - min(nbytes) <= len(files) + 1
    found = [{name: FileDigest(len(part), zlib.crc32(part)) for name, part in each} for each in parts]
    assert marks_of_shares(found) == marks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_damage_is_found_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(local, "_PIECE_BYTES", 7)
    monkeypatch.setattr(local, "_BLOCK_BYTES", 3)
    files = {"a": bytes(range(50)), "b": b"", "c": bytes(range(23))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    manifest = Manifest(1, size, 1, {name: mark_file(tmp_path / name) for name in files})
    assert manifest.files == {name: FileDigest(len(content), zlib.crc32(content)) for name, content in files.items()}

    def damages() -> dict[str, str]:
        store = open_store(tmp_path)
        shares = [store.contents(str(tmp_path), share_of_rank(manifest.files, rank, size)) for rank in range(size)]
        return differences(manifest, marks_of_shares(shares))

    assert damages() == {}
    for change, what in {files["a"][:49] + b"x": "CRC-32 mismatch", files["a"][:11]: "truncated: 11 of 50"}.items():
        (tmp_path / "a").write_bytes(change)
        assert damages()["a"].startswith(what)
    (tmp_path / "b").write_bytes(b"longer")
    (tmp_path / "c").unlink()
    assert damages()["b"] == "too long: 6 of 0 bytes"
    assert damages()["c"] == "missing"
    assert mark_file(tmp_path / "b", WHOLE).bytes == 6


def state_of(rank: int) -> dict[str, torch.Tensor]:
    return {f"shard{rank}": torch.full((1 << 16,), 1.0 + rank), "all": torch.ones(1 << 14)}


def restore_each(rank: int, world_size: int, root: str) -> list[int]:
    """The bytes read: where the ranks are on one machine, and where each is on its own."""
    first = Replicas(share=False)
    with Checkpointer(root, stager=BlockingAsyncStager(), resume="never", replicas=first) as checkpointer:
        checkpointer.save(1, state_of(rank))
    real, counts = os.preadv, []
    for machine in ("one", f"number {rank}"):
        restoring.machine_name = lambda machine=machine: machine  # type: ignore[attr-defined]
        read: list[int] = []

        def preadv(*args: Any, read: list[int] = read) -> int:
            read.append(real(*args))
            return read[-1]

        into = {name: torch.zeros_like(x) for name, x in state_of(rank).items()}
        with Checkpointer(root, restore=Restore(read="each"), save_last=False) as checkpointer:
            os.preadv = preadv
            checkpointer.restore(into)
            os.preadv = real
        assert all(torch.equal(x, into[name]) for name, x in state_of(rank).items())
        counts.append(sum(read))
    return counts


def test_a_rank_reads_its_share_of_the_check_and_what_it_needs(tmp_path: Path) -> None:
    results = run_ranks(restore_each, args=(str(tmp_path),))
    files = {file.name: file.stat().st_size for file in (tmp_path / "step-00000001").iterdir()}
    total = sum(size for name, size in files.items() if name != "manifest.json")
    needed = files["index.json"] + 4 * ((1 << 16) + (1 << 14))
    for together, alone in results:
        assert -10 < together - (needed + total // 2) < 30_000  # the manifest, and random-number states
        assert 0 <= alone - (needed + total) < 30_000
