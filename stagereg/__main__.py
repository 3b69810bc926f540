"""``python -m stagereg``: runs the command ``stagereg``."""

from __future__ import annotations

import sys

from stagereg.cli import main

if __name__ == "__main__":
    sys.exit(main())
