"""An aligned file has the bytes that were written, of any sizes, and raises the operating system's errors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg.checkpoint.storage.aligned as aligned
from stagereg.checkpoint.manifest import FileMark
from stagereg.checkpoint.storage.aligned import PAGE, AlignedFile, Bounce
from stagereg.checkpoint.store.local_store import mark_file

BUFFERS = [Bounce(2 * PAGE) for _ in range(2)]
SIZES = st.one_of(st.integers(0, 5 * PAGE), st.sampled_from([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 4 * PAGE]))
MEMORY = mmap.mmap(-1, 16 * PAGE)
MEMORY.write(os.urandom(16 * PAGE))
ADDRESS = torch.frombuffer(MEMORY, dtype=torch.uint8).data_ptr()


def pattern(size: int, seed: int) -> bytes:
    return bytes((seed + i * i) % 251 for i in range(size))


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["bytes", "tensor", "straight", "memory"]), SIZES), max_size=8),
    last=st.integers(1, 3 * PAGE),
)
def test_the_file_has_the_written_bytes_in_order_and_its_mark_is_right(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], last: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "file"
    expected = bytearray()
    with mock.patch.object(aligned, "STRAIGHT_BYTES", PAGE), AlignedFile(path, BUFFERS) as file:
        for seed, (how, size) in enumerate(steps):
            assert file.tell() == len(expected)
            data = pattern(size, seed)
            if how == "bytes":
                assert file.write(data) == size
            elif how in ("tensor", "straight"):
                x = torch.frombuffer(bytearray(data + b"."), dtype=torch.uint8)[:size]
                if how == "straight":
                    file.meet(x.data_ptr())
                    assert (file.tell() - x.data_ptr()) % PAGE == 0
                    expected += bytes(file.tell() - len(expected))
                file.write_tensor(x)
                del x
            else:
                pages = 1 + size // PAGE
                expected += bytes(-len(expected) % PAGE)
                assert file.place(ADDRESS + PAGE, pages * PAGE, pages * PAGE) == len(expected)
                data = MEMORY[PAGE : PAGE + pages * PAGE]
            expected += data
        expected += bytes(-len(expected) % PAGE) + MEMORY[:last]
        file.place(ADDRESS, -(-last // PAGE) * PAGE, last)
        seen = file.finish()
    assert path.read_bytes() == expected
    assert seen == mark_file(path) == FileMark(len(expected), zlib.crc32(expected))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The flags of each ``os.open``."""
    flags: list[int] = []
    real = os.open

    def open_and_note(path: Any, flag: int, *more: Any, **keywords: Any) -> int:
        flags.append(flag)
        return real(path, flag, *more, **keywords)

    monkeypatch.setattr(os, "open", open_and_note)
    return flags


def write_some(path: Path) -> AlignedFile:
    with AlignedFile(path, BUFFERS) as file:
        file.write(pattern(5 * PAGE + 7, 1))
        assert file.finish() == mark_file(path)
    assert path.read_bytes() == pattern(5 * PAGE + 7, 1)
    return file


def test_the_page_cache_is_bypassed(tmp_path: Path, opened: list[int]) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder refuses O_DIRECT")
    file = write_some(tmp_path / "file")
    assert opened[-1] & os.O_DIRECT
    assert file.direct
    assert not file.refused


def test_where_direct_io_is_refused_the_page_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    file = write_some(tmp_path / "file")
    assert file.refused
    assert not file.direct


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_the_first_direct_write_fails_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.pwrite

    def refuse(descriptor: int, data: Any, at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(aligned, "_O_DIRECT", os.O_DIRECT)
    file = write_some(tmp_path / "file")
    assert file.refused
    assert not file.direct


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
def test_a_failed_write_is_the_operating_systems_error_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with AlignedFile(tmp_path / "file", BUFFERS) as file, pytest.raises(OSError, match="No space left") as caught:  # noqa: PT012
        for _ in range(9):
            file.write(bytes(PAGE))
        file.finish()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "file")


def test_an_error_leaves_neither_thread_nor_descriptor(tmp_path: Path) -> None:
    import threading

    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(ZeroDivisionError), AlignedFile(tmp_path / "file", BUFFERS) as file:  # noqa: PT012
        file.write(bytes(9 * PAGE))
        raise ZeroDivisionError
    assert len(os.listdir("/proc/self/fd")) == len(before[0])
    assert threading.active_count() == before[1]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    made: Callable[[], Any] = lambda: AlignedFile(tmp_path / "no" / "file", BUFFERS)  # noqa: E731
    with pytest.raises(FileNotFoundError):
        made()
