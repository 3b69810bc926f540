"""What a component's signature becomes: typed fields where a config can hold the value, nothing where it cannot."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest
from omegaconf import MISSING, OmegaConf, ValidationError

from stagereg import registry
from stagereg.config import schema
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
    """One parameter of each sort."""

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
        weights: Mapping[str, float] | None = None,
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
def _registered() -> Iterator[None]:
    before = dict(registry._decorated)
    registry.register("checkpoint", "sorts")(Component)
    registry.register("join", "joined")(joined)
    yield
    registry._decorated.clear()
    registry._decorated.update(before)


def config(**values: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(schema.schema(registry.find("checkpoint", "sorts"))), values)


FIELDS = {
    "text": (str, MISSING),
    "number": (int, 2),
    "wait_s": (float, 0.5),
    "pin": (bool | None, None),
    "old": (int | None, 3),
    "either": (int | str, "auto"),
    "implicit": (int | None, None),
    "mode": (str, "fast"),
    "level": (str | int, "auto"),
    "codec": (Codec, Codec.ZSTD),
    "folder": (Path, Path("x")),
    "sizes": (list[int], [1, 2]),
    "tags": (list[str], ["a"]),
    "weights": (dict[str, float] | None, None),
    "mixed": (Any, "loss"),
    "net": (Net, Net()),
    "anything": (Any, 5),
    "untyped": (Any, 7),
    "stager": (Any, None),
    "partly": (str, "s"),
    "only": (int, 1),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_becomes_a_field_of_its_type_and_default(name: str) -> None:
    option = schema.options(registry.find("checkpoint", "sorts"))[name]
    assert (option.type, option.default) == FIELDS[name]


def test_what_no_config_can_hold_is_left_to_the_program() -> None:
    assert list(schema.options(registry.find("checkpoint", "sorts"))) == list(FIELDS)
    assert list(schema.options(registry.find("join", "joined"))) == ["throw"]


def test_the_config_names_its_component() -> None:
    assert config()._target_ == f"{Component.__module__}.Component"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("number", "8", "many"),
        ("wait_s", "1", "soon"),
        ("pin", "true", "maybe"),
        ("either", 4, [4]),
        ("codec", "NONE", "GZIP"),
        ("sizes", [3], ["x"]),
        ("weights", {"a": 1}, {"a": "x"}),
        ("net", {"port": "7"}, {"port": "x"}),
    ],
)
def test_a_field_takes_its_type_and_refuses_others(name: str, right: Any, wrong: Any) -> None:
    config(**{name: right})
    with pytest.raises(ValidationError):
        config(**{name: wrong})


def test_a_default_is_not_shared_between_configs() -> None:
    config().sizes.append(9)
    assert config().sizes == [1, 2]


def test_the_same_component_gives_the_same_class_and_it_pickles() -> None:
    made = schema.schema(registry.find("checkpoint", "sorts"))
    assert made is schema.schema(registry.find("checkpoint", "sorts"))
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(config(number=4))) == config(number=4)


def test_a_component_inside_a_function_is_refused_with_what_to_do() -> None:
    @registry.register("join", "local")
    def local() -> None: ...

    with pytest.raises(ConfigError, match="join/local is defined inside a function"):
        schema.schema(registry.find("join", "local"))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("fast", Literal["fast", "slow"]),
        (None, Literal["fast"] | None),
        (3, Literal["auto"] | int),
        ("auto", Literal["auto"] | int),
        ("free", Literal["auto"] | str),
        (["fast", "slow"], list[Literal["fast", "slow"]]),
        ({"a": "fast"}, dict[str, Literal["fast"]]),
        ("anything", Any),
    ],
)
def test_a_choice_is_accepted(value: Any, hint: Any) -> None:
    schema.refuse_choice("x", value, hint)


@pytest.mark.parametrize(
    ("value", "hint", "where"),
    [
        ("fsat", Literal["fast", "slow"], "x"),
        ("fsat", Literal["fast", "slow"] | None, "x"),
        ("fsat", Literal["fast"] | int, "x"),
        (["slow", "fsat"], list[Literal["fast", "slow"]] | None, r"x\[1\]"),
        ({"a": "fsat"}, dict[str, Literal["fast"]], r"x\.a"),
        ({"a": ["fsat"]}, dict[str, list[Literal["fast"]]], r"x\.a\[0\]"),
    ],
)
def test_another_choice_is_refused_with_its_place_and_the_nearest(value: Any, hint: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{where} is 'fsat'\. Did you mean 'fast'\? It is one of: 'fast'"):
        schema.refuse_choice("x", value, hint)
