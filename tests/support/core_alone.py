"""Runs the core's tests in a copy of the project from which extensions and tools were deleted.

``python tests/support/core_alone.py [--without NAME ...] [ARGUMENTS OF PYTEST]``: by default all extensions are
deleted, and what stands above them; with ``--without tiers`` that extension alone. The copy then trains a little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ABOVE = ("integrations", "sweep", "bench")  # folders of the package that the core must not need either
TESTS = ("base", "kernel", "config", "stagers", "join", "checkpoint", "launch", "test_data.py", "test_registry.py")
"""The tests of the core. Tests that need an extension are in ``tests/extensions``."""
QUICK = (
    *("kernel", "test_registry.py", "config/test_instantiate.py", "checkpoint/test_checkpointer.py"),
    *(
        "base/test_many_tensors.py",
        "checkpoint/test_dispatch.py",
        "checkpoint/promises/test_exact_resume.py",
        "checkpoint/ranks",
        "join/test_throw.py",
    ),
    "launch/test_main.py",
)
"""Some of them, about a minute."""

NO_EDITABLE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
"""
"""The copy's ``sitecustomize``: an editable install would find the deleted folders of the package in the checkout."""


def copy(to: Path, extensions: list[str]) -> None:
    """Copy what git tracks, and the compiled parts, without some extensions; without any of them, without tools."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    compiled = [str(each.relative_to(ROOT)) for each in (ROOT / "stagereg").glob("*/*.so")]
    for name in (*listed.split("\0"), *compiled):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "sitecustomize.py").write_text(NO_EDITABLE)
    installed = sorted(each.name for each in (to / "stagereg" / "extensions").iterdir() if each.is_dir())
    if unknown := set(extensions) - set(installed):
        raise SystemExit(f"There is no extension {', '.join(sorted(unknown))}, but: {', '.join(installed)}")
    gone = [f"extensions/{name}" for name in extensions or installed] + [*(() if extensions else ABOVE)]
    for name in gone:
        shutil.rmtree(to / "stagereg" / name)
        shutil.rmtree(to / "tests" / name, ignore_errors=True)


def run(folder: Path, *command: str) -> int:
    """Run Python in the copy, whose package goes before an installed one."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    deleted = [name for name in ABOVE if not (folder / "stagereg" / name).is_dir()]
    found = (
        "import stagereg, importlib.util as util; print(stagereg.__file__, "
        f"[each for each in {deleted} if util.find_spec('stagereg.' + each)])"
    )
    where = subprocess.run([sys.executable, "-c", found], cwd=folder, env=environment, capture_output=True, text=True)
    if where.stdout.strip() != f"{folder / 'stagereg' / '__init__.py'} []":
        raise SystemExit(f"Another package than the copy was imported: {where.stdout}{where.stderr}")
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="delete this extension alone")
    parser.add_argument("--quick", action="store_true", help="some of the tests, about a minute")
    asked, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="stagereg-core-") as scratch:
        folder = Path(scratch)
        copy(folder, asked.without)
        options = ["-m", "not slow", "--hypothesis-profile=quick", "-p", "no:cacheprovider", *more]
        tests = [f"tests/{name}" for name in (QUICK if asked.quick else TESTS) if (folder / "tests" / name).exists()]
        failed = run(folder, "-m", "pytest", *options, *tests)
        steps = ["nproc=2", "train.steps=4", f"hydra.run.dir={folder}/run"]
        return failed or run(folder, "examples/train.py", *steps)


if __name__ == "__main__":
    sys.exit(main())
