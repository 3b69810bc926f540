"""What the registry promises: names without imports, components checked early, no name changed silently."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stagereg
from stagereg import registry
from stagereg.errors import ConfigError, RegistryError, UnknownNameError


class Stager:
    should_synchronize_after_execute = True

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots

    def stage(self, state_dict: Any) -> Any:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class Hook:
    def main_hook(self) -> None: ...

    def post_hook(self, is_last_joiner: bool) -> None: ...


class Joinable:
    join_device = join_process_group = None

    def join_hook(self, **kwargs: Any) -> Hook:
        return Hook()


GOOD = {"stager": Stager, "join_hook": Hook, "joinable": Joinable}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(registry._decorated)
    yield
    registry._decorated.clear()
    registry._decorated.update(before)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a package made of one module; its entry points are given as ``"kind.name"`` to the object's name."""

    def install(name: str, source: str, **points: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = "".join(f"{point} = {name}:{target}\n" for point, target in points.items())
        (info / "entry_points.txt").write_text(f"[stagereg.plugins]\n{lines}")
        registry._installed.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    registry._installed.cache_clear()


@pytest.mark.parametrize("kind", GOOD)
def test_register_returns_its_argument_and_makes_it_buildable(kind: str) -> None:
    assert stagereg.register(kind, "mine")(GOOD[kind]) is GOOD[kind]
    assert "mine" in stagereg.names(kind)
    assert isinstance(stagereg.build(kind, "mine"), GOOD[kind])


def test_build_passes_its_arguments() -> None:
    stagereg.register("stager", "mine")(Stager)
    assert stagereg.build("stager", "mine", slots=5).slots == 5


def test_build_names_the_nearest_argument_for_one_it_does_not_take() -> None:
    stagereg.register("stager", "mine")(Stager)
    with pytest.raises(ConfigError, match=r"stager/mine takes no 'slot'\. Did you mean 'slots'\? It takes: slots"):
        stagereg.build("stager", "mine", slot=5)


def test_an_argument_of_a_component_may_be_called_kind_or_name() -> None:
    @stagereg.register("joinable", "mine")
    def make(kind: str, name: str) -> Any:
        joinable = Joinable()
        joinable.made_of = (kind, name)
        return joinable

    assert stagereg.build("joinable", "mine", kind="k", name="n").made_of == ("k", "n")


@pytest.mark.parametrize(
    ("kind", "missing", "shown"),
    [
        ("stager", "stage", "def stage(self, state_dict)"),
        ("stager", "synchronize_staging", "def synchronize_staging(self)"),
        ("stager", "close", "def close(self)"),
        ("stager", "should_synchronize_after_execute", "should_synchronize_after_execute: bool = True"),
        ("join_hook", "main_hook", "def main_hook(self)"),
        ("join_hook", "post_hook", "def post_hook(self, is_last_joiner: bool)"),
        ("joinable", "join_hook", "def join_hook(self, **kwargs)"),
        ("joinable", "join_device", "def join_device(self)"),
        ("joinable", "join_process_group", "def join_process_group(self)"),
    ],
)
def test_a_missing_member_is_refused_when_registering_and_the_line_to_write_is_shown(
    kind: str, missing: str, shown: str
) -> None:
    members = {name: value for name, value in vars(GOOD[kind]).items() if name != missing and name[:2] != "__"}
    with pytest.raises(RegistryError) as caught:
        stagereg.register(kind, "mine")(type("Lacking", (), members))
    assert f"{missing!r} is missing" in str(caught.value)
    assert shown in str(caught.value)
    assert "mine" not in stagereg.names(kind)


@pytest.mark.parametrize(
    ("kind", "member", "wrong"),
    [
        ("stager", "stage", lambda self: None),
        ("stager", "stage", lambda self, state_dict, more: None),
        ("stager", "close", lambda self, force: None),
        ("join_hook", "post_hook", lambda self: None),
        ("join_hook", "main_hook", staticmethod(lambda joinables: None)),
        ("joinable", "join_hook", lambda self: None),
        ("joinable", "join_hook", lambda self, divide: None),
    ],
)
def test_a_wrong_signature_is_refused_when_registering(kind: str, member: str, wrong: Any) -> None:
    with pytest.raises(RegistryError, match=f"method {member}.* does not fit"):
        stagereg.register(kind, "mine")(type("Wrong", (GOOD[kind],), {member: wrong}))


@pytest.mark.parametrize("fine", [lambda self, state_dict, *, extra=None: None, staticmethod(lambda state_dict: None)])
def test_any_signature_that_takes_the_call_is_accepted(fine: Any) -> None:
    stagereg.register("stager", "mine")(type("Fine", (Stager,), {"stage": fine}))


def test_an_attribute_may_be_a_property_or_an_annotation() -> None:
    members = {name: value for name, value in vars(Stager).items() if name != "should_synchronize_after_execute"}
    stagereg.register("stager", "one")(
        type("P", (), {**members, "should_synchronize_after_execute": property(lambda self: 1 / 0)})
    )
    annotated = {**members, "__annotations__": {"should_synchronize_after_execute": bool}}
    stagereg.register("stager", "two")(type("A", (), annotated))


def test_a_factory_is_held_to_the_class_it_promises() -> None:
    def lacking() -> Hook:
        return Hook()

    def fine() -> Stager:
        return Stager()

    with pytest.raises(RegistryError, match="Hook cannot be the stager 'mine'"):
        stagereg.register("stager", "mine")(lacking)
    stagereg.register("stager", "mine")(fine)


def test_what_an_unannotated_factory_builds_is_checked_when_built() -> None:
    stagereg.register("stager", "mine")(lambda: Hook())
    with pytest.raises(RegistryError, match="Hook cannot be the stager 'mine'"):
        stagereg.build("stager", "mine")


def test_a_taken_name_names_both_places() -> None:
    stagereg.register("stager", "mine")(Stager)
    with pytest.raises(RegistryError) as caught:
        stagereg.register("stager", "mine")(type("Other", (Stager,), {}))
    places = [line for line in str(caught.value).splitlines() if f"{__file__}:" in line]
    assert len(places) == 2
    assert places[0] != places[1]
    assert stagereg.build("stager", "mine").__class__ is Stager


def test_a_built_in_name_is_taken() -> None:
    with pytest.raises(RegistryError, match=r"PinnedCachedStager"):
        stagereg.register("stager", "pinned_cached")(Stager)


def test_the_same_definition_registers_again() -> None:
    first, again = (type("Reloaded", (Stager,), {"__module__": "some.module"}) for _ in range(2))
    stagereg.register("stager", "mine")(first)
    stagereg.register("stager", "mine")(again)
    assert registry.find("stager", "mine").load() is again


def test_a_script_may_be_imported_as_a_module_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import stagereg\n@stagereg.register('join', 'mine')\ndef mine(): return 7\n"
        "if __name__ == '__main__':\n    import script\n    print(stagereg.build('join', 'mine'))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_unknown_kinds_and_names_tell_the_nearest_and_the_list() -> None:
    with pytest.raises(
        UnknownNameError, match=r"No kind 'stagger'.* Did you mean 'stager'\?\nThere is: checkpoint, jo"
    ):
        stagereg.names("stagger")
    with pytest.raises(
        UnknownNameError, match=r"No stager named 'pinned_cahced'\. Did you mean 'pinned_cached'\?\n.*blo"
    ):
        stagereg.build("stager", "pinned_cahced")


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "a=b", "a,b", "a@b", "1st", "a b"])
def test_a_name_that_cannot_be_an_option_is_refused(name: str) -> None:
    with pytest.raises(RegistryError, match="is not a name"):
        stagereg.register("stager", name)


def test_installed_packages_are_listed_without_being_imported(package: Any) -> None:
    package("theirs", "raise RuntimeError('imported')", **{"stager.theirs": "Cls"})
    assert "theirs" in stagereg.names("stager")
    entry = registry.find("stager", "theirs")
    assert (entry.target, entry.distribution, entry.version) == ("theirs:Cls", "theirs", "1.2")


def test_what_this_version_does_not_know_is_left_out_of_the_listing(package: Any) -> None:
    package(
        "newer", "", **{"no_such_kind.x": "One", "stager.not/a/name": "Two", "bare": "Three", "stager.fine": "Four"}
    )
    assert "fine" in stagereg.names("stager")
    assert "not/a/name" not in stagereg.names("stager")
    assert [registry.find_target(f"newer.{name}") for name in ("One", "Two", "Three")] == [None] * 3


def test_a_broken_package_fails_only_when_chosen_and_is_named(package: Any) -> None:
    package("broken", "import no_such_module", **{"stager.broken": "Cls"})
    stagereg.register("stager", "mine")(Stager)
    assert stagereg.build("stager", "mine")
    with pytest.raises(RegistryError) as caught:
        stagereg.build("stager", "broken")
    for told in ("broken:Cls of broken 1.2", "No module named 'no_such_module'", "pinned_cached"):
        assert told in str(caught.value)


def test_an_installed_component_is_checked_when_loaded(package: Any) -> None:
    package("lacking", "class Cls: ...", **{"stager.lacking": "Cls"})
    with pytest.raises(RegistryError, match=r"lacking\.Cls cannot be the stager 'lacking'"):
        stagereg.build("stager", "lacking")


SELF_REGISTERED = """
import stagereg
@stagereg.register("join", "both")
def make():
    return 7
"""


def test_a_component_may_be_announced_and_decorated(package: Any) -> None:
    package("both", SELF_REGISTERED, **{"join.both": "make"})
    assert stagereg.build("join", "both") == 7
    assert stagereg.names("join").count("both") == 1
    assert registry.find("join", "both").distribution == "both"


def test_two_packages_with_one_name_are_refused_by_name_and_listed_once(package: Any) -> None:
    for name in ("one", "two"):
        package(name, "def make(): ...", **{"join.shared": "make"})
    assert stagereg.names("join").count("shared") == 1
    with pytest.raises(RegistryError, match=r"one:make of one 1\.2\n  two:make of two 1\.2"):
        registry.find("join", "shared")


@pytest.mark.parametrize(("kind", "name"), list(registry._BUILT_IN))
def test_every_built_in_loads_and_is_registered_under_its_name(kind: str, name: str) -> None:
    component = registry.find(kind, name).load()
    decorated = registry._decorated[kind, name]
    assert decorated.component is component
    assert decorated.target == registry._BUILT_IN[kind, name]


def test_importing_and_listing_imports_neither_torch_nor_hydra() -> None:
    code = "import sys, stagereg; [stagereg.names(k) for k in stagereg.registry.kinds()]; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.split()
    assert "stagereg.registry" in loaded
    assert not {"torch", "hydra", "omegaconf", "numpy"} & set(loaded)


def test_a_stager_that_only_inherits_the_protocols_stage_is_refused() -> None:
    empty = type("Empty", (stagereg.AsyncStager,), {"__module__": "some.module"})
    with pytest.raises(RegistryError, match="method 'stage' is missing"):
        stagereg.register("stager", "empty")(empty)


@pytest.mark.parametrize("thing", [3, None, object()])
def test_what_is_no_class_or_function_is_refused(thing: Any) -> None:
    with pytest.raises(RegistryError, match="register a class or a function"):
        stagereg.register("stager", "mine")(thing)
    with pytest.raises(RegistryError, match="is not a name"):
        stagereg.register("stager", thing)
    with pytest.raises(UnknownNameError, match="No kind"):
        stagereg.names(thing)
