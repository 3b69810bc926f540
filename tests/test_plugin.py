"""``stagereg.plugin``: what a plugin may import. The names are there, cost nothing before use, and are enough."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stagereg.plugin
import stagereg.testing
from stagereg.base.spec import OPTIONAL, REQUIRED
from stagereg.commands.scaffold import _EXAMPLES as KINDS

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text()
EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
PUBLIC = {"stagereg", "stagereg.plugin", "stagereg.testing"}


def test_every_name_is_there() -> None:
    names = dir(stagereg.plugin)
    assert {"HostStager", "Joinable", "JoinHook", "KeepRule", "CommittedCheckpoint", "Tier", "Storage"} < set(names)
    assert [name for name in names if getattr(stagereg.plugin, name).__name__ != name and name != "StateDict"] == []
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from stagereg.plugin import Nothing  # noqa: F401


def test_the_table_of_the_page_has_every_kind_and_is_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| `(\w+)` \| `stagereg new (\w+)` \| ", PAGE, re.M)
    assert {kind for kind, *_ in rows} == {kind for kind, members in REQUIRED.items() if members}
    for kind, bases, methods, contract, scaffold in rows:
        assert scaffold == kind
        assert [base for base in re.findall(r"`(\w+)`", bases) if not hasattr(stagereg.plugin, base)] == []
        members = "".join([*REQUIRED[kind], *OPTIONAL.get(kind, [])])
        assert [name for name in re.findall(r"`(\w+)`", methods) if kind != "storage" and name not in members] == []
        if kind in KINDS:
            assert issubclass(getattr(stagereg.testing, contract), stagereg.testing.Contract)
    assert {kind for kind, *_ in rows} >= KINDS.keys()


def test_importing_it_imports_no_torch() -> None:
    code = (
        "import sys, stagereg.plugin; from stagereg.plugin import ByteSize, ConfigError; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "False\n"


def test_the_example_and_so_the_scaffolds_import_nothing_else() -> None:
    imported = {
        node.module
        for file in EXAMPLE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("stagereg")
    }
    assert "stagereg.plugin" in imported
    assert imported <= PUBLIC
