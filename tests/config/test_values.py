"""Options of every type: a config shows text, the component gets the object, and a replayed config gives it again."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Optional

import hydra.utils
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

import stagereg
import stagereg.config.schema as schema
from stagereg import ByteSize, registry
from stagereg.config.resolved_tree import NodePath, built
from stagereg.errors import ConfigError


class Codec(enum.Enum):
    ZSTD = 1
    NONE = 2


class Mark(str, enum.Enum):  # noqa: UP042  # as one writes it for Python before 3.11
    RED = "r"
    BLUE = "b"


@dataclasses.dataclass(frozen=True)
class Net:
    """Where to.

    Attributes:
        host: its name.
        wait: how long it may take.
    """

    host: str
    wait: timedelta = timedelta(seconds=3)
    kinds: tuple[torch.dtype, ...] = (torch.float32,)
    mode: Literal["fast", "slow"] = "fast"
    group: torch.Tensor | None = None


@dataclasses.dataclass
class Route:
    nets: list[Net] = dataclasses.field(default_factory=lambda: [Net("here")])
    budget: ByteSize = ByteSize("1MiB")  # noqa: RUF009


@dataclasses.dataclass
class Plain:
    sizes: tuple[int, ...] = (1,)
    port: int = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    port: int = 1


class Opaque: ...


@dataclasses.dataclass
class Stop:
    name: str = ""
    tags: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})


@dataclasses.dataclass
class Way:
    stop: Stop | None = None


@dataclasses.dataclass
class Trip:
    stop: Stop | None = None
    waits: dict[str, timedelta] = dataclasses.field(default_factory=dict)
    way: Way = dataclasses.field(default_factory=Way)
    stops: list[Stop] = None  # type: ignore[assignment]  # as many write it
    wait: timedelta = None  # type: ignore[assignment]


def everything(
    budget: ByteSize = ByteSize("4GiB"),  # noqa: B008
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    wait: timedelta = timedelta(hours=1.5),
    maybe: torch.dtype | None = None,
    old: Optional[ByteSize] = None,  # noqa: UP045
    auto: Literal["auto"] | ByteSize = "auto",
    seconds: float | timedelta = 1.5,
    text: str | timedelta = "later",
    waits: list[timedelta] = [timedelta(1)],  # noqa: B006
    pair: tuple[int, torch.dtype, Codec] = (1, torch.half, Codec.NONE),
    budgets: Mapping[str, ByteSize | None] = {"a": ByteSize(3)},
    rates: dict[torch.dtype, float] = {torch.float32: 0.5},  # noqa: B006
    deep: dict[str, list[tuple[timedelta, ...]]] = {"a": [(timedelta(1),)]},  # noqa: B006
    mixed: ByteSize | list[ByteSize] = ByteSize(1),  # noqa: B008
    net: Net = Net("h"),
    nets: Sequence[Net] = (),
    route: Route | None = None,
    plain: Plain = Plain(),  # noqa: B008
    frozen: Frozen = Frozen(),
    either: str | Net = "here",
    parts: str | Sequence[Opaque] = "all",
    mark: Mark = Mark.BLUE,
    marks: list[Mark] = [Mark.RED],  # noqa: B006
    trip: Trip = Trip(),  # noqa: B008
    late: Trip | None = None,
    limits: dict[str, int] | None = None,
    names_or_one: str | list[str] = "x",
    table: list[list[int]] = [],  # noqa: B006
    sloppy: torch.dtype = None,  # type: ignore[assignment]
    choice: Literal["a", "b"] = None,  # type: ignore[assignment]  # noqa: RUF013
    pairs: tuple[int, ...] = None,  # type: ignore[assignment]  # noqa: RUF013
    stop: Stop = None,  # type: ignore[assignment]
) -> dict[str, Any]:
    return dict(locals())


DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(everything).parameters.items()}
DEFAULTS |= {"nets": []}


@pytest.fixture(autouse=True)
def _registered(registry_as_before: None) -> None:
    registry.register("join", "everything")(everything)


def config(**given: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(schema.schema(registry.find("join", "everything"))), given)


def read(value: Any, hint: Any) -> Any:
    """What a component gets for the value of the key ``x``."""
    return built(schema.from_config(NodePath("x"), value, hint, lambda path, node, hint: node))


def alike(one: Any, other: Any) -> bool:
    """Equal and of the same types all the way down, as a ``ByteSize`` equals an ``int``."""
    return one == other and repr(one) == repr(other)


SHOWN = {
    "budget": "4GiB",
    "dtype": "bfloat16",
    "device": "cpu",
    "wait": "1h30m",
    "maybe": None,
    "waits": ["1d"],
    "pair": [1, "float16", Codec.NONE],
    "budgets": {"a": "3B"},
    "rates": {"float32": 0.5},
    "deep": {"a": [["1d"]]},
    "mixed": "1B",
    "net": {"host": "h", "wait": "3s", "kinds": ["float32"], "mode": "fast"},
    "frozen": {"port": 1},
}


def test_a_config_has_texts_for_values_that_it_cannot_hold() -> None:
    shown = OmegaConf.to_container(config())
    assert {name: shown[name] for name in SHOWN} == SHOWN


def test_everything_is_an_option_and_the_component_gets_its_defaults() -> None:
    assert schema.runtime(registry.find("join", "everything").load()) == []
    assert alike(stagereg.instantiate(config()), DEFAULTS)


GIVEN = {
    "budget": ("512MB", ByteSize(512 * 10**6)),
    "dtype": ("torch.float8_e4m3fn", torch.float8_e4m3fn),
    "device": ("cuda:1", torch.device("cuda:1")),
    "wait": (30, timedelta(seconds=30)),
    "maybe": ("half", torch.float16),
    "old": (4096, ByteSize("4KiB")),
    "auto": ("1KB", ByteSize(1000)),
    "seconds": (3, 3.0),
    "text": ("2 days", timedelta(2)),
    "waits": (["1s", 2], [timedelta(seconds=1), timedelta(seconds=2)]),
    "pair": (["7", "int8", "ZSTD"], (7, torch.int8, Codec.ZSTD)),
    "budgets": ({"b": "1KiB", "c": None}, {"a": ByteSize(3), "b": ByteSize(1024), "c": None}),
    "rates": ({"half": 1}, {torch.float32: 0.5, torch.float16: 1.0}),
    "deep": ({"a": [["1s"], []]}, {"a": [(timedelta(seconds=1),), ()]}),
    "mixed": (["1KB", 2], [ByteSize(1000), ByteSize(2)]),
    "net": ({"wait": "1m", "kinds": []}, Net("h", timedelta(minutes=1), ())),
    "nets": ([{"host": "x", "mode": "slow"}], [Net("x", mode="slow")]),
    "route": ({"nets": [{"host": "x"}]}, Route([Net("x")])),
    "plain": ({"sizes": [2, 3]}, Plain((2, 3))),
    "frozen": ({"port": 2}, Frozen(2)),
    "either": ({"host": "x", "wait": "1s"}, Net("x", timedelta(seconds=1))),
    "mark": ("RED", Mark.RED),
    "marks": (["BLUE"], [Mark.BLUE]),
    "trip": ({"stop": {"name": "x"}, "stops": [{}]}, Trip(Stop("x"), stops=[Stop()])),
    "late": ({"stop": {"tags": {"b": "2"}}, "wait": "1s"}, Trip(Stop(tags={"b": 2}), wait=timedelta(seconds=1))),
    "limits": ({"a": "1"}, {"a": 1}),
    "names_or_one": (3, "3"),
    "table": ([["1"], []], [[1], []]),
    "sloppy": ("half", torch.float16),
    "choice": ("b", "b"),
    "pairs": ([1, "2"], (1, 2)),
    "stop": ({"name": "x"}, Stop("x")),
}


def test_the_component_gets_the_objects_from_a_composed_and_from_a_replayed_config() -> None:
    composed = config(**{name: text for name, (text, _) in GIVEN.items()})
    expected = {name: value for name, (_, value) in GIVEN.items()}
    for each in (composed, OmegaConf.create(OmegaConf.to_yaml(composed)), pickle.loads(pickle.dumps(composed))):
        built = stagereg.instantiate(each)
        for name, value in expected.items():
            assert alike(built[name], value), name


def test_a_mapping_takes_new_keys_in_a_config_that_is_closed_to_others() -> None:
    composed = OmegaConf.create({"join": config()}, flags={"struct": True})
    composed.join.budgets.b = "1KB"
    composed.join.trip.waits.b = "1s"
    del composed.join.budgets["a"]
    assert stagereg.instantiate(composed.join)["trip"].waits == {"b": timedelta(seconds=1)}
    assert stagereg.instantiate(composed.join)["budgets"] == {"b": 1000}
    with pytest.raises(ConfigAttributeError):
        composed.join.other = 1


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("late", {"stop": {"name": "x"}}, Trip(Stop("x"))),
        ("late.stop.name", "x", Trip(Stop("x"))),
        ("limits.a", 1, {"a": 1}),
        ("trip.way.stop.name", "x", Trip(way=Way(Stop("x")))),
        ("trip.waits.a", "1s", Trip(waits={"a": timedelta(seconds=1)})),
    ],
)
def test_an_option_that_is_none_or_empty_can_be_set_by_an_override(key: str, value: Any, expected: Any) -> None:
    composed = OmegaConf.create({"join": config()}, flags={"struct": True})
    OmegaConf.update(composed, f"join.{key}", value, merge=True, force_add=True)  # as Hydra does for a + before it
    assert alike(stagereg.instantiate(composed.join)[key.partition(".")[0]], expected)


def test_a_component_instead_of_a_value_is_built() -> None:
    inner = {"_target_": f"{__name__}.everything", "budget": "1KB"}
    assert stagereg.instantiate(config(either=inner))["either"]["budget"] == ByteSize(1000)


def test_texts_with_dollars_are_taken_as_they_are() -> None:
    cfg = OmegaConf.create({"_target_": f"{__name__}.everything", "either": {"host": r"\${oc.env:HOME}"}})
    assert stagereg.instantiate(cfg)["either"] == Net("${oc.env:HOME}")
    cfg.pair = [r"\${oc.env:HOME}", "int8", "ZSTD"]
    with pytest.raises(ConfigError, match=r"^pair\[0\]: '\$\{oc\.env:HOME\}' is not a whole number"):
        stagereg.instantiate(cfg)


OBJECTS = {
    "wait": timedelta(days=-1, microseconds=1),
    "deep": {"a": [(timedelta(3),)]},
    "net": Net("x", group=torch.ones(1)),
    "nets": [Net("x")],
    "parts": [Opaque()],
}


def test_objects_given_by_the_program_arrive() -> None:
    built = stagereg.instantiate(config(), **OBJECTS)
    assert {name: built[name] for name in OBJECTS} == OBJECTS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": "4GiBB"}, r"^budget: '4GiBB' has no unit of bytes\. Did you mean 'GiB'\? Write a size as 4GiB"),
        ({"dtype": "flaot16"}, r"^dtype: 'flaot16' is not a dtype\. Did you mean 'float16'\? Write the name"),
        ({"device": "cuad"}, r"^device: 'cuad' is not a device, such as cpu, cuda"),
        ({"wait": "3 dayz"}, r"^wait: '3 dayz' has no unit of time after 3\. Did you mean 'day"),
        (
            {"auto": "atuo"},
            r"^auto is 'atuo'\. Did you mean 'auto'\? It is one of: 'auto'\nOr: auto: 'atuo' is not a",
        ),
        ({"waits": ["1s", "soon"]}, r"^waits\[1\]: 'soon' is not a duration"),
        ({"pair": [1, "int8"]}, r"^pair has 2 items, where 3 are needed"),
        ({"pair": ["x", "int8", "ZSTD"]}, r"^pair\[0\]: 'x' is not a whole number"),
        ({"pair": [1, "int8", "ZSDT"]}, r"^pair\[2\]: .*ZSTD"),
        ({"budgets": {"b": "x"}}, r"^budgets\.b: 'x' is not a size"),
        ({"rates": {"flaot16": 1}}, r"^rates: 'flaot16' is not a dtype\. Did you mean 'float16'"),
        ({"deep": {"a": [["soon"]]}}, r"^deep\.a\[0\]\[0\]: 'soon'"),
        ({"mixed": ["1X"]}, r"^mixed.*'1X'"),
        ({"net": {"mode": "fsat"}}, r"^net\.mode is 'fsat'\. Did you mean 'fast'\? It is one of: 'fast', 'slow'"),
        ({"nets": [{"host": "x", "wait": "soon"}]}, r"^nets\[0\]\.wait: 'soon'"),
        (
            {"nets": [{"wait": "1s"}]},
            r"^nets\[0\]\.host needs a value: add nets\[0\]\.host=\.\.\. to the command line\.",
        ),
        ({"route": {"nets": [{"host": "x", "mode": "fsat"}]}}, r"^route\.nets\[0\]\.mode is 'fsat'"),
        ({"either": {"hots": "x"}}, r"^either: Net takes no 'hots'\. Did you mean 'host'\? It takes: host, wait"),
        ({"limits": 3}, r"^limits is 3, where a mapping is needed\.$"),
        ({"table": [1]}, r"^table\[0\] is 1, where a list is needed\.$"),
        ({"late": 3}, r"^late is 3, where a mapping of the fields of Trip is needed"),
        ({"choice": "c"}, r"^choice is 'c'\. It is one of: 'a', 'b'"),
        ({"either": {}}, r"^either\.host needs a value: add either\.host=\.\.\."),
    ],
)
def test_a_wrong_text_is_refused_with_its_key_and_the_right_form(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stagereg.instantiate(config(**given))


def test_hydra_builds_the_same_config_and_passes_the_texts() -> None:
    built = hydra.utils.instantiate(config())
    assert (built["budget"], built["dtype"], built["waits"]) == ("4GiB", "bfloat16", ["1d"])
    assert (built["net"]["wait"], built["plain"]) == ("3s", {"sizes": [1], "port": 1})


def test_the_fields_of_a_dataclass_have_their_help() -> None:
    help_ = {field.name: field.help for field in schema.options(Net).values()}
    assert help_ == {"host": "its name.", "wait": "how long it may take.", "kinds": "", "mode": ""}


def test_a_dataclass_that_would_lose_something_is_left_to_the_program() -> None:
    def lossy(net: Net = Net("h", group=torch.ones(1)), needs: Opaque | None = None) -> None: ...  # noqa: B008

    registry.register("join", "lossy")(lossy)
    assert schema.runtime(registry.find("join", "lossy").load()) == ["net", "needs"]


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("fsat", Literal["fast"] | None, r"^x is 'fsat'\. Did you mean 'fast'\? It is one of: 'fast'"),
        (["slow", "fsat"], list[Literal["fast", "slow"]] | None, r"^x\[1\] is 'fsat'\. Did you mean 'fast'\?"),
        ({"a": ["fsat"]}, dict[str, list[Literal["fast"]]], r"^x\.a\[0\] is 'fsat'\. Did you mean 'fast'\?"),
        ("atuo", int | Literal["auto"], r"It is one of: 'auto'\nOr: x: 'atuo' is not a whole number\.$"),
        ("atuo", Literal["auto"] | float, r"\nOr: x: 'atuo' is not a number\.$"),
        ("atuo", Literal["auto"] | bool, r"\nOr: x: 'atuo' is not true or false\.$"),
        (1, Literal[True, "auto"], "^x is 1"),  # which equals the True
        (1.0, Literal[True, "auto"], r"^x is 1\.0"),
    ],
)
def test_another_choice_is_refused_with_its_key_and_the_nearest(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(value, hint)


def test_a_choice_is_taken_as_it_is_where_another_type_may_be() -> None:
    assert (read("free", Literal["auto"] | str), read(None, Literal["fast"] | None)) == ("free", None)
    assert read(True, Literal[True, "auto"]) is True


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (ByteSize, st.integers(0, 2**60).map(ByteSize)),
    (timedelta, st.timedeltas()),
    (torch.dtype, st.sampled_from([torch.bfloat16, torch.int8, torch.bool, torch.complex64])),
    (torch.device, st.sampled_from(["cpu", "cuda:3", "meta"]).map(torch.device)),
    (int, st.integers(-(2**70), 2**70)),
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (str, st.text("abcxyz0123 -_.:,'\"\\#!&*[]{}", max_size=8)),
    (Codec, st.sampled_from(Codec)),
    (Path, st.sampled_from(["a", "/b/c", "."]).map(Path)),
    (Literal["auto", 3], st.sampled_from(["auto", 3])),
    (Literal["auto"] | ByteSize, st.just("auto") | st.integers(0, 2**60).map(ByteSize)),
    (float | timedelta, st.floats(allow_nan=False) | st.timedeltas()),
    (Net, st.builds(Net, st.text("abc"), st.timedeltas(), st.just((torch.int8,)), st.sampled_from(["fast", "slow"]))),
]


def _deeper(hints: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def listed(inner: Any) -> Any:
        return list[inner[0]], st.lists(inner[1], max_size=3)

    def tupled(inner: Any) -> Any:
        return tuple[inner[0], ...], st.lists(inner[1], max_size=3).map(tuple)

    def fixed(inner: Any) -> Any:
        one, other = inner
        return tuple[one[0], other[0]], st.tuples(one[1], other[1])

    def named(inner: Any) -> Any:
        return dict[str, inner[0]], st.dictionaries(st.text("abc", min_size=1), inner[1], max_size=3)

    def maybe(inner: Any) -> Any:
        return inner[0] | None, st.none() | inner[1]

    def both(inner: Any) -> Any:
        return inner[0] | list[inner[0]], inner[1] | st.lists(inner[1], max_size=3)

    singles = st.sampled_from(LEAVES)
    return st.one_of(
        hints.map(listed), hints.map(tupled), hints.map(named), hints.map(maybe), singles.map(both),
        st.tuples(hints, hints).map(fixed),
    )  # fmt: skip


@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data(), hinted=st.recursive(st.sampled_from(LEAVES), _deeper, max_leaves=4))
def test_a_value_of_any_type_survives_a_config_and_its_replay(data: st.DataObject, hinted: Any) -> None:
    hint, strategy = hinted
    value = data.draw(strategy)

    def component(**given: Any) -> Any:
        return given["x"]

    component.__qualname__ = "component"
    component.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=value)]
    )
    registry.register("join", "component")(component)
    composed = OmegaConf.structured(schema.schema(registry.find("join", "component")))
    replayed = OmegaConf.create(OmegaConf.to_yaml(composed))
    assert "x" in composed
    assert alike(stagereg.instantiate(composed), value)
    assert alike(stagereg.instantiate(replayed), value)
