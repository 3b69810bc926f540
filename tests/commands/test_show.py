"""``stagereg show``: a component's options, purpose, package and source line."""

from __future__ import annotations

import inspect

import pytest

import stagereg.config.schema as schema
from stagereg import registry
from stagereg.commands.describe import describe

from .conftest import Command, Install

BUILT_IN = [(kind, name) for kind in registry.kinds() for name in registry.names(kind)]
STAGER = """
from __future__ import annotations

import dataclasses, datetime, enum, pathlib
from typing import Any, Literal, TYPE_CHECKING

from stagereg import ByteSize

if TYPE_CHECKING:
    from nowhere import Group

print("on stdout while it is imported")


class Codec(enum.Enum):
    ZSTD = "z"
    LZ4 = "l"


@dataclasses.dataclass
class Inner:
    '''What is inside.

    Attributes:
        rate: how fast.
    '''

    rate: float = 0.5
    limit: ByteSize = ByteSize("1MiB")


class Theirs:
    '''Stages ``well``
    and :class:`~a.b.Quickly`.

    More of it.

    Args:
        must: what must be.
        group: the ranks.
    '''

    should_synchronize_after_execute = True

    def __init__(
        self, must: str, count: int, group: Group, *, codec: Codec = Codec.LZ4, mode: Literal["a", "b"] | None = None,
        mixed: int | Literal["auto"] = "auto", limit: ByteSize = ByteSize("4GiB"), inner: Inner = Inner(),
        wait: datetime.timedelta = datetime.timedelta(seconds=90), shape: tuple[int, ...] = (1, 2),
        where: pathlib.Path = pathlib.Path("/x"), table: dict[str, float] = {"a": 0.5}, text: str = "yes",
        last: Group | None = None,
    ) -> None: ...

    def stage(self, state_dict: Any) -> Any: ...

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...
"""


def test_options_have_types_of_a_config_in_both_forms(install: Install, command: Command) -> None:
    file = install("theirs_shown", STAGER, {"stager.theirs": "Theirs"})
    shown = command("show", "theirs", "--json")
    assert "on stdout while it is imported" in shown.err
    seen = shown.json
    options = [" ".join([o["name"], o["type"], "=", o["default"]]).strip() for o in seen["options"]]
    assert options == [
        "must str =",
        "count int =",
        "codec ZSTD | LZ4 = LZ4",
        "mode a | b | null = null",
        "mixed int | auto = auto",
        "limit ByteSize = 4GiB",
        "inner.rate float = 0.5",
        "inner.limit ByteSize = 1MiB",
        "wait timedelta = 1m30s",
        "shape tuple[int, ...] = [1, 2]",
        "where Path = /x",
        "table dict[str, float] = {a: 0.5}",
        "text str = 'yes'",
    ]
    assert [o["name"] for o in seen["options"] if o["required"]] == ["must", "count"]
    helps = {o["name"]: o["help"] for o in seen["options"] if o["help"]}
    assert helps == {"must": "what must be.", "inner.rate": "how fast."}
    assert [(r["name"], r["type"], r["required"], r["help"]) for r in seen["runtime"]] == [
        ("group", "Group", True, "the ranks."),
        ("last", "Group | None", False, ""),
    ]
    assert (seen["summary"], seen["doc"]) == ("Stages `well` and `Quickly`.", "More of it.")
    assert (seen["distribution"], seen["version"]) == ("theirs_shown", "1.2")
    text = command("show", "stager=theirs").out
    where = f"{file}:{STAGER.splitlines().index('class Theirs:') + 1}"
    for part in (where, "stager/theirs", "theirs_shown:Theirs", "theirs_shown 1.2", "required", "More of it."):
        assert part in text


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_a_built_in_component_is_described_in_full(kind: str, name: str) -> None:
    entry = registry.find(kind, name)
    seen = describe(entry)
    options = {option.name.partition(".")[0] for option in seen.options}
    assert options == set(schema.options(entry.load()))
    parameters = inspect.signature(entry.load()).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    assert options | {argument.name for argument in seen.runtime} == named


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ("stager/pined_cached", "No stager named 'pined_cached'. Did you mean 'pinned_cached'?"),
        ("pined_cached", "No component is named 'pined_cached'. Did you mean 'pinned_cached'?"),
        ("stagr/shared", "Unknown kind of component: 'stagr'. Did you mean 'stager'?"),
        ("ddp", "2 kinds have a component named 'ddp'. Name one: join_hook/ddp or joinable/ddp"),
        (
            "zzz",
            "No component is named 'zzz'.\n`stagereg list` lists all components; "
            "--plugins MODULE imports a module first.",
        ),
        ("blocking@nobody", "No stager named 'blocking@nobody'."),
    ],
)
def test_a_name_of_no_component_is_refused(asked: str, seen: str, command: Command) -> None:
    shown = command("show", asked, code=2)
    assert (shown.out, seen in shown.err) == ("", True), shown


def test_two_packages_of_a_name_and_a_broken_one_are_named(install: Install, command: Command) -> None:
    install("shown_one", "raise SystemExit('no licence')", {"stager.both": "Theirs"})
    install("shown_two", STAGER, {"stager.both": "Theirs"})
    assert "both@shown-one or both@shown-two" in command("show", "both", code=2).err
    assert command("show", "both@shown_two", "--json").json["target"] == "shown_two:Theirs"
    seen = command("show", "both@shown-one", code=2).err
    assert "shown_one 1.2" in seen
    assert "no licence" in seen
