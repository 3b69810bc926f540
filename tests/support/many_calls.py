"""Runs a Hydra script again and again in one process, as a notebook would: importing torch and Hydra costs seconds.

``python many_calls.py`` reads a JSON list of ``[script, arguments, completed]``, and prints one of what :func:`call`
returns.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys


def call(script: str, arguments: list[str], completed: str = "") -> tuple[list[str], int, str, str]:
    """Return the command line, exit code, stdout and stderr; ``completed`` is the line that a shell is to complete."""
    sys.argv, os.environ["COMP_LINE"] = [script, *arguments], completed
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            code = left.code or 0  # type: ignore[assignment]
    return sys.argv, code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    sys.path[0] = ""  # as for the script itself
    json.dump([call(*each) for each in json.load(sys.stdin)], sys.stdout)
