"""Members of a component: required ones have to be there, all have to fit, and a misspelt one is an error."""

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
from stagereg.base import spec
from stagereg.base.providers import has, missing
from stagereg.errors import RegistryError
from stagereg.registry import REGISTRY

from ..test_registry import Stager

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"


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
REQUIRED = [(kind, line) for kind in KINDS for line in spec.REQUIRED[kind]]
OPTIONAL = [(kind, line) for kind in KINDS for line in spec.OPTIONAL[kind]]


def member(line: str) -> str:
    return re.findall(r"(\w+)[(:]", line)[0]


def refused(kind: str, message: str, *bases: type, **members: Any) -> None:
    subject = type("Mine", bases or (KINDS[kind],), {"__module__": "theirs.hooks", **members})
    with pytest.raises(RegistryError, match=message):
        spec.check(kind, "mine", subject)


@pytest.mark.parametrize(("kind", "line"), REQUIRED)
def test_a_missing_member_is_refused_with_the_line_to_write(kind: str, line: str) -> None:
    members = {name: value for name, value in vars(KINDS[kind]).items() if name != member(line) and name[:2] != "__"}
    with pytest.raises(RegistryError, match=f"{member(line)!r} is missing(.|\n)*{re.escape(line)}"):
        stagereg.register(kind, "mine")(type("Lacking", (), members))
    assert "mine" not in stagereg.names(kind)


@pytest.mark.parametrize(("kind", "line"), REQUIRED + OPTIONAL)
def test_a_member_has_to_fit_and_be_spelt_right(kind: str, line: str) -> None:
    spec.check(kind, "mine", KINDS[kind])
    name = member(line)
    if line.startswith("def "):
        wrong = {name: lambda self, one, two, three, four: None}
        refused(kind, rf"method {name}.* has the wrong parameters(.|\n)*def {name}\(", **wrong)
    elif not line.startswith("@"):
        refused(kind, f"attribute '{name}' is a method", **{name: nothing})
    for slip in (name[:-1], f"{name}s") if (kind, line) in OPTIONAL else ():
        refused(kind, f"'{slip}' is not a member of a {kind}. Did you mean '{name}'", **{slip: nothing})


def test_a_method_may_take_more_and_an_attribute_be_a_property() -> None:
    for given in (lambda self, state_dict, *, extra=None: None, staticmethod(nothing)):
        spec.check("stager", "mine", type("Mine", (Stager,), {"stage": given}))
    attribute = "should_synchronize_after_execute"
    members = {name: value for name, value in vars(Stager).items() if name != attribute}
    spec.check("stager", "one", type("P", (), {**members, attribute: property(lambda self: 1 / 0)}))
    spec.check("stager", "two", type("A", (), {**members, "__annotations__": {attribute: bool}}))


def test_a_stager_that_only_inherits_stage_is_refused() -> None:
    with pytest.raises(RegistryError, match="method 'stage' is missing"):
        spec.check("stager", "empty", type("Empty", (stagereg.AsyncStager,), {"__module__": "some.module"}))


def test_a_misspelt_member_beside_an_inherited_one_is_refused() -> None:
    for slip, meant in {"main_hok": "main_hook", "pre_hook": "post_hook", "mainHook": "main_hook"}.items():
        expected = rf"join_hook 'mine':\n  '{slip}' is not a member of a join_hook. Did you mean '{meant}'"
        refused("join_hook", f"Mine cannot be the {expected}", stagereg.JoinHook, **{slip: nothing})
    # But private names, and neighbours of a member that is there, are not misspelt.
    for members in ({"_main_hok": nothing}, {"main_hok": nothing, "main_hook": nothing}):
        spec.check("join_hook", "mine", type("Mine", (stagereg.JoinHook,), {"__module__": "theirs.hooks", **members}))


def test_every_optional_member_is_declared_in_a_protocol() -> None:
    declared = {
        "stager": (stager.ReleasesCopies, stager.WatchesOptimizers),
        "join_hook": (stagereg.JoinHook,),
        "joinable": (stagereg.Joinable,),
        "storage": (storage.Storage,),
    }
    for kind, protocols in declared.items():
        names = {name for each in protocols for name in {**vars(each), **inspect.get_annotations(each)}}
        assert set(map(member, spec.OPTIONAL[kind])) <= names
        if kind != "joinable":  # which has more attributes, none of them for a plugin to misspell
            known = set(map(member, spec.OPTIONAL[kind] + spec.REQUIRED[kind]))
            assert {name for name in names if not name.startswith("_")} <= known


@pytest.mark.parametrize(
    ("kind", "base", "unused"), [("joinable", TorchJoinable, "attach"), ("join_hook", TorchJoinHook, "on_exhausted")]
)
def test_an_optional_member_that_is_never_used_is_refused(kind: str, base: type, unused: str) -> None:
    required = {name: value for name, value in vars(KINDS[kind]).items() if not name.startswith("_")}
    spec.check(kind, "mine", type("Mine", (base,), required))
    message = f"'{unused}' is only used on a subclass of stagereg.join.joinable.Join"
    refused(kind, message, base, **required, **{unused: nothing})


def test_no_component_has_a_name_that_looks_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is seen as a class of another package, whose author has inherited what this package defines."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    entries = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]["stagereg.plugins"]
    targets = [(kind, target) for (kind, _), target in REGISTRY.built_in.items() if not missing(target)]
    of_extensions = {"on_commit": "callbacks", "tier": "tiers"}  # whose modules import names of an extension
    kinds = [(point.partition(".")[0], target) for point, target in entries.items()]
    targets += [(kind, target) for kind, target in kinds if kind not in of_extensions or has(of_extensions[kind])]
    assert len(entries) == 8
    for kind, target in targets:
        component = pkgutil.resolve_name(target)
        if isinstance(component, type):
            public = {name: value for name, value in vars(component).items() if not name.startswith("_")}
            spec.check(kind, "theirs", type("Theirs", (component,), {"__module__": "theirs", **public}))
