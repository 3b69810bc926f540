"""Small files where others may write: reading waits for nothing and has a bound, writing goes through no link."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagereg.base.small_files as small_files
from stagereg.base.small_files import (
    UnfitFileError,
    discard,
    open_or_make,
    open_regular,
    read_small,
    replace_small,
    sync,
    temporary,
    temporary_of,
    warn_skipped,
    write_new,
)
from stagereg.checkpoint.store.lock import LOCK, StoreLock

from ..support.planted import KINDS, MINE, ends, plant

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


def protected(path: str, flags: int, mode: int = 0o777, opens: Callable[..., int] = os.open) -> int:
    """Open a file as Linux does with ``fs.protected_regular`` if another user has made it in a sticky folder."""
    if flags & os.O_CREAT and not flags & os.O_EXCL and os.path.lexists(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return opens(path, flags, mode)


def test_a_file_of_another_user_in_a_sticky_folder_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", protected)
    for text in (b"first", b"again"):
        descriptor = open_regular(tmp_path / "note", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, text)
        os.close(descriptor)
        StoreLock(tmp_path).release()
        (tmp_path / LOCK).touch()  # of a run that was killed
    assert (tmp_path / "note").read_bytes() == b"again"
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="symbolic links"):
        open_or_make(tmp_path / "link", os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "nothing").exists()


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_the_content_comes_back_if_it_is_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, most: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "content"
    replace_small(path, data, flush=False)
    if len(data) <= most:
        assert read_small(path, most) == data
    else:
        with pytest.raises(UnfitFileError, match="more than"):
            read_small(path, most)


def test_a_file_that_hides_its_size_is_read_to_the_bound_and_no_further() -> None:
    assert os.stat("/proc/self/status").st_size == 0
    assert read_small("/proc/self/status").startswith(b"Name:")
    with pytest.raises(UnfitFileError, match="more than 10 bytes"):
        read_small("/proc/self/status", 10)


@pytest.mark.parametrize("kind", [*KINDS, "socket", "link to nothing", "device"])
def test_what_is_not_a_small_file_is_refused_at_once(tmp_path: Path, mine: Path, kind: str) -> None:
    path = tmp_path / "note"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        try:
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        plant(kind, path, mine)
    error = ends(lambda: read_small(path))
    assert isinstance(error, UnfitFileError)
    assert error.filename == str(path)
    if kind != "sparse":
        assert isinstance(ends(lambda: os.close(open_regular(path, os.O_RDWR | os.O_CREAT))), UnfitFileError)


def test_nothing_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "nothing")
    os.close(open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT, mode=0o600))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_what_replaces_a_file_between_look_and_open_is_refused_too(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "note"
    path.write_text("note")
    real = os.lstat

    def lstat(of: str) -> os.stat_result:
        found = real(of)
        path.unlink()
        plant(kind, path, mine)
        return found

    monkeypatch.setattr(small_files.os, "lstat", lstat)
    assert isinstance(ends(lambda: read_small(path)), OSError)


def test_a_file_of_another_user_is_refused_where_the_owner_counts(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_text("note")
    assert read_small(path, owner=os.geteuid()) == b"note"
    with pytest.raises(UnfitFileError, match="another user"):
        read_small(path, owner=os.geteuid() + 1)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "note"
    write_new(path, b"abc")
    before = os.listdir("/proc/self/fd")
    assert read_small(path) == b"abc"
    for act in (lambda: read_small(path, 1), lambda: read_small(path, owner=-1), lambda: write_new(path, b"")):
        with pytest.raises(OSError, match=r"more than|another user|exists"):
            act()
    sync(path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_writing_a_new_file_refuses_whatever_has_the_name(tmp_path: Path, mine: Path, kind: str) -> None:
    path = tmp_path / "note"
    plant(kind, path, mine)
    assert isinstance(ends(lambda: write_new(path, b"x")), FileExistsError)


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
def test_replacing_takes_the_name_and_touches_nothing_that_it_led_to(tmp_path: Path, mine: Path, kind: str) -> None:
    path = tmp_path / "note"
    plant(kind, path, mine)
    error = ends(lambda: replace_small(path, b"new"))
    if kind == "directory":
        assert isinstance(error, IsADirectoryError)
        assert (path / "mine").read_text() == MINE
    else:
        assert error is None
        assert read_small(path) == b"new"
    assert sorted(os.listdir(tmp_path)) == ["mine", "note"]


@pytest.mark.parametrize("write", [write_new, replace_small])
@pytest.mark.parametrize("how", ["full", "not flushed", "interrupted"])
def test_what_cannot_be_written_leaves_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], how: str
) -> None:
    path, left = tmp_path / "note", list[str]()
    if write is replace_small:
        path.write_text("old")
        left = ["note"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how != "full":

        def fsync(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if how == "not flushed" else KeyboardInterrupt

        monkeypatch.setattr(small_files.os, "fsync", fsync)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(KeyboardInterrupt if how == "interrupted" else OSError):
            write(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == left
    assert not left or path.read_text() == "old"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_mode_is_less_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        replace_small(tmp_path / "public", b"")
        replace_small(tmp_path / "private", b"", 0o600)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("public", "private")]
    assert modes == [0o666 & ~umask, 0o600]


def test_readers_see_the_old_or_the_new_content_whole(tmp_path: Path) -> None:
    path, over, seen = tmp_path / "note", threading.Event(), set[bytes]()
    contents = [bytes([n]) * 100_000 for n in range(20)]
    replace_small(path, contents[0])

    def read() -> None:
        while not over.is_set():
            seen.add(read_small(path))

    reader = threading.Thread(target=read)
    reader.start()
    for each in contents:
        replace_small(path, each, flush=False)
    over.set()
    reader.join()
    assert seen <= {*contents}


def test_a_name_without_a_folder_and_one_behind_a_link_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    monkeypatch.chdir(tmp_path)
    replace_small("note", b"here")
    replace_small("link/../note", b"there")
    assert (Path("note").read_text(), Path("far/note").read_text()) == ("here", "there")


@given(NAMES)
def test_a_temporary_name_says_whose_it_is_and_is_never_the_same(name: str) -> None:
    first, second = temporary(f"/folder/{name}"), temporary(f"/folder/{name}")
    assert first != second
    assert first.startswith("/folder/.")
    assert temporary_of(first.removeprefix("/folder/")) == name


@pytest.mark.parametrize("name", [".kept.json.tmp", "..run.json.tmp", ".a.0123456789AB.tmp", "a.0123456789ab.tmp", ""])
def test_other_names_are_not_temporary_ones(name: str) -> None:
    assert temporary_of(name) is None


def test_a_skipped_file_is_logged_once_and_its_error_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = []
    for _ in range(3):
        error = UnfitFileError(errno.EINVAL, "it is a pipe")
        kept.append(weakref.ref(error))
        warn_skipped(str(tmp_path / "note"), error)
    warn_skipped(str(tmp_path / "note"), UnfitFileError(errno.EFBIG, "it is long"))
    del error
    assert [each.getMessage().partition("note: ")[2] for each in caplog.records] == [
        "it is a pipe. Delete it or move it away.",
        "it is long. Delete it or move it away.",
    ]
    assert [each() for each in kept] == [None] * 3


def test_discarding_follows_no_link(tmp_path: Path, mine: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    for name, to in (("to a folder", folder), ("to a file", mine), ("to nothing", tmp_path / "no")):
        (tmp_path / name).symlink_to(to)
        discard(str(tmp_path / name))
        assert not os.path.lexists(tmp_path / name)
    assert os.listdir(folder) == ["file"]
    (folder / "link").symlink_to(tmp_path)
    discard(str(folder))
    discard(str(folder))
    assert os.listdir(tmp_path) == ["mine"]


def test_flushing_a_pipe_is_an_error_and_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert isinstance(ends(lambda: sync(tmp_path / "pipe")), OSError)
