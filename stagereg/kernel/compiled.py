"""The optional compiled extension ``copy.c``, which copies many memory ranges in one call.

It copies large ranges with non-temporal stores. It is built with the package if a C compiler is available, and loaded
only from the directory of this module. It is called with ctypes, which releases the GIL during a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
from pathlib import Path
from typing import Any

copy: Any = None  # copy(moves, count, base), see copy.c; optional
way = ""  # how the extension copies large ranges

with contextlib.suppress(OSError, AttributeError):  # not built, or built for another machine or Python
    _library = ctypes.CDLL(str(Path(__file__).absolute().with_name(f"_copy{sysconfig.get_config_var('EXT_SUFFIX')}")))
    _library.stagereg_copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    _library.stagereg_copy_way.restype = ctypes.c_char_p
    copy, way = _library.stagereg_copy, _library.stagereg_copy_way().decode()
