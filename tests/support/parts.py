"""Run command lines one after the other, and print at the end what ran, what was skipped and why, and how long it took.

``python tests/support/parts.py NAME COMMAND NAME COMMAND ...``: a shell runs each command, also after one has failed.
The exit code is 1 if a command failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

_OF_PYTEST = re.compile(r"SKIPPED \[(?P<count>\d+)\] (?:.*?\.py(?::\d+)?: )?(?P<why>.*)")
_OF_NOX = re.compile(r"(?:nox > )?Session (?P<why>\S+ (?:was )?skipped.*)")
_COUNTS = re.compile(r"=*\s*(?P<counts>\d+ (?:passed|failed|skipped|deselected|error).* in [\d.]+s.*?)\s*=*")


def run(name: str, command: str) -> tuple[bool, list[str]]:
    """Run a command; return whether it succeeded, and its lines of the report."""
    began = time.monotonic()
    skipped, counts = Counter[str](), list[str]()
    environment = {**os.environ, "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} -rs"}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, shell=True, env=environment, **how) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            print(line, end="", flush=True)
            text = re.sub(r"\x1b\[[\d;]*m", "", line).strip()
            if match := _OF_PYTEST.fullmatch(text) or _OF_NOX.fullmatch(text):
                skipped[match["why"]] += int(match.groupdict().get("count") or 1)
            elif match := _COUNTS.fullmatch(text):
                counts.append(match["counts"])
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    result = "passed" if process.returncode == 0 else f"failed with exit code {process.returncode}"
    lines = [f"{name}: {result} in {minutes} min {seconds:02} s", *(f"  {each}" for each in counts)]
    return process.returncode == 0, [*lines, *(f"  skipped {count}: {why}" for why, count in sorted(skipped.items()))]


if __name__ == "__main__":
    ended = [run(*part) for part in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]
    print("\nRan:", *(line for _, lines in ended for line in lines), sep="\n")
    sys.exit(not all(succeeded for succeeded, _ in ended))
