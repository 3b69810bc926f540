"""What the registry promises: names without imports, components checked early, no name changed silently."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagereg
import stagereg.base.providers as providers
import stagereg.plugin
from stagereg import registry
from stagereg.base.spec import HYDRA_KEYS, REQUIRED
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
    """It is no stager."""


pytestmark = pytest.mark.usefixtures("registry_as_before")


def _make() -> int:
    return 7


def test_register_returns_its_argument_and_build_makes_it() -> None:
    assert stagereg.register("stager", "mine")(Stager) is Stager
    assert "mine" in stagereg.names("stager")
    assert stagereg.build("stager", "mine", slots=5).slots == 5
    with pytest.raises(ConfigError, match=r"stager/mine takes no 'slot'\. Did you mean 'slots'\? It takes: slots"):
        stagereg.build("stager", "mine", slot=5)
    stagereg.register("join", "named")(lambda kind, name: (kind, name))
    assert stagereg.build("join", "named", kind="k", name="n") == ("k", "n")


def test_a_factory_is_held_to_what_it_promises_or_returns() -> None:
    def lacking() -> Hook: ...

    def fine() -> Stager: ...

    with pytest.raises(RegistryError, match="Hook cannot be the stager 'mine'"):
        stagereg.register("stager", "mine")(lacking)
    stagereg.register("stager", "mine")(fine)
    stagereg.register("stager", "other")(lambda: Hook())
    with pytest.raises(RegistryError, match="Hook cannot be the stager 'other'"):
        stagereg.build("stager", "other")


def test_the_error_for_a_taken_name_names_both_definitions() -> None:
    stagereg.register("stager", "mine")(Stager)
    with pytest.raises(RegistryError) as caught:
        stagereg.register("stager", "mine")(type("Other", (Stager,), {}))
    locations = [line for line in str(caught.value).splitlines() if f"{__file__}:" in line]
    assert len(set(locations)) == 2
    assert stagereg.build("stager", "mine").__class__ is Stager
    with pytest.raises(RegistryError, match=r"PinnedCachedStager"):
        stagereg.register("stager", "pinned_cached")(Stager)


CELL = """
@stagereg.register("stager", "mine")
class Mine(Stager):
    number = {}
"""


def test_a_cell_that_is_run_again_replaces_its_component(caplog: pytest.LogCaptureFixture) -> None:
    known = {"stagereg": stagereg, "Stager": Stager, "__name__": "some.module"}
    caplog.set_level("INFO", "stagereg.registry")
    for number in (1, 2):
        exec(compile("\n" * number + CELL.format(number), "cell", "exec"), known)
        assert registry.find("stager", "mine").load().number == number
    assert caplog.messages == ["stagereg: registered stager/mine again, at cell:4."]


def test_two_definitions_of_one_name_and_class_name_are_refused() -> None:
    known = {"stagereg": stagereg, "Stager": Stager, "__name__": "some.module"}
    with pytest.raises(
        RegistryError, match=r"(?s)are registered as the stager 'mine'.*:Mine at cell:2.*:Mine at cell:6"
    ):
        exec(compile(CELL.format(1) + CELL.format(2), "cell", "exec"), known)
    assert registry.find("stager", "mine").load().number == 1


def test_a_function_may_register_its_class_each_time_it_is_called() -> None:
    def make(number: int) -> None:
        @stagereg.register("stager", "mine")
        class Mine(Stager):
            which = number

    make(1)
    make(2)
    assert registry.find("stager", "mine").load().which == 2


@pytest.mark.parametrize("name", HYDRA_KEYS)
def test_a_parameter_that_no_config_can_set_is_refused(name: str) -> None:
    component = type("Mine", (Stager,), {"__init__": eval(f"lambda self, {name}=1: None")})
    with pytest.raises(RegistryError, match=rf"Mine cannot be the stager 'mine':\n  its parameter '{name}' cannot be"):
        stagereg.register("stager", "mine")(component)
    assert "mine" not in stagereg.names("stager")


def test_the_documentation_of_register_has_every_kind_of_plugin() -> None:
    kinds = [kind for kind, members in REQUIRED.items() if members]
    assert [kind for kind in kinds if f'``"{kind}"``' not in (stagereg.register.__doc__ or "")] == []
    assert len(kinds) == 7


def test_a_script_may_be_imported_as_a_module_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import stagereg\n@stagereg.register('join', 'mine')\ndef mine(): return 7\n"
        "if __name__ == '__main__':\n    import script\n    found = stagereg.registry.find_target('__main__.mine')\n"
        "    print(stagereg.build('join', 'mine'), found.load()())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7 7\n", "")


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"Unknown kind of component: 'stagger'.* Did you mean 'stager'\?\nAvailable: checkpoint, ",
    ):
        stagereg.names("stagger")
    nearest = r"No stager named 'pinned_cahced'\. Did you mean 'pinned_cached'\?\n.*blo"
    with pytest.raises(UnknownNameError, match=nearest):
        stagereg.build("stager", "pinned_cahced")
    with pytest.raises(UnknownNameError, match=r"No stager named 'pined'\. Did you mean 'pinned_cached'\?\n"):
        stagereg.build("stager", "pined")


def test_what_cannot_be_an_option_is_refused() -> None:
    for name in ("", "a.b", "a/b", "a=b", "a,b", "a@b", "1st", "a b", 3, None, "null", "True", "_self_"):
        with pytest.raises(RegistryError, match="invalid name for a "):
            stagereg.register("stager", name)

    class Reserved(stagereg.plugin.BlockingStager):
        def __init__(self, defaults: int = 1) -> None:
            super().__init__()

    with pytest.raises(RegistryError, match="its parameter 'defaults' cannot be an option"):
        stagereg.register("stager", "reserved")(Reserved)
    for thing in (3, None, object()):
        with pytest.raises(RegistryError, match="Register a class or a function"):
            stagereg.register("stager", "mine")(thing)
        with pytest.raises(UnknownNameError, match="Unknown kind"):
            stagereg.names(thing)


SELF_REGISTERED = """
import stagereg
@stagereg.register("join", "both")
def make():
    return 7
"""


def test_entries_are_all_components_and_import_none(package: Any) -> None:
    package("theirs", "raise RuntimeError('imported')", **{"join.theirs": "theirs:make"})
    stagereg.register("join", "mine")(_make)
    listed = {(entry.kind, entry.name): entry for entry in registry.entries()}
    built_in = {name for name, target in registry.REGISTRY.built_in.items() if not providers.missing(target)}
    assert built_in | {("join", "theirs"), ("join", "mine")} <= set(listed)
    assert list(listed) == sorted(listed)
    for kind in registry.kinds():
        assert [name for of, name in listed if of == kind] == stagereg.names(kind)
    assert listed["join", "mine"].file.startswith(f"{__file__}:")
    assert listed["join", "theirs"].file == ""
    theirs = registry.find("join", "theirs")
    assert (theirs.target, theirs.distribution, theirs.version) == ("theirs:make", "theirs", "1.2")


def test_a_component_is_found_where_announced_and_where_defined(package: Any) -> None:
    package("inner", SELF_REGISTERED)
    package("outer", "from inner import make", **{"join.both": "outer:make"})
    announced = registry.find("join", "both")
    component = announced.load()
    assert stagereg.names("join").count("both") == 1
    assert registry.find("join", "both") == announced
    assert registry.find("join", "both").file.endswith("inner.py:3")
    defined = registry.find_target("inner.make")
    assert (defined.name, defined.distribution, defined.target) == ("both", "outer", "inner:make")
    assert defined.load() is component
    assert [entry.target for entry in registry.entries() if entry.name == "both"] == ["outer:make"]


@pytest.mark.parametrize("imported", [False, True], ids=["defined first", "announced first"])
def test_a_component_that_a_module_only_exports_is_one_whatever_is_imported_first(package: Any, imported: bool) -> None:
    package("inner", SELF_REGISTERED)
    package("outer", "from inner import make", **{"join.both": "outer:make"})
    importlib.import_module("outer" if imported else "inner")
    assert stagereg.names("join").count("both") == 1
    assert stagereg.build("join", "both") == 7


def test_listing_imports_nothing_through_a_module_that_exports_lazily(package: Any) -> None:
    package("inner", SELF_REGISTERED)
    lazy = "def __getattr__(name):\n    if name == 'make':\n        import inner\n        return inner.make\n"
    lazy += "    raise AttributeError(name)"
    package("outer", lazy, **{"join.both": "outer:make"})
    importlib.import_module("outer")
    stagereg.register("join", "both")(type("make", (), {"__call__": print, "__module__": "own"}))
    assert "both" in stagereg.names("join")
    assert "inner" not in sys.modules
    with pytest.raises(RegistryError, match="Two components are registered as the join 'both'"):
        stagereg.build("join", "both")


@pytest.mark.parametrize("name", ["make", "other"])
@pytest.mark.parametrize("package_first", [False, True])
def test_another_component_of_the_same_name_is_refused_however_alike(
    package: Any, name: str, package_first: bool
) -> None:
    package("space_theirs", SELF_REGISTERED, **{"join.both": "space_theirs:make"})
    package("space_own", SELF_REGISTERED.replace("make", name).replace("7", "8"))
    for module in ("space_theirs", "space_own") if package_first else ("space_own",):
        importlib.import_module(module)
    with pytest.raises(RegistryError, match="Two components are registered as the join 'both'"):
        stagereg.build("join", "both")


@pytest.mark.parametrize(
    ("name", "rivals"),
    [("shared", ["hydra-other", "theirs"]), ("default", ["hydra-stagereg", "theirs"])],
)
def test_one_name_of_two_packages_is_two_qualified_names(package: Any, name: str, rivals: list[str]) -> None:
    source = SELF_REGISTERED.replace("both", name)
    package("theirs", source, **{f"join.{name}": "theirs:make"})
    if name == "shared":
        package("Hydra_other", source.replace("7", "8"), **{"join.shared": "Hydra_other:make"})
    choices = [f"{name}@{rival}" for rival in rivals]
    assert [each for each in stagereg.names("join") if name in each] == choices
    listed = re.escape(f"provide join/{name}. Write one of: {' or '.join(choices)}")
    with pytest.raises(RegistryError, match=f"^2 installed packages {listed}$"):
        stagereg.build("join", name)
    assert stagereg.build("join", f"{name}@theirs") == 7
    assert name != "shared" or stagereg.build("join", "shared@hydra.OTHER") == 8, "as pip compares names"
    assert [each for each in stagereg.names("join") if name in each] == choices
    assert registry.find_target("theirs.make") == registry.find("join", f"{name}@theirs")
    with pytest.raises(UnknownNameError, match=rf"No join named '{name}@thiers'\. Did you mean '{name}@theirs'\?"):
        registry.find("join", f"{name}@thiers")


def test_a_qualified_name_is_taken_where_nothing_is_ambiguous(package: Any) -> None:
    package("theirs", "def make(): return 1", **{"join.both": "theirs:make"})
    assert registry.find("join", "both@Theirs") == registry.find("join", "both")
    assert registry.find("stager", "blocking@hydra-stagereg") == registry.find("stager", "blocking")
    for name in ("both@other", "both@", "both@a@b", "default@theirs"):
        with pytest.raises(UnknownNameError):
            registry.find("join", name)
    stagereg.register("join", "both")(_make)  # a decorated component does not take an installed name silently
    with pytest.raises(RegistryError, match=r"theirs:make of theirs 1\.2\n  .*:_make at .*test_registry\.py:\d+\n"):
        registry.find("join", "both")
    assert stagereg.build("join", "both@theirs") == 1
    package("two", "", **{"join.again": "theirs:make"})
    package("three", "", **{"join.again": "theirs:make"})  # two packages with the same component are no conflict
    assert stagereg.build("join", "again") == stagereg.build("join", "again@two") == 1


@pytest.mark.parametrize(
    ("requires", "refused"),
    [
        ("hydra-stagereg>=9", "requires hydra-stagereg>=9, but {version} is installed. Install a matching version"),
        ("Hydra_StageReg[report] (<0.1,>=0.0.1)", "requires hydra-stagereg<0.1,>=0.0.1, but {version} is installed."),
        ("stagereg>=0.1", "requires 'stagereg>=0.1', which is an unrelated project; its author must require 'hydra-"),
        ("hydra-stagereg>=9; python_version < '3'", ""),
        ("hydra-stagereg>=9; extra == 'test'", ""),
        ("hydra-stagereg", ""),
        ("hydra-stagereg-contrib>=9", ""),
        ("hydra-stagereg>=nonsense", ""),
    ],
)
def test_a_package_for_another_version_is_not_imported(package: Any, requires: str, refused: str) -> None:
    package("newer", "def make(): return 7", requires, **{"join.newer": "newer:make"})
    if not refused:
        assert stagereg.build("join", "newer") == 7
        return
    with pytest.raises(RegistryError) as caught:
        stagereg.build("join", "newer")
    assert f"join/newer of newer 1.2 {refused.format(version=stagereg.__version__)}" in str(caught.value)
    assert "newer" not in sys.modules
    assert "newer" in stagereg.names("join")


RUDE = "import stagereg\n@stagereg.register('stager', 'rude')\nclass Cls: ...\n"


@pytest.mark.parametrize(
    ("source", "causes"),
    [
        ("import no_such_module", ["ModuleNotFoundError: No module named 'no_such_module' (LOCATION:1)"]),
        ("\n1 / 0", ["ZeroDivisionError: division by zero (LOCATION:2)"]),
        ("def f(:", ["SyntaxError: invalid syntax"]),
        ("import sys; sys.exit('bye')", ["SystemExit: bye (LOCATION:1)"]),
        ("class Stop(BaseException): ...\nraise Stop", ["Stop (LOCATION:2)"]),
        ("raise OSError('\\n'.join(map(str, range(99))))", ["\n26\n27\n...\n98 (LOCATION:1)"]),
        ("", ["AttributeError: module 'broken' has no attribute 'Cls'"]),
        ("class Cls: ...", ["broken.Cls cannot be the stager 'broken'"]),
        (RUDE, ["def close", "should_synchronize_after_execute", "broken.py:2)"]),
    ],
)
def test_a_component_that_does_not_load_is_named_with_its_cause(package: Any, source: str, causes: list[str]) -> None:
    file = package("broken", source, **{"stager.broken": "broken:Cls"})
    assert stagereg.build("stager", "blocking"), "it fails only when chosen"
    with pytest.raises(RegistryError) as caught:
        stagereg.build("stager", "broken")
    message = str(caught.value)
    assert message.startswith("stager 'broken' cannot be loaded from broken:Cls of broken 1.2.\n")
    for cause in causes:
        assert cause.replace("LOCATION", str(file)) in message
    assert "or choose another stager: blocking, " in message


def test_the_registrations_of_a_failed_import_are_undone(package: Any) -> None:
    package("broken", SELF_REGISTERED + "\n1 / 0", **{"join.both": "broken:make"})
    for _ in range(2):
        with pytest.raises(RegistryError, match="division by zero"):
            stagereg.build("join", "both")
        assert not [each for each in registry.REGISTRY.decorated if each.name == "both"]


@pytest.mark.parametrize("value", ["theirs", "theirs:", "theirs make", "", "theirs:make:again", "a/b:c"])
def test_an_entry_point_that_names_no_component_is_an_error(package: Any, value: str) -> None:
    points = {"join.theirs": value, "join.fine": "theirs : make [extra, more]"}
    package("theirs", "def make(): return 7", **points)
    assert {"theirs", "fine"} <= set(stagereg.names("join"))
    with pytest.raises(RegistryError, match=r"an invalid entry point: .*\n.*join\.theirs = \"package\.module:Name\""):
        stagereg.build("join", "theirs")
    assert stagereg.build("join", "fine") == 7, "spaces and extras are no part of the target"
    assert registry.find_target("theirs.make").name == "fine"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("entry_points.txt", b"[stagereg.plugins]\nno equals sign here\n", "cannot be read"),
        ("entry_points.txt", b"[stagereg.plugins]\njoin.x = \xff\xfe\n", "cannot be read: UnicodeDecodeError"),
        ("METADATA", b"", "its METADATA lacks the name or the version"),
        ("METADATA", b"Name: a\n", "its METADATA lacks the name or the version"),
        ("METADATA", b"Name: \xff\n", "cannot be read: UnicodeDecodeError"),
    ],
)
def test_broken_metadata_of_one_package_hides_no_other(package: Any, file: str, content: bytes, message: str) -> None:
    module = package("broken", "", **{"join.broken": "broken:make"})
    (module.with_name("broken-1.2.dist-info") / file).write_bytes(content)
    package("fine", "def make(): return 7", **{"join.fine": "fine:make"})
    assert stagereg.build("join", "fine") == 7
    assert "broken" not in stagereg.names("join")
    ((who, why),) = registry.unreadable()
    assert "broken" in who
    assert message in why
    with pytest.raises(UnknownNameError, match=r"stagereg skipped an entry point of .*broken.*: "):
        registry.find("stager", "far_from_all")


def test_announcements_of_no_use_are_left_out_and_reported(package: Any) -> None:
    package("odd", "", **{"stagger.x": "odd:One", "join.1st": "odd:Two", "bare": "odd:Three", "join.fine": "odd:Four"})
    assert "fine" in stagereg.names("join")
    assert "1st" not in stagereg.names("join")
    assert [registry.find_target(f"odd.{name}") for name in ("One", "Two", "Three")] == [None] * 3
    assert {who for who, _ in registry.unreadable()} == {"odd 1.2"}
    message = " ".join(why for _, why in registry.unreadable())
    assert "it announces 'stagger.x', but there is no kind 'stagger'. Did you mean 'stager'?" in message
    assert "it announces 'join.1st', but '1st' is not a valid name" in message


def test_an_unknown_name_also_gets_what_could_not_be_listed(package: Any) -> None:
    package("theirs", "", **{"stagerr.blockingly": "theirs:One", "1": "theirs:Two", "2": "theirs:Three"})
    package("zeta", "", **{"stagger.far": "zeta:One", "quite_other.far": "zeta:Two"})
    with pytest.raises(UnknownNameError, match=r"Did you mean 'blocking'\?") as near:
        registry.find("stager", "blockingly")
    with pytest.raises(UnknownNameError) as far:
        registry.find("stager", "far")
    first, second = (str(each.value).splitlines()[2] for each in (near, far))
    announces = "stagereg skipped an entry point of {} 1.2: it announces {}, but there is no kind {}."
    assert first == announces.format("theirs", "'stagerr.blockingly'", "'stagerr'") + " Did you mean 'stager'?"
    assert str(far.value).splitlines()[2:4] == [
        announces.format("zeta", "'quite_other.far'", "'quite_other'"),
        announces.format("zeta", "'stagger.far'", "'stagger'") + " Did you mean 'stager'?",
    ]
    assert second in str(far.value)
    assert len(str(far.value).splitlines()) == 5


def test_of_two_distributions_of_one_name_the_first_counts(
    package: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("theirs", "def make(): return 7", **{"join.old": "theirs:make"})
    first = tmp_path_factory.mktemp("first") / "theirs-2.0.dist-info"
    first.mkdir()
    (first / "METADATA").write_text("Metadata-Version: 2.1\nName: Theirs\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(first.parent)
    assert "old" not in stagereg.names("join")
    (first / "entry_points.txt").write_text("[stagereg.plugins]\njoin.new = theirs:make\n")
    registry.REGISTRY._path = None
    assert stagereg.names("join") == ["default", "new"]
    assert registry.find("join", "new").version == "2.0"


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_entry_points_file_whatsoever_breaks_the_registry(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        info = Path(folder, "odd-1.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[stagereg.plugins]\njoin.a = {text}", encoding="utf-8", errors="replace"
        )
        patch.syspath_prepend(folder)
        assert {("join", "default"), ("stager", "blocking")} <= {(e.kind, e.name) for e in registry.entries()}
        for entry in registry.entries():
            if entry.distribution == "odd":
                assert registry.find_target(entry.path) is not None
                assert registry.find(entry.kind, entry.name) == entry


@pytest.mark.parametrize(
    ("kind", "name"), [name for name, target in registry.REGISTRY.built_in.items() if not providers.missing(target)]
)
def test_every_built_in_loads_and_is_registered_under_its_name(kind: str, name: str) -> None:
    component = registry.find(kind, name).load()
    target = registry.REGISTRY.built_in[kind, name]
    assert [each.component for each in registry.REGISTRY.decorated if each.target == target] == [component]


def test_a_component_of_an_extension_that_is_not_installed_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry.REGISTRY.built_in, ("tier", "tape"), "stagereg.extensions.tapes.tape:Tape")
    registry.REGISTRY._path = None
    assert "tape" not in registry.names("tier")
    assert "none" in registry.names("tier")
    why = "needs stagereg/extensions/tapes, which is missing in this installation: reinstall stagereg"
    with pytest.raises(UnknownNameError, match=f"No tier named 'tape'. It {why}"):
        stagereg.build("tier", "tape")


def test_a_public_name_of_an_extension_that_is_not_installed_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(providers, "has", lambda _: False)
    with pytest.raises(
        ImportError, match=r"stagereg\.DcpWriter is not available\. It needs stagereg/extensions/interop"
    ):
        stagereg.DcpWriter  # noqa: B018
    with pytest.raises(AttributeError):
        stagereg.Nothing  # noqa: B018
    assert stagereg.Keep(newest=1)
