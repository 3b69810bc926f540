"""The core knows no extension, and stays small.

What is still to be cut is listed here: a list may only shrink, and what is gone has to be taken out of it.
"""

from __future__ import annotations

from pathlib import Path

from .test_imports import PACKAGE, graph, unit

CORE = {"base", "checkpoint", "config", "data", "errors", "join", "kernel", "launch", "registry", "stagers"}
SIBLINGS = {"checkpoint", "join", "launch"}
MOST_LINES_OF_CORE, MOST_LINES = 28_070, 55_389
"""Lines of Python as they are now: a smaller number replaces them, never a larger one. To reach: 18,000 and 42,000."""

TO_EXTENSIONS: set[tuple[str, str]] = set()
"""Imports from the core to extensions that are still there: none is added."""

BETWEEN_SIBLINGS: set[tuple[str, str]] = set()
"""Likewise between ``checkpoint``, ``launch`` and ``join``, which do not know each other."""

BETWEEN_EXTENSIONS: set[tuple[str, str]] = set()
"""Likewise from one extension to another one."""


def extension(module: str) -> str | None:
    """The name of the extension that a module belongs to."""
    parts = module.split(".")
    return parts[2] if parts[1] == "extensions" and len(parts) > 2 else None


def arrows() -> set[tuple[str, str]]:
    """All imports inside the package, as names below ``stagereg``."""
    return {(module, to) for module, found in graph().items() for to in found}


def named(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(module.partition(".")[2], to.partition(".")[2]) for module, to in pairs}


def lines(*names: str) -> int:
    """Lines of the Python files of some modules and packages."""
    files = [file for name in names for file in (PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py"))]
    return sum(len(file.read_text().splitlines()) for file in files if file.is_file())


def test_the_core_imports_no_extension() -> None:
    assert named({(a, b) for a, b in arrows() if unit(a) in CORE and unit(b) == "extensions"}) == TO_EXTENSIONS


def test_the_core_imports_no_tool_and_no_assembly() -> None:
    allowed = CORE | {"extensions"}
    assert [(a, b) for a, b in sorted(arrows()) if unit(a) in CORE and unit(b) not in allowed] == []


def test_checkpoint_launch_and_join_do_not_know_each_other() -> None:
    found = {(a, b) for a, b in arrows() if {unit(a), unit(b)} <= SIBLINGS and unit(a) != unit(b)}
    assert named(found) == BETWEEN_SIBLINGS


def test_an_extension_imports_no_other_extension() -> None:
    found = {(a, b) for a, b in arrows() if None not in (extension(a), extension(b)) and extension(a) != extension(b)}
    assert named(found) == BETWEEN_EXTENSIONS


def test_each_extension_says_in_its_package_what_it_is_for() -> None:
    folders = [each for each in (PACKAGE / "extensions").iterdir() if each.is_dir() and each.name != "__pycache__"]
    assert [each.name for each in folders if not (each / "__init__.py").read_text().startswith('"""')] == []


def test_the_core_and_the_whole_do_not_grow() -> None:
    everything = sum(len(file.read_text().splitlines()) for file in Path(PACKAGE).rglob("*.py"))
    assert lines(*CORE) <= MOST_LINES_OF_CORE
    assert everything <= MOST_LINES


def test_the_top_of_the_package_can_be_read_at_a_glance() -> None:
    assert len([each for each in PACKAGE.iterdir() if each.is_file() or [*each.glob("*.py")]]) <= 24
