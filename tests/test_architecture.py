"""docs/architecture.md names what exists, and stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .test_imports import PACKAGE, trees

ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CODE = [found.strip() for found in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S))]
OF_OTHERS = {
    *("latest", "load_state_dict", "name", "stagereg", "every=auto", "make test-core", "stagereg.commands"),
    'ARGS="--without tiers"',
}
"""What is no name of the source: files of a checkpoint, methods of torch, and what a user types."""


def defined() -> tuple[set[str], dict[str, set[str]]]:
    """All names that the source defines; and the members of each class, with those that it inherits."""
    names, members, bases = set[str](), dict[str, set[str]](), dict[str, list[str]]()
    for tree in trees().values():
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=name, body=body):
                    found = {each.name for each in body if isinstance(each, ast.FunctionDef)}
                    members.setdefault(name, set()).update(found)
                    bases.setdefault(name, []).extend(ast.unparse(each).split(".")[-1] for each in node.bases)
                    names.add(name)
                case ast.FunctionDef(name=name):
                    names.add(name)
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
    for name in members:
        above, seen = [name], set[str]()
        while above:
            each = above.pop()
            if each in members and each not in seen:
                seen.add(each)
                members[name] |= members[each]
                above += bases[each]
    return names, members


NAMES, MEMBERS = defined()
OWN = {
    node.name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for tree in trees().values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}
EXTENSIONS = {each.parent.name for each in (PACKAGE / "extensions").glob("*/__init__.py")}


def exists(name: str) -> bool:
    if re.fullmatch(r"[\w./]+(\.py|/)", name):
        rooms = (
            ROOT,
            PACKAGE,
            PACKAGE / "checkpoint",
            PACKAGE / "extensions" / "recovery",
            PACKAGE / "extensions" / "buckets",
        )
        return any((room / name).exists() for room in (*rooms, PACKAGE / "checkpoint" / "load"))
    if re.fullmatch(r"[A-Z]\w+\.\w+", name):
        owner, member = name.split(".")
        return member in MEMBERS.get(owner, ()) or (member.startswith("__") and owner in MEMBERS)
    bare = name.partition("(")[0].removeprefix("stagereg.")
    return bare in NAMES | EXTENSIONS or name in OF_OTHERS or bare in {"save", "load", "ddp", "main"}


@pytest.mark.parametrize("name", sorted({*CODE}))
def test_every_name_on_the_page_exists(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize(
    "name", ["checkpoint/nowhere.py", "Saver.dance", "Nobody", "extensions/nothing/", "Nobody.save"]
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)


def test_the_methods_of_each_protocol_are_those_of_its_class() -> None:
    rows = re.findall(r"^\| `(\w+)`(?:, which is both| in `[\w/.]+`)? \| ((?:`\w+`(?:, )?)+) \|$", PAGE, re.M)
    assert {"CheckpointExtension", "SaveTarget", "RankExtension", "CheckpointSource"} <= {name for name, _ in rows}
    for name, methods in rows:
        assert {*re.findall(r"`(\w+)`", methods)} == {each for each in OWN[name] if not each.startswith("_")}, name


def test_the_page_names_each_extension_and_stays_short() -> None:
    assert {*CODE} >= EXTENSIONS
    assert len(PAGE.splitlines()) <= 200
    assert Path(ROOT / "docs" / "architecture.md").is_file()
