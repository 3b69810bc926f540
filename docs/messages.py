"""Writes the index of error messages from the source: ``python docs/messages.py > docs/messages.md``.

Finds all calls that construct an error of the project and assembles each message from the source: constants, f-strings,
both sides of a condition, and results of the project's functions. ``...`` stands for the parts that vary. Nothing is
imported, so the page covers the whole package, whatever is installed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["page"]

_PACKAGE = Path(__file__).parents[1] / "stagereg"
_OPEN = "..."
_VARIANTS = 8  # maximum number of variants per message
_LAST = ("stagereg.bench", "stagereg.testing")  # packages for few users, listed last
_DEPTH = 6  # maximum depth of nested functions and names
_HEAD = """\
# Error messages

Every message of an error that stagereg raises, written by `python docs/messages.py`: edit the source, not this page.
Search for a few words of your message; `...` stands for the parts that vary. Most messages include a remedy.
If the function that raises the error documents the condition, the page shows the condition below the message.
Messages are grouped by class and by the module that raises them; a description follows the name of each module.

Options are written as in a config: `checkpoint.restore.cast=true`. If a program constructs the `Checkpointer` or the
`Join` itself, the message contains Python instead: `restore=Restore(cast=True)`.

After `Step 300 was not saved:` the message continues with the reason, which is another message of this page or an
error of the operating system. [Checkpoints](guarantees.md#failed-saves) lists the errors of failing disks.
"""
_REMEDIES = {
    "BrokenPromiseError": "Correct the component; [contracts](contracts.md) explains each promise.",
    "CheckpointError": "Complete checkpoints are not affected: `stagereg ls DIR` lists them, `stagereg verify DIR` "
    "checks them, and the same command resumes from the newest valid one. [Checkpoints](guarantees.md)",
    "ClosedError": "Construct a new object, or open the checkpoint again.",
    "ConfigError": "Change the option in the message; `stagereg show KIND/NAME` and [options](options.md) list "
    "the valid values.",
    "CorruptCheckpointError": "`stagereg verify DIR` lists the valid checkpoints; `checkpoint.resume=PATH` selects "
    "one. [Checkpoints](guarantees.md)",
    "RankMismatchError": "Call it on every rank with the same arguments, not only under `if rank == 0`.",
    "InstallationError": "Run the command in the message; `stagereg doctor` shows what is installed.",
    "JoinError": "[Uneven inputs](join.md) describes what can be joined, and how.",
    "JoinableNotInitializedError": "Call `super().__init__()` in its constructor. [Plugins](plugins.md)",
    "LaunchError": "The output of the rank in the message contains the cause. [Many machines](several-machines.md)",
    "SaveTimeoutError": "Check whether the storage hangs; otherwise raise the timeout. [Checkpoints](guarantees.md)",
    "MissingEntryError": "Set `checkpoint.restore.allow_missing=[NAME]` if the entry should start from scratch. "
    "[Checkpoints](resume.md#renamed-new-and-missing-entries)",
    "OptionError": "`stagereg list` shows the names, `stagereg doctor` shows which packages are broken.",
    "PeerFailedError": "Find the cause on the rank in the message, which failed first. "
    "[When a rank fails in a join](join-recipes.md#when-a-rank-fails-in-a-join)",
    "PluginError": "Correct the module that is listed under `plugins:` in the config. [Plugins](plugins.md)",
    "RankFailure": "The message contains the traceback of each failed rank, and the stacks of each hung rank.",
    "RanksFailedError": "The message lists each cause once, with its rank. To resume, run the same command again.",
    "RegistryError": "`stagereg list` shows all registered components and their packages. [Plugins](plugins.md)",
    "StagerClosedError": "Build a new stager; a `Checkpointer` closes the stager that was passed to it.",
    "StagingError": "The state cannot be saved, or there is no memory for its copy. [Stagers](stagers.md)",
    "StageregError": "",
    "SweepError": "[Sweeps](sweeps.md) describes how to configure a sweep.",
    "TargetNotAllowedError": "Register the class, or name it in `allow=` of `stagereg.instantiate`. "
    "[Security](../SECURITY.md)",
    "UnevenInputsError": "Raised only with `join.throw=true`; without it, ranks that run out of data wait. "
    "[Throw](join-recipes.md#raise-an-error-on-uneven-inputs)",
    "UnknownNameError": "The message lists all names, and the most similar one.",
    "UnstageableTypeError": "Remove the value at the path in the message from the state, or convert it to a number, "
    "text or tensor.",
    "WrittenWhileSavedError": "Save again after the next step, or choose `stager=pinned_cached`, which copies all "
    "inside `save()`. [Stagers](stagers.md#programs-that-write-parameters-between-optimizer-steps)",
    "WrittenWhileStagedError": "Call `stage()` again, which then copies everything before it returns.",
}
"""Remedies for the errors of each class."""


@dataclass
class _Source:
    """A module of the package, with its definitions and imports."""

    name: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By local name: the module and the name there; the name is empty for an imported module."""

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            match node:
                case ast.Import(names=names):
                    self.imports |= {each.asname or each.name: (each.name, "") for each in names}
                case ast.ImportFrom(module=str(module), names=names):
                    self.imports |= {each.asname or each.name: (module, each.name) for each in names}
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.constants[name] = value
                case ast.FunctionDef(name=name):
                    self.functions[name] = node


@dataclass(frozen=True)
class _Made:
    """The construction of an error: class, messages, location, and the documented condition."""

    kind: str
    texts: tuple[str, ...]
    module: str
    function: str
    why: str


def page() -> str:
    """Return the page, in Markdown."""
    found = _everything()
    parts = [_HEAD]
    for kind in sorted({made.kind for made in found}):
        parts.append(f"\n## {kind}\n\n{_classes()[kind][1]}\n")
        remedy = _REMEDIES[kind]
        parts.append(f"\n{remedy}\n" if remedy else "")
        modules: dict[str, list[_Made]] = defaultdict(list)
        for made in found:
            if made.kind == kind:
                modules[made.module].append(made)
        for module, several in sorted(modules.items(), key=lambda each: each[0].startswith(_LAST)):
            about = _prose((ast.get_docstring(_sources()[module].tree) or "").partition("\n\n")[0])
            parts.append(f"\n### {module.removeprefix('stagereg.')}\n\n{about}\n")
            parts += [_item(made) for made in several]
    return "".join(parts)


def _item(made: _Made) -> str:
    """Return the entry of an error. Each message is a heading, because the search ranks headings first."""
    heads = "".join(f"\n#### {_code(text)}\n" for text in made.texts)
    return heads + (f"\n`{made.function}`: {made.why}\n" if made.why else "")


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _everything() -> list[_Made]:
    found: dict[tuple[str, tuple[str, ...]], _Made] = {}
    for source in _sources().values():
        for call, scopes in _calls(source.tree, ()):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in _classes():
                made = _made(name, call, scopes, source)
                if made.texts:
                    found.setdefault((made.kind, made.texts), made)
    return list(found.values())


def _calls(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.Call, tuple[ast.AST, ...]]]:
    """Yield every call under ``node``, with the classes and functions around it, outermost first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, scopes
        inside = isinstance(child, ast.ClassDef | ast.FunctionDef)
        yield from _calls(child, (*scopes, child) if inside else scopes)


def _made(name: str, call: ast.Call, scopes: tuple[ast.AST, ...], source: _Source) -> _Made:
    kind = name
    while kind.startswith("_"):
        kind = _classes()[kind][0][0]
    ancestors = _ancestors(name)
    staging = "StagingError" in ancestors
    message = call.args[staging:][:1]
    functions = [each for each in scopes if isinstance(each, ast.FunctionDef)]
    texts = _texts(message[0], source, functions[-1] if functions else None, _DEPTH) if message else []
    before = ""
    if staging:
        before = "cannot stage: " if call.args and ast.unparse(call.args[0]) == "[]" else "cannot stage ...: "
    whole = dict.fromkeys(before + _clean(text) for text in texts if len(re.findall(r"[A-Za-z]{2,}", text)) > 1)
    names = [
        each.name for each in scopes if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name != "__init__"
    ]
    return _Made(kind, tuple(whole), source.name, ".".join(names), _why(scopes, ancestors))


def _why(scopes: tuple[ast.AST, ...], ancestors: list[str]) -> str:
    """Return when such an error is raised, from the nearest docstring around the call."""
    made_in = [scope for scope in scopes if isinstance(scope, ast.FunctionDef)][-1:]
    if made_in and made_in[0].name == "__init__":
        made_in = [*made_in, *scopes[:1]]  # the errors of a constructor are documented in the class
    for scope in made_in:
        doc = ast.get_docstring(scope) if isinstance(scope, ast.ClassDef | ast.FunctionDef) else None
        section = re.search(r"^Raises:\n((?:[ \n].*\n?|\n)*)", doc or "", re.M)
        for kind, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.M):
            if kind in ancestors:
                return _prose(text)
    return ""


def _prose(text: str) -> str:
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")


def _clean(text: str) -> str:
    """Return a text in one line, with adjacent gaps merged into one ``...``."""
    return re.sub(r"\.{4,}", _OPEN, " ".join(text.split()))


def _texts(node: ast.expr | None, source: _Source, function: ast.FunctionDef | None, depth: int) -> list[str]:
    """Return every text that an expression may produce."""
    if node is None or depth == 0:
        return [_OPEN]

    def of(other: ast.expr) -> list[str]:
        return _texts(other, source, function, depth)

    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.JoinedStr(values=values):
            return _joined([of(value) for value in values])
        case ast.FormattedValue(value=ast.Name(id=name)) if (named := _option_called(name, function)) is not None:
            return of(named)
        case ast.FormattedValue(value=ast.Name() | ast.Attribute() as value):
            texts = _texts(value, source, None, depth - 1)
            return texts if len(texts) == 1 else [_OPEN]
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id="option" | "choice")) as value):
            return of(value)
        case ast.Call(func=ast.Name(id="option" | "choice"), args=[name, *values], keywords=more):
            shown = [f"{_value(name)}={_value(value)}" for value in values] or [_value(name)]
            return [" ".join([*shown, *(f"{_value(name)}.{each.arg}={_value(each.value)}" for each in more)])]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _joined([of(left), of(right)])
        case ast.BinOp(op=ast.Mod(), left=left):
            return [re.sub(r"%[sdr]", _OPEN, text) for text in of(left)]
        case ast.IfExp(body=body, orelse=other):
            return (of(body) + of(other))[:_VARIANTS]
        case ast.BoolOp(values=values):
            return [text for value in values for text in of(value)][:_VARIANTS]
        case ast.Name(id=name):
            return _named(name, source, function, depth - 1)
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in source.imports:
            module = ".".join(filter(None, source.imports[name]))
            return _named(attr, _sources()[module], None, depth - 1) if module in _sources() else [_OPEN]
        case ast.Call(func=ast.Name(id=name)):
            return _returned(name, source, depth - 1)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if name in source.imports:
            module = ".".join(filter(None, source.imports[name]))
            return _returned(attr, _sources()[module], depth - 1) if module in _sources() else [_OPEN]
    return [_OPEN]


def _option_called(name: str, function: ast.FunctionDef | None) -> ast.Call | None:
    """Return the call that creates the text of an option, if a local variable contains such a text."""
    for each in ast.walk(function) if function is not None else ():
        match each:
            case ast.Assign(
                targets=[ast.Name(id=target)], value=ast.Call(func=ast.Name(id="option" | "choice")) as call
            ) if target == name:
                return call
    return None


def _value(node: ast.expr) -> str:
    """Return a value in the syntax of a config."""
    match node:
        case ast.Constant(value=None | bool() as value):
            return {None: "null", True: "true", False: "false"}[value]
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=values):
            return "".join(_OPEN if isinstance(each, ast.FormattedValue) else _value(each) for each in values)
    return _OPEN


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(texts) for texts in itertools.islice(itertools.product(*parts), _VARIANTS)]


def _named(name: str, source: _Source, function: ast.FunctionDef | None, depth: int) -> list[str]:
    """Return the texts of a local variable, a constant of the module, or an imported constant."""
    given = [] if function is None else list(ast.walk(function))
    values = [each.value for each in given if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name]
    if values:
        return [text for value in values for text in _texts(value, source, function, depth)][:_VARIANTS]
    if name in source.constants:
        value = source.constants[name]
        return _texts(value, source, None, depth)
    module, there = source.imports.get(name, ("", ""))
    return _named(there, _sources()[module], None, depth) if module in _sources() and there else [_OPEN]


def _returned(name: str, source: _Source, depth: int) -> list[str]:
    if name in source.functions:
        function = source.functions[name]
        values = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
        return [text for value in values for text in _texts(value, source, function, depth)][:_VARIANTS]
    module, there = source.imports.get(name, ("", ""))
    return _returned(there, _sources()[module], depth) if module in _sources() and there and depth else [_OPEN]


def _ancestors(name: str) -> list[str]:
    return [name, *(up for base in _classes().get(name, ([], ""))[0] for up in _ancestors(base))]


_read: dict[str, _Source] = {}
_errors: dict[str, tuple[list[str], str]] = {}


def _sources() -> dict[str, _Source]:
    """Return the modules of the package, by name."""
    if not _read:
        for file in sorted(_PACKAGE.rglob("*.py")):
            name = ".".join(("stagereg", *file.relative_to(_PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
            _read[name] = _Source(name, ast.parse(file.read_text()))
    return _read


def _classes() -> dict[str, tuple[list[str], str]]:
    """Return the error classes of the project: their project base classes, and their summaries."""
    if not _errors:
        classes = [n for s in _sources().values() for n in s.tree.body if isinstance(n, ast.ClassDef)]
        known = {"StageregError"}
        while more := {c.name for c in classes if known & {ast.unparse(base) for base in c.bases}} - known:
            known |= more
        for each in classes:
            if each.name in known:
                bases = [base for base in map(ast.unparse, each.bases) if base in known]
                _errors[each.name] = bases, _prose((ast.get_docstring(each) or "").partition("\n\n")[0])
    return _errors


if __name__ == "__main__":
    print(page(), end="")
