"""Optional members of a component: checked when present, and a misspelt one is an error."""

from __future__ import annotations

import inspect
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchJoinHook

import stagereg
import stagereg.checkpoint.storage.protocol as storage
import stagereg.stagers.async_stager as stager
from stagereg import spec
from stagereg.errors import RegistryError
from stagereg.registry import REGISTRY

from .test_registry import Stager

ROOT = Path(__file__).parents[1]


def nothing(self: Any) -> None: ...


class Hook(stagereg.JoinHook):
    def main_hook(self) -> None: ...

    def post_hook(self, is_last_joiner: bool) -> None: ...


class Joinable(stagereg.Joinable):
    join_device = join_process_group = None

    def __init__(self) -> None: ...

    def join_hook(self, **kwargs: Any) -> Hook:
        return Hook()


KINDS = {"stager": Stager, "join_hook": Hook, "joinable": Joinable}
OPTIONAL = [(kind, line) for kind in KINDS for line in spec.OPTIONAL[kind]]
OPTIONAL_NAMES = [(kind, re.findall(r"(\w+)[(:]", line)[0]) for kind, line in OPTIONAL]


@pytest.mark.parametrize(
    ("kind", "member"), [(kind, line[4:].split("(")[0]) for kind, line in OPTIONAL if line.startswith("def ")]
)
def test_an_optional_method_has_to_fit_if_it_is_there(kind: str, member: str) -> None:
    spec.check(kind, "mine", KINDS[kind])
    wrong = type("Wrong", (KINDS[kind],), {member: lambda self, one, two, three, four: None})
    with pytest.raises(RegistryError, match=rf"method {member}.* does not fit(.|\n)*def {member}\("):
        spec.check(kind, "mine", wrong)


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        ("stager", "should_synchronize_after_execute"),
        *((kind, line.split(":")[0]) for kind, line in OPTIONAL if not line.startswith(("def", "@"))),
    ],
)
def test_an_attribute_that_is_written_as_a_method_is_refused(kind: str, member: str) -> None:
    with pytest.raises(RegistryError, match=f"attribute '{member}' is a method"):
        spec.check(kind, "mine", type("Wrong", (KINDS[kind],), {member: nothing}))


@pytest.mark.parametrize(
    ("slip", "meant"), [("main_hok", "main_hook"), ("pre_hook", "post_hook"), ("mainHook", "main_hook")]
)
def test_a_misspelt_member_beside_an_inherited_one_is_refused(slip: str, meant: str) -> None:
    hook = type("Mine", (stagereg.JoinHook,), {"__module__": "theirs.hooks", slip: nothing})
    expected = rf"Mine cannot be the join_hook 'mine':\n  '{slip}' is no member of a join_hook. Did you mean '{meant}'"
    with pytest.raises(RegistryError, match=expected):
        stagereg.register("join_hook", "mine")(hook)


@pytest.mark.parametrize(
    ("kind", "member", "slip"),
    [(kind, name, slip) for kind, name in OPTIONAL_NAMES for slip in (name[:-1], f"{name}s")],
)
def test_a_misspelt_optional_member_is_refused(kind: str, member: str, slip: str) -> None:
    with pytest.raises(RegistryError, match=f"'{slip}' is no member of a {kind}. Did you mean '{member}'"):
        spec.check(kind, "mine", type("Mine", (KINDS[kind],), {slip: nothing}))


def test_every_optional_member_is_declared_in_a_protocol() -> None:
    declared = {
        "stager": (stager.ReleasesCopies, stager.SharesMemory, stager.WatchesOptimizers),
        "join_hook": (stagereg.JoinHook,),
        "joinable": (stagereg.Joinable,),
        "storage": (storage.Storage,),
    }
    for kind, protocols in declared.items():
        names = {name for each in protocols for name in {**vars(each), **inspect.get_annotations(each)}}
        optional = {re.findall(r"(\w+)[(:]", line)[0] for line in spec.OPTIONAL[kind]}
        assert optional <= names
        if kind != "joinable":  # which has more attributes, none of them for a plugin to misspell
            required = {re.findall(r"(\w+)[(:]", line)[0] for line in spec.REQUIRED[kind]}
            assert {name for name in names if not name.startswith("_")} <= optional | required


@pytest.mark.parametrize("kind", ["joinable", "join_hook"])
def test_an_optional_member_that_is_never_used_is_refused(kind: str) -> None:
    base = {"joinable": TorchJoinable, "join_hook": TorchJoinHook}[kind]
    member = {"joinable": "attach", "join_hook": "on_exhausted"}[kind]
    required = {name: value for name, value in vars(KINDS[kind]).items() if not name.startswith("_")}
    spec.check(kind, "mine", type("Mine", (base,), required))
    with pytest.raises(RegistryError, match=f"'{member}' is only used of a subclass of stagereg.join.joinable.Join"):
        spec.check(kind, "mine", type("Mine", (base,), {**required, member: nothing}))


@pytest.mark.parametrize("members", [{"_main_hok": nothing}, {"main_hok": nothing, "main_hook": nothing}])
def test_private_names_and_neighbours_are_not_misspelt(members: dict[str, Any]) -> None:
    spec.check("join_hook", "mine", type("Mine", (stagereg.JoinHook,), {"__module__": "theirs.hooks", **members}))


def test_no_component_has_a_name_that_looks_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is seen as a class of another package, whose author has inherited what this package defines."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))
    entries = tomllib.loads((ROOT / "examples" / "plugin" / "pyproject.toml").read_text())["project"]["entry-points"]
    targets = [(kind, target) for (kind, _), target in REGISTRY.built_in.items()]
    targets += [(point.partition(".")[0], target) for point, target in entries["stagereg.plugins"].items()]
    assert len(targets) == len(REGISTRY.built_in) + 4
    for kind, target in targets:
        component = pkgutil.resolve_name(target)
        if isinstance(component, type):
            public = {name: value for name, value in vars(component).items() if not name.startswith("_")}
            spec.check(kind, "theirs", type("Theirs", (component,), {"__module__": "theirs", **public}))
