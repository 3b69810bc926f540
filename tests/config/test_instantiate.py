"""``stagereg.instantiate`` builds registered components only, with the arguments that it has checked."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import hydra.errors
import hydra.utils
import pytest
from omegaconf import DictConfig, OmegaConf, ValidationError

import stagereg
import stagereg.config.schema as schema
from stagereg import registry
from stagereg.base.providers import missing
from stagereg.config.instantiate import check_values, targets
from stagereg.errors import ConfigError, LaunchError, RegistryError, TargetNotAllowedError


class Codec(enum.Enum):
    ZSTD = 1
    NONE = 2


@dataclasses.dataclass
class Net:
    port: int = 1


@dataclasses.dataclass
class Part:
    inner: Any = None
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Whole:
    part: Part = dataclasses.field(default_factory=Part)
    parts: list[Part] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Made:
    """What every component here builds: its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    should_synchronize_after_execute = True

    def stage(self, state_dict: Any) -> Any: ...

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class PartMade(Made):
    """What is a joinable and a hook at once."""

    join_device = join_process_group = None

    def join_hook(self, **kwargs: Any) -> Any: ...

    def main_hook(self) -> None: ...

    def post_hook(self, is_last_joiner: bool) -> None: ...


def stager(
    chunk_mb: int,
    pin: bool | None = None,
    mode: Literal["fast", "slow"] = "fast",
    codec: Codec = Codec.ZSTD,
    sizes: tuple[int, ...] = (1,),
    net: Net = Net(),  # noqa: B008
    label: str = "",
    group: Any = None,
) -> Made:
    return Made((), dict(locals()))


def saver(dir: str = "d", stager: Made | None = None, extra: dict[str, Any] | None = None, **more: Any) -> Made:
    return Made((), {"dir": dir, "stager": stager, "extra": extra, **more})


def holding(part: Part = Part(), whole: Whole = Whole(), late: Part | None = None) -> Made:  # noqa: B008
    return Made((), dict(locals()))


def joined(joinables: Sequence[Any], throw: bool = False) -> Made:
    return Made((joinables,), {"throw": throw})


def gathering(parts: Mapping[str, Callable[..., stagereg.Joinable]] | None = None, **runtime: Any) -> Made:
    return Made((), {"parts": parts, **runtime})


def part(module: Any, size: int = 1, hook: Callable[..., stagereg.JoinHook] | None = None) -> PartMade:
    return PartMade((module,), {"size": size, "hook": hook})


def part_hook(joinable: Any, scale: float = 1.0) -> PartMade:
    return PartMade((joinable,), {"scale": scale})


def refusing(why: str = "full") -> Any:
    raise LaunchError(why)


def wrong() -> Any:
    return object()


def wrong_part() -> Any:
    return object()


def evil(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("it was called")


HERE = stager.__module__
EVIL = {"_target_": f"{HERE}.evil"}
REGISTERED = {
    ("stager", "made"): stager,
    ("checkpoint", "saver"): saver,
    ("checkpoint", "holding"): holding,
    ("join", "joined"): joined,
    ("join", "refusing"): refusing,
    ("join", "gathering"): gathering,
    ("joinable", "part"): part,
    ("join_hook", "part"): part_hook,
    ("joinable", "wrong"): wrong_part,
    ("stager", "wrong"): wrong,
}


@pytest.fixture(autouse=True)
def _registered(registry_as_before: None) -> None:
    for (kind, name), component in REGISTERED.items():
        registry.register(kind, name)(component)


def node(kind: str, name: str, **values: Any) -> Any:
    """A composed config of one component, as Hydra makes it."""
    return OmegaConf.merge(OmegaConf.structured(schema.schema(registry.find(kind, name))), values)


def made(**values: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.stager", "chunk_mb": 4, **values}


@pytest.fixture
def root() -> DictConfig:
    """A composed config as an app has it: the checkpoint refers to the stager."""
    cfg = OmegaConf.create()
    cfg.stager = node("stager", "made", chunk_mb=4)
    cfg.checkpoint = node("checkpoint", "saver")
    cfg.checkpoint.stager = "${stager}"
    cfg.join = node("join", "joined")
    OmegaConf.set_struct(cfg, True)
    return cfg


def hydras_allow_list(kind: str | None = None) -> dict[str, Any]:
    """The argument that Hydra from 1.4 on needs; earlier ones would pass it on to the component."""
    installed = tuple(int(part) for part in importlib.metadata.version("hydra-core").split(".")[:2])
    return {"_execution_whitelist_": targets(kind)} if installed >= (1, 4) else {}


def test_a_component_is_built_with_its_config_as_hydra_builds_it(root: DictConfig) -> None:
    defaults = {"pin": None, "mode": "fast", "codec": Codec.ZSTD, "label": "", "group": None}
    made_here = stagereg.instantiate(root.stager).kwargs
    assert made_here == {**defaults, "chunk_mb": 4, "sizes": (1,), "net": Net()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hydra = hydra.utils.instantiate(root.stager, **hydras_allow_list("stager")).kwargs
        saved = hydra.utils.instantiate(root.checkpoint, **hydras_allow_list()).kwargs
    assert {**by_hydra, "sizes": tuple(by_hydra["sizes"]), "net": Net(**by_hydra["net"])} == made_here
    assert saved["stager"].kwargs["chunk_mb"] == 4


def test_hydra_builds_every_built_in_stager() -> None:
    built_in = registry.REGISTRY.built_in.items()
    for name in [name for (kind, name), target in built_in if kind == "stager" and not missing(target)]:
        config = node("stager", name)
        both = hydra.utils.instantiate(config, **hydras_allow_list("stager")), stagereg.instantiate(config)
        assert type(both[0]) is type(both[1])
        for each in both:
            each.close()


def test_the_examples_of_security_md_run() -> None:
    from torch.nn import Linear

    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    ours, hydras = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    optimizer = {"_target_": "torch.optim.AdamW", "lr": 0.5}
    cfg = OmegaConf.create({"stager": node("stager", "blocking"), "optimizer": optimizer})
    names: dict[str, Any] = {"stagereg": stagereg, "hydra": hydra, "cfg": cfg, "params": Linear(2, 2).parameters()}
    exec(ours, names)
    assert names["optimizer"].defaults["lr"] == 0.5
    built = names.pop("stager")
    if hydras_allow_list():
        exec(hydras, names)
        assert type(names["stager"]) is type(built)


def test_a_nested_component_is_built_and_the_config_is_left(root: DictConfig) -> None:
    before = OmegaConf.to_yaml(root)
    assert stagereg.instantiate(root.checkpoint, dir="e").kwargs["stager"] == stagereg.instantiate(root.stager)
    assert OmegaConf.to_yaml(root) == before
    assert OmegaConf.is_interpolation(root.checkpoint, "stager")
    root.stager.chunk_mb = "???"
    for config in (root.stager, root.checkpoint):
        with pytest.raises(ConfigError, match=r"^stager\.chunk_mb needs a value: add stager\.chunk_mb=\.\.\. to"):
            stagereg.instantiate(config)


def test_objects_of_the_program_arrive_and_replace_the_configs(root: DictConfig) -> None:
    joinables, group = [object(), {"a": object()}], {"weight": object()}
    assert stagereg.instantiate(root.join, joinables).args[0] is joinables
    assert stagereg.instantiate(root.join, joinables=joinables).args[0] is joinables
    assert stagereg.instantiate(root.stager, group=group).kwargs["group"] is group
    for object_ in (Made((), {}), OmegaConf.create({"lr": 1})):
        assert stagereg.instantiate(root.checkpoint, data=object_).kwargs["data"] is object_
    assert stagereg.instantiate(root.stager, 9) == stagereg.instantiate(root.stager, chunk_mb="9")
    assert stagereg.instantiate(root.checkpoint, stager={"chunk_mb": 9}).kwargs["stager"].kwargs["chunk_mb"] == 9
    ready = Made((), {})
    assert stagereg.instantiate(root.checkpoint, stager=ready).kwargs["stager"] is ready


def test_lists_and_mappings_of_nodes_are_built(root: DictConfig) -> None:
    built = stagereg.instantiate({"a": [root.stager, 1], "b": {"c": made()}})
    assert built == {"a": [stagereg.instantiate(root.stager), 1], "b": {"c": stagereg.instantiate(made())}}
    assert stagereg.instantiate(None) is None


NODES_IN_DATACLASSES = {
    "plain": ({"part": {"inner": made()}}, lambda new: {"part": Part(new)}),
    "frozen": ({"whole": {"part": {"inner": [made()]}}}, lambda new: {"whole": Whole(Part([new]))}),
    "in a list": ({"whole": {"parts": [{"inner": made()}]}}, lambda new: {"whole": Whole(parts=[Part(new)])}),
    "optional": ({"late": {"inner": {"a": made()}, "size": "2"}}, lambda new: {"late": Part({"a": new}, 2)}),
}


@pytest.mark.parametrize("case", NODES_IN_DATACLASSES)
def test_a_node_in_a_dataclass_is_checked_and_built(case: str) -> None:
    given, expected = NODES_IN_DATACLASSES[case]
    defaults = {"part": Part(), "whole": Whole(), "late": None}
    target = {"_target_": f"{HERE}.holding"}
    built = stagereg.instantiate({**target, **given})
    assert built.kwargs == {**defaults, **expected(stagereg.instantiate(made()))}
    again = stagereg.instantiate({**target, **given, "_partial_": True})
    assert again() == again() == built
    mine = Part(made())
    assert stagereg.instantiate(target, late=mine).kwargs["late"] is mine
    bad = OmegaConf.create(str(given).replace("'", '"').replace(".stager", ".evil"))
    with pytest.raises(TargetNotAllowedError):
        stagereg.instantiate({**target, **bad})


def test_args_of_a_config_are_options_too() -> None:
    built = stagereg.instantiate({"_target_": f"{HERE}.stager", "_args_": ["8", None, "slow"], "sizes": [2]})
    assert built == stagereg.instantiate(made(chunk_mb=8, mode="slow", sizes=[2]))
    for args, message in {
        ("many",): r"^chunk_mb: 'many'",
        (1, None, "fsat"): r"^mode is 'fsat'\. Did you mean 'fast'",
        ("???",): r"chunk_mb needs a value",
        (1,) * 9: r"_args_ of stager/made: too many positional arguments",
    }.items():
        with pytest.raises(ConfigError, match=message):
            stagereg.instantiate({"_target_": f"{HERE}.stager", "_args_": list(args)})
    for args in ("ab", {"a": 1}, 3, False):
        with pytest.raises(ConfigError, match=r"^stager\._args_ must be a list, not "):
            stagereg.instantiate(OmegaConf.create({"stager": {"_target_": f"{HERE}.stager", "_args_": args}}).stager)
    with pytest.raises(ConfigError, match="_args_ of stager/made: multiple values for argument 'chunk_mb'"):
        stagereg.instantiate(made(_args_=[1]))
    assert stagereg.instantiate({"_target_": f"{HERE}.stager", "_args_": ["many"]}, 3).kwargs["chunk_mb"] == 3
    built = stagereg.instantiate({"_target_": f"{HERE}.saver", "_args_": ["e", made()]})
    assert built.kwargs == {"dir": "e", "stager": stagereg.instantiate(made()), "extra": None}


def test_hydras_own_keys_are_no_arguments() -> None:
    keys = {"_convert_": "all", "_recursive_": True, "_partial_": False, "_isolate_": True}
    assert stagereg.instantiate(made(**keys)) == stagereg.instantiate(made())
    make = stagereg.instantiate({"_target_": f"{HERE}.stager", "_partial_": True, "pin": True, "chunk_mb": "???"})
    assert isinstance(make, functools.partial)
    assert make(5).kwargs["chunk_mb"] == 5
    with pytest.raises(ConfigError, match=r"^_recursive_ is False, .* Annotate the parameter as Callable\[\.\.\., X\]"):
        stagereg.instantiate({"_target_": f"{HERE}.saver", "_recursive_": False, "stager": made()})


def gathered(**parts: Any) -> Any:
    """The config of a component that takes factories of joinables by name."""
    return OmegaConf.create({"join": {"_target_": f"{HERE}.gathering", "parts": parts}}).join


def test_a_parameter_for_factories_gets_callables_that_build() -> None:
    hook = {"_target_": f"{HERE}.part_hook", "scale": "2"}
    built = stagereg.instantiate(gathered(model={"_target_": f"{HERE}.part", "size": "3", "hook": hook}), model="m")
    assert built.kwargs["model"] == "m"
    given = {"model": part}
    assert stagereg.instantiate({"_target_": f"{HERE}.gathering"}, parts=given).kwargs["parts"] == given
    made_part = built.kwargs["parts"]["model"]("m")
    assert (made_part.args, made_part.kwargs["size"]) == (("m",), 3)
    assert made_part.kwargs["hook"](made_part) == PartMade((made_part,), {"scale": 2.0})


def test_an_option_for_factories_takes_any_name() -> None:
    composed = OmegaConf.create({"join": node("join", "gathering")}, flags={"struct": True})
    assert schema.runtime(registry.find("join", "gathering").load()) == []
    composed = OmegaConf.merge(composed, {"join": {"parts": {"model": node("joinable", "part")}}})
    assert stagereg.instantiate(composed.join).kwargs["parts"]["model"]("m").kwargs == {"size": 1, "hook": None}
    with pytest.raises(ValidationError):
        composed.join.parts.model.size = "many"


NEEDED = r"but must be the config of a joinable .*~joinable@join\.parts\.model.\."
PART = f"{HERE}.part"
NO_FACTORIES: list[tuple[Any, str]] = [
    (None, rf"^join\.parts\.model is null, {NEEDED}"),
    (3, rf"^join\.parts\.model is 3, {NEEDED}"),
    ({"a": 1}, rf"^join\.parts\.model is \{{'a': 1\}}, {NEEDED}"),
    (made(), r"^join\.parts\.model takes a joinable, not stager/made\."),
    ({"_target_": PART, "sise": 1}, r"^joinable/part takes no 'sise'\. Did you mean 'size'\?"),
    ({"_target_": PART, "size": "x"}, r"^join\.parts\.model\.size: 'x' is not"),
    ({"_target_": PART, "size": "???"}, r"^join\.parts\.model\.size needs a value: add join\.parts"),
    ({"_target_": PART, "hook": made()}, r"^join\.parts\.model\.hook takes a join_hook, not stager/"),
    ({"_target_": PART, "hook": EVIL}, r"^join\.parts\.model\.hook names the _target_"),
]


@pytest.mark.parametrize("text", [r"\${oc.env:HOME}", r"a \\\${b} ${label2}", r"\${oc.create:{_target_:x}}"])
def test_strings_are_resolved_once_and_no_more(text: str) -> None:
    cfg = OmegaConf.create({"text": text, "label2": "L"})
    built = stagereg.instantiate({"_target_": f"{HERE}.saver", "dir": text, "extra": {"x": [text]}, "label2": "L"})
    assert (built.kwargs["dir"], built.kwargs["extra"]) == (cfg.text, {"x": [cfg.text]})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *((gathered(model=each), message) for each, message in NO_FACTORIES),
        (made(pim=True), r"takes no 'pim'\. Did you mean 'pin'\? It takes: chunk_mb, pin"),
        (made(chunk_mb="???"), r"chunk_mb needs a value: add chunk_mb=\.\.\."),
        (made(_partial_="yes"), r"_partial_ must be true or false, not 'yes'"),
        (made(pin="${nowhere}"), r"cannot be resolved: Interpolation key 'nowhere' not found"),
        (OmegaConf.create({"a": {"b": ["???"]}}), r"^a\.b\[0\] needs a value: add a\.b\[0\]=\.\.\."),
        (OmegaConf.create({"a": made(group={"b": "???"})}), r"^a\.group\.b needs a value"),
        (DictConfig("???"), "^The config needs a value"),
        ({"_target_": f"{HERE}.joined"}, r"join/joined needs joinables from the program: .*\(.*, joinables="),
        ({"_target_": f"{HERE}.saver", "stager": {"_target_": f"{HERE}.joined"}}, "^stager takes a stager, not join/"),
        ({"a": {"_target_": f"{HERE}.refusing"}, "b": made(pin="maybe")}, r"^b\.pin"),  # before anything is built
        (len, "not a config: pass a node such as"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stagereg.instantiate(config)
    with pytest.raises(ConfigError, match="has no _target_"):
        stagereg.instantiate({"a": 1}, 2)


def test_an_error_of_a_component_comes_out_as_it_is() -> None:
    refusal = {"_target_": f"{HERE}.refusing"}
    for config in (refusal, {"a": [refusal]}, {"_target_": f"{HERE}.saver", "more": refusal}):
        with pytest.raises(LaunchError, match=r"^full$"):
            stagereg.instantiate(config)


def test_values_that_are_known_are_checked_before_anything_is_built() -> None:
    unknown = {"every": "${steps}", "keep": "???", "resume": None, "stager": {"_target_": "no.such"}}
    checkpoint = {"_target_": "stagereg.assembly.Checkpointer", "failure": {"mtbf": "2h"}, **unknown}
    others = {"steps": 0, 3: 4, "theirs": {"_target_": "no.such", "every": 0}, "bare": {"every": 0}}
    check_values(OmegaConf.create({"checkpoint": checkpoint, **others}))
    wrong = {
        "every": 0,
        "resume": "atuo",
        "keep.best": 1,
        "restore.verify": "ful",
        "restore.allow_missing": "optimizer",
    }
    ended = {
        "failure.mtbf": "never",
        "failure.on_error": "ignore",
        "preemption.grace_period": "0s",
        "save_last": "maybe",
    }
    for name, value in {**wrong, **ended, "replicas.verify_every": -1, "replicas.share": "first"}.items():
        config = OmegaConf.create({"checkpoint": checkpoint})
        OmegaConf.update(config, f"checkpoint.{name}", value)
        with pytest.raises(ConfigError, match=rf"^checkpoint\.{name}"):
            check_values(config)


def test_another_error_of_a_component_is_named_with_its_place_in_the_config_and_its_line() -> None:
    broken = {"_target_": f"{evil.__module__}.evil"}
    line = evil.__code__.co_firstlineno + 1
    for key, config in {"[0]": [broken], "more": {"_target_": f"{HERE}.saver", "more": broken}}.items():
        text = rf"^{re.escape(key)}: .*\.evil was not built: AssertionError: it was called \({__file__}:{line}\)\. "
        with pytest.raises(RegistryError, match=text) as raised:
            stagereg.instantiate(config, allow=[evil])
        assert isinstance(raised.value.__cause__, AssertionError)
    make = stagereg.instantiate({**broken, "_partial_": True}, allow=[evil])
    with pytest.raises(RegistryError, match=r"it was called .*set HYDRA_FULL_ERROR=1 for the whole traceback\.$"):
        pickle.loads(pickle.dumps(make))()


def test_the_object_of_a_factory_is_checked_at_every_depth() -> None:
    inner = {"_target_": f"{HERE}.wrong"}
    for config in (inner, {"_target_": f"{HERE}.saver", "stager": inner}):
        with pytest.raises(RegistryError, match="object cannot be the stager 'wrong'"):
            stagereg.instantiate(config)
    make = stagereg.instantiate(gathered(model={"_target_": f"{HERE}.wrong_part"})).kwargs["parts"]["model"]
    with pytest.raises(RegistryError, match="object cannot be the joinable 'wrong'"):
        make()
