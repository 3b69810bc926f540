"""A component's signature as a config: typed fields, texts for objects; what the config holds becomes objects again."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import hydra.utils
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf, ValidationError
from omegaconf.errors import ConfigAttributeError

import stagereg
import stagereg.config.schema as schema
from stagereg import ByteSize, registry
from stagereg.config.resolved_tree import NodePath, built
from stagereg.errors import ConfigError

from ..support.examples import examples

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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


def sorts(
    joinables: Sequence[Any],
    enable: bool = True,
    /,
    text: str = MISSING,
    number: int = 2,
    wait_s: float = 0.5,
    pin: bool | None = None,
    implicit: int = None,  # noqa: RUF013
    either: Union[int, str] = "auto",  # noqa: UP007
    codec: Codec = Codec.ZSTD,
    folder: Path = Path("x"),
    sizes: list[int] = [1, 2],  # noqa: B006
    tags: tuple[str, ...] = ("a",),
    anything: Any = 5,
    untyped=7,
    stager: Opaque | None = None,
    partly: str | Opaque = "s",
    opaque: Opaque | None = None,
    group: ProcessGroup | None = None,
    sentinel: int = Opaque(),
    nothing=None,
    lossy: Net = Net("h", group=torch.ones(1)),  # noqa: B008
    *args: int,
    only: int = 1,
    **kwargs: int,
) -> None:
    """One parameter of each sort.

    Args:
        number: how many,
            at most.
        opaque: what only the program has.
    """


FIELDS = {
    "text": (str, MISSING),
    "number": (int, 2),
    "wait_s": (float, 0.5),
    "pin": (bool | None, None),
    "implicit": (int | None, None),
    "either": (Any, "auto"),
    "codec": (Codec, Codec.ZSTD),
    "folder": (Path, Path("x")),
    "sizes": (list[int], [1, 2]),
    "tags": (Any, ["a"]),
    "anything": (Any, 5),
    "untyped": (Any, 7),
    "stager": (Any, None),
    "partly": (Any, "s"),
    "only": (int, 1),
}
RUNTIME = ["joinables", "enable", "opaque", "group", "sentinel", "nothing", "lossy"]

CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "budget": (ByteSize, ByteSize("4GiB"), "512MB", ByteSize(512 * 10**6)),
    "dtype": (torch.dtype, torch.bfloat16, "torch.float8_e4m3fn", torch.float8_e4m3fn),
    "device": (torch.device, torch.device("cpu"), "cuda:1", torch.device("cuda:1")),
    "wait": (timedelta, timedelta(hours=1.5), 30, timedelta(seconds=30)),
    "maybe": (Optional[torch.dtype], None, "half", torch.float16),  # noqa: UP045
    "auto": (Literal["auto"] | ByteSize, "auto", "1KB", ByteSize(1000)),
    "text": (str | timedelta, "later", "2 days", timedelta(2)),
    "waits": (list[timedelta], [timedelta(1)], ["1s", 2], [timedelta(seconds=1), timedelta(seconds=2)]),
    "pair": (
        tuple[int, torch.dtype, Codec], (1, torch.half, Codec.NONE), ["7", "int8", "ZSTD"], (7, torch.int8, Codec.ZSTD)
    ),
    "budgets": (
        Mapping[str, ByteSize | None], {"a": ByteSize(3)},
        {"b": "1KiB", "c": None}, {"a": ByteSize(3), "b": ByteSize(1024), "c": None},
    ),
    "rates": (dict[torch.dtype, float], {torch.float32: 0.5}, {"half": 1}, {torch.float32: 0.5, torch.float16: 1.0}),
    "deep": (
        dict[str, list[tuple[timedelta, ...]]], {"a": [(timedelta(1),)]},
        {"a": [["1s"], []]}, {"a": [(timedelta(seconds=1),), ()]},
    ),
    "mixed": (ByteSize | list[ByteSize], ByteSize(1), ["1KB", 2], [ByteSize(1000), ByteSize(2)]),
    "net": (Net, Net("h"), {"wait": "1m", "kinds": []}, Net("h", timedelta(minutes=1), ())),
    "nets": (Sequence[Net], [], [{"host": "x", "mode": "slow"}], [Net("x", mode="slow")]),
    "route": (Route | None, None, {"nets": [{"host": "x"}]}, Route([Net("x")])),
    "dollars": (str | Net, "", {"host": r"\${oc.env:HOME}"}, Net("${oc.env:HOME}")),
    "either": (str | Net, "here", {"host": "x", "wait": "1s"}, Net("x", timedelta(seconds=1))),
    "parts": (str | Sequence[Opaque], "all", "none", "none"),
    "mark": (Mark, Mark.BLUE, "RED", Mark.RED),
    "trip": (Trip, Trip(), {"stop": {"name": "x"}, "stops": [{}]}, Trip(Stop("x"), stops=[Stop()])),
    "late": (
        Trip | None, None,
        {"stop": {"tags": {"b": "2"}}, "wait": "1s"}, Trip(Stop(tags={"b": 2}), wait=timedelta(seconds=1)),
    ),
    "limits": (dict[str, int] | None, None, {"a": "1"}, {"a": 1}),
    "names_or_one": (str | list[str], "x", 3, "3"),
    "table": (list[list[int]], [], [["1"], []], [[1], []]),
    "choice": (Literal["a", "b"], None, "b", "b"),
    "pairs": (tuple[int, ...], None, [1, "2"], (1, 2)),
    "stop": (Stop, None, {"name": "x"}, Stop("x")),
}  # fmt: skip
"""Of each parameter the annotation, the default, what a config gives, and what the component gets for that."""


def everything(**given: Any) -> dict[str, Any]:
    return given


def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


everything.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [parameter(name, hint, default) for name, (hint, default, _, _) in CASES.items()]
)


@pytest.fixture(autouse=True)
def _registered(registry_as_before: None) -> None:
    registry.register("join", "everything")(everything)
    registry.register("checkpoint", "sorts")(sorts)


def config(name: str = "everything", **values: Any) -> Any:
    entry = registry.find("join" if name == "everything" else "checkpoint", name)
    return OmegaConf.merge(OmegaConf.structured(schema.schema(entry)), values)


def read(value: Any, hint: Any) -> Any:
    """What a component gets for the value of the key ``x``."""
    return built(schema.from_config(NodePath("x"), value, hint, lambda path, node, hint: node))


def alike(one: Any, other: Any) -> bool:
    """Equal and of the same types all the way down, as a ``ByteSize`` equals an ``int``."""
    return one == other and repr(one) == repr(other)


def test_a_parameter_becomes_a_field_or_is_left_to_the_program() -> None:
    options = schema.options(sorts)
    assert {name: (each.type, each.default) for name, each in options.items()} == FIELDS
    assert list(options) == list(FIELDS)
    assert schema.runtime(sorts) == RUNTIME
    assert schema.runtime(everything) == []


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

    options = schema.options(Child)
    expected = {"mode": Literal["a", "b"], "codec": Codec, "sizes": list[int]}
    assert {name: option.hint for name, option in options.items()} == expected
    assert options["sizes"].default == [1]
    assert schema.options(Logged)["codec"].hint is Codec


def test_an_option_and_its_field_have_the_docstrings_text() -> None:
    entry = registry.find("checkpoint", "sorts")
    fields = {field.name: field.metadata.get("help") for field in dataclasses.fields(schema.schema(entry))}
    assert (fields["number"], fields["text"]) == ("how many, at most.", "")
    of_net = {field.name: field.help for field in schema.options(Net).values()}
    assert of_net == {"host": "its name.", "wait": "how long it may take.", "kinds": "", "mode": ""}


def test_a_field_takes_its_type_and_refuses_others() -> None:
    config("sorts", number="8", wait_s="1", pin="true", codec="NONE", sizes=[3])
    for wrong in ({"number": "x"}, {"wait_s": "x"}, {"pin": "maybe"}, {"codec": "GZIP"}, {"sizes": ["x"]}):
        with pytest.raises(ValidationError):
            config("sorts", **wrong)


def test_a_default_is_not_shared_and_the_class_pickles() -> None:
    config("sorts").sizes.append(9)
    assert config("sorts").sizes == [1, 2]
    made = schema.schema(registry.find("checkpoint", "sorts"))
    assert made is schema.schema(registry.find("checkpoint", "sorts"))
    assert config("sorts")._target_ == f"{__name__}.sorts"
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(config("sorts", number=4))) == config("sorts", number=4)


def test_a_component_inside_a_function_is_refused() -> None:
    registry.register("join", "local")(lambda: None)
    with pytest.raises(ConfigError, match="join/local is defined inside a function"):
        schema.schema(registry.find("join", "local"))


SHOWN = {
    "budget": "4GiB",
    "dtype": "bfloat16",
    "wait": "1h30m",
    "maybe": None,
    "pair": [1, "float16", Codec.NONE],
    "rates": {"float32": 0.5},
    "deep": {"a": [["1d"]]},
    "net": {"host": "h", "wait": "3s", "kinds": ["float32"], "mode": "fast"},
}


def test_a_config_shows_texts_which_hydra_passes_and_we_read() -> None:
    shown = OmegaConf.to_container(config())
    assert {name: shown[name] for name in SHOWN} == SHOWN
    assert alike(stagereg.instantiate(config()), {name: default for name, (_, default, _, _) in CASES.items()})
    plain = hydra.utils.instantiate(config())
    assert (plain["budget"], plain["dtype"], plain["net"]["wait"]) == ("4GiB", "bfloat16", "3s")


def test_a_component_gets_objects_also_from_a_replayed_config() -> None:
    composed = config(**{name: text for name, (_, _, text, _) in CASES.items()})
    for each in (composed, OmegaConf.create(OmegaConf.to_yaml(composed)), pickle.loads(pickle.dumps(composed))):
        made = stagereg.instantiate(each)
        for name, (_, _, _, expected) in CASES.items():
            assert alike(made[name], expected), name


def test_a_mapping_takes_new_keys_in_a_closed_config() -> None:
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
def test_an_option_that_is_none_or_empty_can_be_overridden(key: str, value: Any, expected: Any) -> None:
    composed = OmegaConf.create({"join": config()}, flags={"struct": True})
    OmegaConf.update(composed, f"join.{key}", value, merge=True, force_add=True)  # as Hydra does for a + before it
    assert alike(stagereg.instantiate(composed.join)[key.partition(".")[0]], expected)


def test_objects_of_the_program_and_components_arrive() -> None:
    inner = {"_target_": f"{__name__}.everything", "budget": "1KB"}
    assert stagereg.instantiate(config(either=inner))["either"]["budget"] == ByteSize(1000)
    objects = {
        "wait": timedelta(days=-1, microseconds=1),
        "deep": {"a": [(timedelta(3),)]},
        "net": Net("x", group=torch.ones(1)),
        "nets": [Net("x")],
        "parts": [Opaque()],
    }
    made = stagereg.instantiate(config(), **objects)
    assert {name: made[name] for name in objects} == objects


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"budget": "4GiBB"}, r"^budget: '4GiBB' has no valid unit of bytes\. Did you mean 'GiB'\? Write a size as 4GiB"),
    ({"auto": "atuo"}, r"^auto is 'atuo'\. Did you mean 'auto'\? It must be one of: 'auto', or a"),
    ({"waits": ["1s", "soon"]}, r"^waits\[1\]: 'soon' is not a duration"),
    ({"pair": [1, "int8"]}, r"^pair must have 3 items, not 2"),
    ({"pair": ["x", "int8", "ZSTD"]}, r"^pair\[0\]: 'x' is not a whole number"),
    ({"pair": [r"\${oc.env:HOME}", "int8", "ZSTD"]}, r"^pair\[0\]: '\$\{oc\.env:HOME\}' is not a whole number"),
    ({"pair": [1, "int8", "ZSDT"]}, r"^pair\[2\]: .*ZSTD"),
    ({"budgets": {"b": "x"}}, r"^budgets\.b: 'x' is not a size"),
    ({"rates": {"flaot16": 1}}, r"^rates: 'flaot16' is not a dtype\. Did you mean 'float16'"),
    ({"deep": {"a": [["soon"]]}}, r"^deep\.a\[0\]\[0\]: 'soon'"),
    ({"mixed": ["1X"]}, r"^mixed.*'1X'"),
    ({"nets": [{"wait": "1s"}]}, r"^nets\[0\]\.host needs a value: add nets\[0\]\.host=\.\.\. to the command line\."),
    ({"route": {"nets": [{"host": "x", "mode": "fsat"}]}}, r"^route\.nets\[0\]\.mode is 'fsat'\. Did you mean 'fast'"),
    ({"either": {"hots": "x"}}, r"^either: Net takes no 'hots'\. Did you mean 'host'\? It takes: host, wait"),
    ({"either": {}}, r"^either\.host needs a value: add either\.host=\.\.\."),
    ({"limits": 3}, r"^limits is 3, but must be a mapping\.$"),
    ({"table": [1]}, r"^table\[0\] is 1, but must be a list\.$"),
    ({"late": 3}, r"^late is 3, but must be a mapping of the fields of Trip"),
    ({"choice": "c"}, r"^choice is 'c'\. It must be one of: 'a', 'b'"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_wrong_text_is_refused_with_its_key_and_the_right_form(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stagereg.instantiate(config(**given))


def test_a_choice_is_taken_or_refused_with_key_and_nearest() -> None:
    for value, hint, message in (
        (["slow", "fsat"], list[Literal["fast", "slow"]] | None, r"^x\[1\] is 'fsat'\. Did you mean 'fast'\?"),
        ({"a": ["fsat"]}, dict[str, list[Literal["fast"]]], r"^x\.a\[0\] is 'fsat'\. Did you mean 'fast'\?"),
        ("atuo", int | Literal["auto"], r"It must be one of: 'auto', or a whole number\.$"),
        ("atuo", Literal["auto"] | bool, r"'auto', or true or false\.$"),
        (1, Literal[True, "auto"], "^x is 1"),  # which equals the True
        (1.0, Literal[True, "auto"], r"^x is 1\.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(value, hint)
    assert (read("free", Literal["auto"] | str), read(None, Literal["fast"] | None)) == ("free", None)
    assert read(True, Literal[True, "auto"]) is True


LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (ByteSize, st.integers(0, 2**60).map(ByteSize)),
    (timedelta, st.timedeltas(timedelta(0))),
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
    (float | timedelta, st.floats(allow_nan=False) | st.timedeltas(timedelta(0))),
    (
        Net,
        st.builds(
            Net, st.text("abc"), st.timedeltas(timedelta(0)), st.just((torch.int8,)), st.sampled_from(["fast", "slow"])
        ),
    ),
]


def _deeper(hints: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def few(of: Any) -> st.SearchStrategy[Any]:
        return st.lists(of, max_size=3)

    keys, singles = st.text("abc", min_size=1), st.sampled_from(LEAVES)
    return st.one_of(
        hints.map(lambda one: (list[one[0]], few(one[1]))),
        hints.map(lambda one: (tuple[one[0], ...], few(one[1]).map(tuple))),
        hints.map(lambda one: (dict[str, one[0]], st.dictionaries(keys, one[1], max_size=3))),
        hints.map(lambda one: (one[0] | None, st.none() | one[1])),
        singles.map(lambda one: (one[0] | list[one[0]], one[1] | few(one[1]))),
        st.tuples(hints, hints).map(lambda two: (tuple[two[0][0], two[1][0]], st.tuples(two[0][1], two[1][1]))),
    )


@settings(
    max_examples=examples(60),
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
    component.__signature__ = inspect.Signature([parameter("x", hint, value)])  # type: ignore[attr-defined]
    registry.register("join", "component")(component)
    composed = OmegaConf.structured(schema.schema(registry.find("join", "component")))
    replayed = OmegaConf.create(OmegaConf.to_yaml(composed))
    assert "x" in composed
    assert alike(stagereg.instantiate(composed), value)
    assert alike(stagereg.instantiate(replayed), value)
