"""The compiled part, ``copy.c``, which copies many pieces of memory with one call, and large ones past the caches.

It is optional: built with the package where there is a C compiler. It is loaded from beside this module and from
nowhere else, and with ctypes, which lets go of the GIL during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
from pathlib import Path
from typing import Any

copy: Any = None  # copy(moves, count, base), see copy.c; None without the compiled part
way = ""  # how it copies large pieces

with contextlib.suppress(OSError, AttributeError):  # not built, of another machine, or of another version
    _library = ctypes.CDLL(str(Path(__file__).absolute().with_name(f"_copy{sysconfig.get_config_var('EXT_SUFFIX')}")))
    _library.stagereg_copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    _library.stagereg_copy_way.restype = ctypes.c_char_p
    copy, way = _library.stagereg_copy, _library.stagereg_copy_way().decode()
