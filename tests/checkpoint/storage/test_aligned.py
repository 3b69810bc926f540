"""An aligned file has the bytes that were written, of any sizes, and raises the operating system's errors."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import zlib
from mmap import mmap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.storage.aligned as aligned
import stagereg.checkpoint.store.local_files as local_files
from stagereg.checkpoint.format import checksum
from stagereg.checkpoint.format.manifest import FileDigest
from stagereg.checkpoint.storage.aligned import AlignedFile, make_buffers
from stagereg.checkpoint.store.local_files import PAGE, DiskFile, mark_file

BUFFER = 2 * PAGE
SIZES = st.one_of(st.integers(0, 5 * PAGE), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 4 * PAGE]))
MEMORY = mmap(-1, 16 * PAGE)
MEMORY.write(os.urandom(16 * PAGE))
ADDRESS = torch.frombuffer(MEMORY, dtype=torch.uint8).data_ptr()


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed + i * i) % 251 for i in range(size))


@settings(deadline=None, max_examples=60)
@given(
    direct=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(["bytes", "memory", "aligned"]), SIZES, st.integers(0, PAGE)), max_size=8),
)
def test_the_file_has_the_bytes_in_order_and_a_right_mark(
    tmp_path_factory: pytest.TempPathFactory, direct: bool, steps: list[tuple[str, int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "file"
    expected = bytearray()
    with (
        mock.patch.object(aligned, "_STRAIGHT_BYTES", PAGE),
        AlignedFile(DiskFile(str(path), direct), make_buffers(BUFFER)) as file,
    ):
        for seed, (how, size, at) in enumerate(steps):
            assert file.tell() == len(expected)
            data: bytes = pattern(size, seed)
            if how == "bytes":
                assert file.write(data) == size
            else:
                data = MEMORY[at : at + size]
                if how == "aligned":
                    file.align(ADDRESS + at, size)
                    assert size < PAGE or (file.tell() - ADDRESS - at) % PAGE == 0
                    expected += bytes(file.tell() - len(expected))
                file.write_memory(memoryview(MEMORY)[at : at + size])
            expected += data
        mark = file.finish()
    assert path.read_bytes() == expected
    assert mark == mark_file(path) == FileDigest(len(expected), zlib.crc32(expected))


def write_some(path: Path) -> DiskFile:
    disk = DiskFile(str(path), direct=True)
    with AlignedFile(disk, make_buffers(BUFFER)) as file:
        file.write(pattern(5 * PAGE + 7, 1))
        assert file.finish() == mark_file(path)
    assert path.read_bytes() == pattern(5 * PAGE + 7, 1)
    return disk


@pytest.mark.parametrize("direct", [True, False])
def test_large_memory_is_written_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if write_some(tmp_path / "before").refused:
        pytest.skip("the file system of the temporary folder refuses O_DIRECT")
    real, writes = os.pwrite, []

    def pwrite(descriptor: int, data: memoryview, at: int) -> int:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        writes.append((bool(flags & os.O_DIRECT), torch.frombuffer(data, dtype=torch.uint8).data_ptr(), len(data)))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    memory = mmap(-1, 3 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with AlignedFile(DiskFile(str(tmp_path / "file"), direct), make_buffers(BUFFER)) as file:
        file.write(b"head")
        file.align(address + 100, len(memory) - 100)
        file.write_memory(memoryview(memory)[100:])
        file.finish()
    assert {how for how, _, _ in writes} == {direct}
    assert (direct, address + PAGE, (3 << 20) - PAGE) in writes


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_direct_io_is_refused_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    real, openly = getattr(os, call), local_files._O_DIRECT

    def refuse(first: Any, second: Any, *more: Any) -> Any:
        flags = second if call == "open" else fcntl.fcntl(first, fcntl.F_GETFL)
        if flags & openly:
            raise OSError(number, os.strerror(number))
        return real(first, second, *more)

    monkeypatch.setattr(os, call, refuse)
    assert write_some(tmp_path / "file").refused


@pytest.mark.parametrize("most", [PAGE, 1000])
def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    refused = write_some(tmp_path / "before").refused
    real = os.pwrite

    def short(descriptor: int, data: Any, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and (at % PAGE or len(data) % PAGE):
            raise OSError(errno.EINVAL, "Invalid argument")
        plain = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
        try:
            return real(plain, data[:most], at)
        finally:
            os.close(plain)

    monkeypatch.setattr(os, "pwrite", short)
    assert write_some(tmp_path / "file").refused == refused


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_failed_write_is_the_systems_error_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = os.listdir("/proc/self/fd"), threading.active_count()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:  # noqa: PT012, SIM117
        with AlignedFile(DiskFile(str(tmp_path / "file"), direct=True), make_buffers(BUFFER)) as file:
            for _ in range(9):
                file.write(bytes(PAGE))
            file.finish()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (len(before[0]), before[1])


LIBRARIES = ("isal.isal_zlib", "zlib_ng.zlib_ng", "zlib")
DATA = os.urandom(1 << 20)


@pytest.mark.parametrize("first", range(len(LIBRARIES)))
def test_every_library_computes_the_checksum_of_zlib(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES[:first]:
        monkeypatch.setitem(sys.modules, name, None)
    crc32 = checksum._fastest()
    if crc32 is not sys.modules[LIBRARIES[first]].crc32:
        pytest.skip(f"{LIBRARIES[first]} is not installed")
    assert crc32(b"", 0) == zlib.crc32(b"")
    for size in (1, 63, 5000, len(DATA)):
        begin = crc32(memoryview(DATA)[:size], 0)
        assert begin == zlib.crc32(DATA[:size])
        assert crc32(bytearray(DATA[size:]), begin) == zlib.crc32(DATA)
