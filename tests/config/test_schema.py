"""A component's signature as a config: a typed field where a config can hold the value, no field otherwise."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest
from omegaconf import MISSING, OmegaConf, ValidationError

import stagereg.config.schema as schema
from stagereg import registry
from stagereg.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Codec(enum.Enum):
    ZSTD = 1
    NONE = 2


@dataclasses.dataclass
class Net:
    host: str = "here"
    port: int = 1


class Opaque: ...


class Component:
    """One parameter of each sort.

    Args:
        number: how many,
            at most.
        opaque: what only the program has.
    """

    def __init__(
        self,
        text: str,
        number: int = 2,
        wait_s: float = 0.5,
        pin: bool | None = None,
        old: Optional[int] = 3,  # noqa: UP045
        either: Union[int, str] = "auto",  # noqa: UP007
        implicit: int = None,  # noqa: RUF013
        mode: Literal["fast", "slow"] = "fast",
        level: Literal["auto"] | int = "auto",
        codec: Codec = Codec.ZSTD,
        folder: Path = Path("x"),
        sizes: list[int] = [1, 2],  # noqa: B006
        tags: tuple[str, ...] = ("a",),
        weights: Mapping[str, float] | None = {"a": 0.5},
        limits: Mapping[str, float] | None = None,
        late: Net | None = None,
        mixed: str | Sequence[str] = "loss",
        net: Net = Net(),  # noqa: B008
        anything: Any = 5,
        untyped=7,
        stager: Opaque | None = None,
        opaque: Opaque | None = None,
        group: ProcessGroup | None = None,
        partly: str | Opaque = "s",
        sentinel: int = Opaque(),
        nothing=None,
        *args: int,
        only: int = 1,
        **kwargs: int,
    ) -> None: ...


def joined(joinables: Sequence[Any], parts: list, enable: bool = True, /, throw: bool = False) -> None: ...


@pytest.fixture(autouse=True)
def _registered(registry_as_before: None) -> None:
    registry.register("checkpoint", "sorts")(Component)
    registry.register("join", "joined")(joined)


def config(**values: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(schema.schema(registry.find("checkpoint", "sorts"))), values)


FIELDS = {
    "text": (str, MISSING),
    "number": (int, 2),
    "wait_s": (float, 0.5),
    "pin": (bool | None, None),
    "old": (int | None, 3),
    "either": (Any, "auto"),
    "implicit": (int | None, None),
    "mode": (Any, "fast"),
    "level": (Any, "auto"),
    "codec": (Codec, Codec.ZSTD),
    "folder": (Path, Path("x")),
    "sizes": (list[int], [1, 2]),
    "tags": (Any, ["a"]),
    "weights": (Any, {"a": 0.5}),
    "limits": (Any, None),
    "late": (Any, None),
    "mixed": (Any, "loss"),
    "net": (Any, {"host": "here", "port": 1}),
    "anything": (Any, 5),
    "untyped": (Any, 7),
    "stager": (Any, None),
    "partly": (Any, "s"),
    "only": (int, 1),
}


def test_a_parameter_becomes_a_field_or_is_left_to_the_program() -> None:
    sorts, joins = (registry.find(*key).load() for key in (("checkpoint", "sorts"), ("join", "joined")))
    assert {name: (each.type, each.default) for name, each in schema.options(sorts).items()} == FIELDS
    assert list(schema.options(sorts)) == list(FIELDS)
    assert list(schema.options(joins)) == ["throw"]
    assert schema.runtime(sorts) == ["opaque", "group", "sentinel", "nothing"]
    assert schema.runtime(joins) == ["joinables", "parts", "enable"]


ELSEWHERE = """
from __future__ import annotations
import functools, typing, dataclasses
def logged(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
@dataclasses.dataclass
class Base:
    mode: typing.Literal["a", "b"] = "a"
"""


def test_an_annotation_is_read_in_the_module_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(tmp_path)
    elsewhere = importlib.import_module("elsewhere")

    @dataclasses.dataclass
    class Child(elsewhere.Base):  # type: ignore[misc, name-defined]
        codec: Codec = Codec.NONE
        sizes: list[int] = dataclasses.field(default_factory=lambda: [1])

    class Logged:
        @elsewhere.logged  # type: ignore[untyped-decorator]
        def __init__(self, codec: Codec) -> None: ...

    registry.register("join", "child")(Child)
    registry.register("join", "logged")(Logged)
    assert {n: o.hint for n, o in schema.options(registry.find("join", "child").load()).items()} == {
        "mode": Literal["a", "b"],
        "codec": Codec,
        "sizes": list[int],
    }
    assert schema.options(registry.find("join", "child").load())["sizes"].default == [1]
    assert schema.options(registry.find("join", "logged").load())["codec"].hint is Codec


def test_a_parameter_named_like_a_key_of_hydras_is_no_option() -> None:
    def clever(_target_: str = "os.getcwd", _partial_: bool = True, size: int = 1) -> int:
        return size

    registry.register("join", "clever")(clever)
    entry = registry.find("join", "clever")
    assert list(schema.options(entry.load())) == ["size"]
    assert schema.runtime(entry.load()) == ["_target_", "_partial_"]


def test_an_option_and_its_field_have_the_docstrings_text() -> None:
    entry = registry.find("checkpoint", "sorts")
    options = schema.options(entry.load())
    assert (options["number"].help, options["text"].help) == ("how many, at most.", "")
    fields = {field.name: field.metadata.get("help") for field in dataclasses.fields(schema.schema(entry))}
    assert (fields["number"], fields["text"]) == ("how many, at most.", "")


def test_a_field_takes_its_type_and_refuses_others() -> None:
    config(number="8", wait_s="1", pin="true", codec="NONE", sizes=[3])
    for wrong in ({"number": "x"}, {"wait_s": "x"}, {"pin": "maybe"}, {"codec": "GZIP"}, {"sizes": ["x"]}):
        with pytest.raises(ValidationError):
            config(**wrong)


def test_a_default_is_not_shared_between_configs() -> None:
    config().sizes.append(9)
    assert config().sizes == [1, 2]


def test_the_same_component_gives_the_same_class_and_it_pickles() -> None:
    made = schema.schema(registry.find("checkpoint", "sorts"))
    assert made is schema.schema(registry.find("checkpoint", "sorts"))
    assert config()._target_ == f"{Component.__module__}.Component"
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(config(number=4))) == config(number=4)


def test_a_component_inside_a_function_is_refused_with_the_remedy() -> None:
    @registry.register("join", "local")
    def local() -> None: ...

    with pytest.raises(ConfigError, match="join/local is defined inside a function"):
        schema.schema(registry.find("join", "local"))
