"""The checksum is zlib's, whatever library computes it."""

from __future__ import annotations

import os
import sys
import zlib

import pytest

from stagereg.checkpoint import checksum

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
