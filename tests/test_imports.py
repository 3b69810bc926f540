"""The shape of the source: where imports may point, names that are used once, and what stays small."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "stagereg"

# From the bottom up. The modules of one line may import those of the lines above it, and each other. What the core
# still imports of extensions is listed in :mod:`.test_core`.
LAYERS = [
    {"errors"},
    {"base"},
    {"registry", "data"},
    {"kernel"},
    {"stagers", "join"},
    {"config"},
    {"launch"},
    {"checkpoint"},
    {"extensions"},
    {"assembly"},
    {"testing"},
    {"__init__", "plugin"},
    {"sweep", "bench", "commands", "integrations"},
    {"cli", "__main__"},
]
# The rooms of checkpoint/ and what a program holds, likewise; those of one line do not import each other.
ROOMS = [
    {"format"},
    {"store", "state"},
    {"storage", "ranks"},
    {"targets"},
    {"extension"},
    {"dispatch"},
    {"save", "load", "hold"},
    {"options", "together", "end_report"},
    {"checkpointer"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}


def name_of(file: Path) -> str:
    parts = ("stagereg", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name_of(file): ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[str]:
    """Everything of the package that a module imports, wherever in it, for type checkers only as well."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module


def module_of(path: str) -> str | None:
    """The module that an imported path lies in."""
    if path.split(".")[0] != "stagereg":
        return None
    while path not in trees() and "." in path:
        path = path.rpartition(".")[0]
    return path if path in trees() else "stagereg.__init__"


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {
        module: {found for path in imported(tree) if (found := module_of(path)) is not None} - {module}
        for module, tree in trees().items()
    }


def unit(module: str) -> str:
    return module.split(".")[1]


def test_imports_point_down() -> None:
    assert {unit(module) for module in trees()} == set(LEVEL)
    assert "stagereg.kernel.copier" in graph()["stagereg.stagers.host"]
    assert "stagereg.registry" in graph()["stagereg.stagers.blocking"]
    up = [
        (module, to)
        for module, found in graph().items()
        for to in found
        if LEVEL[unit(to)] > LEVEL[unit(module)] and unit(to) != "extensions"
    ]
    assert up == []
    assert not [module for module in trees() if unit(module) == "kernel" and "stagereg.registry" in graph()[module]]


def test_no_modules_or_packages_import_in_a_circle() -> None:
    packages: dict[str, set[str]] = defaultdict(set)
    for module, found in graph().items():
        packages[unit(module)] |= {unit(each) for each in found} - {unit(module), "extensions"}
    for arrows in (graph(), packages):
        TopologicalSorter(arrows).prepare()  # its error has the circle


def test_rooms_of_checkpoint_import_those_below_them_alone_so_save_and_load_do_not_know_each_other() -> None:
    of = {module: module.split(".")[2] for module in trees() if module.startswith("stagereg.checkpoint.")}
    assert set(of.values()) == set(FLOOR)
    assert "stagereg.checkpoint.format.manifest" in graph()["stagereg.checkpoint.store.located"]
    arrows = {(of[module], of[to]) for module in of for to in graph()[module] & of.keys() if of[module] != of[to]}
    assert [(room, below) for room, below in sorted(arrows) if FLOOR[below] >= FLOOR[room]] == []


def test_no_class_name_is_used_twice_in_one_package() -> None:
    modules: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[module.rpartition(".")[0], node.name].append(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


LINES, LINES_OF_A_FUNCTION, MEMBERS = 450, 60, 20
TOO_LARGE: set[str] = set()
"""What is still to become smaller: nothing is added here, and what has become so is taken out."""


def members(kind: ast.ClassDef) -> set[str]:
    """The public members of a class: its methods and fields, and what its constructor sets; not tests to inherit."""
    found: set[str] = set()
    for node in kind.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__"):
            found |= {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
    return {name for name in found if not name.startswith(("_", "test_"))}


def too_large(name: str, node: ast.AST) -> Iterator[str]:
    """What is over a limit in a function or class, or below it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name = f"{name}.{node.name}"
        if isinstance(node, ast.ClassDef):
            over = len(members(node)) > MEMBERS
        else:
            over = (node.end_lineno or 0) - node.lineno >= LINES_OF_A_FUNCTION
        if over:
            yield name
    for child in ast.iter_child_nodes(node):
        yield from too_large(name, child)


def test_files_functions_and_classes_stay_small() -> None:
    found = {name_of(file) for file in PACKAGE.rglob("*.py") if len(file.read_text().splitlines()) > LINES}
    for module, tree in trees().items():
        found |= set(too_large(module, tree))
    assert found == TOO_LARGE


def test_the_kernel_stays_within_its_lines() -> None:
    def lines(names: str) -> int:
        return sum(len(file.read_text().splitlines()) for file in (PACKAGE / "kernel").glob(names))

    assert 1000 < lines("*.py") <= 2000
    assert 0 < lines("*.c") <= 150


def test_digits_of_other_people_become_numbers_in_one_place() -> None:
    """``isdecimal`` before ``int`` lets digits of other scripts through, and any number of digits, which raise."""
    own = {"stagereg.base.number_text", "stagereg.checkpoint.state.optimizer_state"}  # which makes no number of them
    found = {
        module
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("isdecimal", "isdigit", "isnumeric")
    }
    assert found <= own
    assert "stagereg.base.number_text" in found


def test_all_that_commands_print_goes_through_one_module() -> None:
    """``output`` escapes commands for a terminal."""
    found = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.Call(func=ast.Name(id="print"))
                    | ast.Call(func=ast.Attribute(attr="write", value=ast.Attribute(attr="stdout" | "stderr")))
                ):
                    found.add(module)
    assert {each for each in found if unit(each) != "testing"} == {"stagereg.base.output"}
