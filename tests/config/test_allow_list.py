"""The allow list of ``stagereg.instantiate``: no config builds what is neither registered nor allowed, however written.

Each bypass that has been reported against Hydra's own checks is tried here, wherever a target can be written,
and the interpreter's audit events show that nothing was imported, compiled, opened or started meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import omegaconf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import stagereg
import stagereg.checkpoint.checkpointer  # a module in which an allowed class has a further name
from stagereg import registry
from stagereg.config.instantiate import targets
from stagereg.errors import ConfigError, RegistryError, TargetNotAllowedError, UnknownNameError

from ..support.audit import auditing

HERE = __name__
TRAP = "lock_trap.fire"  # not registered, and not imported yet
BOMB = "lock_trap.Bomb"
LAZY = "lock_lazy.build"
"""Registered, and not imported yet: a refused target keeps those beside it from being imported, too."""
KNOWN = f"{HERE}.known"

RESOLVERS = ("flip", "function", "node", "swap")
FORBIDDEN_EVENTS = {"import", "compile", "exec", "open", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}

# A node by its class; made this way because annotations that are text have to be compiled.
Node = dataclasses.make_dataclass("Node", [("_target_", str, TRAP)])


def known(inner: Any = None, other: Any = None, allow: Any = None, **more: Any) -> dict[str, Any]:
    return {"inner": inner, "other": other, "allow": allow, **more}


def takes_stager(stager: Any = None) -> None: ...


@pytest.fixture(autouse=True)
def _world(registry_as_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "lock_trap.py").write_text(
        "import builtins\nfired = []\n"
        "def fire(charge=1, *more, name=''): fired.append(charge); return charge, *more, name\n"
        "class Bomb:\n    def __init__(self, size, /, color='red'): self.size, self.color = size, color\n"
        "    @staticmethod\n    def small(): return 'small'\n"
        "number = 3\n"
    )
    (tmp_path / "lock_lazy.py").write_text("def build(*args, **kwargs): return 'built'\n")
    (tmp_path / "lock_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.REGISTRY.built_in, ("join", "lazy"), LAZY.replace(".", ":"))
    registry.register("join", "known")(known)
    registry.register("checkpoint", "staging")(takes_stager)
    registry.REGISTRY._path = None
    # What is read and imported once in a process is not the attack's doing.
    registry.entries()
    OmegaConf.to_container(OmegaConf.create({"a": "${oc.create:${b}}", "b": [1]}), resolve=True)
    yield
    for name in RESOLVERS:
        OmegaConf.clear_resolver(name)
    for module in ("lock_trap", "lock_lazy", "lock_exits"):
        sys.modules.pop(module, None)
    registry.REGISTRY._path = None


def withstands(attack: Callable[[], Any]) -> bool:
    """Whether an attack is refused in a short message, with nothing done in the meantime."""
    for module in ("lock_trap", "lock_lazy"):
        sys.modules.pop(module, None)
    with auditing(FORBIDDEN_EVENTS) as audited:
        try:
            attack()
        except TargetNotAllowedError as error:
            message = str(error)
        else:
            return False
    untouched = not audited and not {"lock_trap", "lock_lazy"} & sys.modules.keys()
    return (
        untouched
        and "nothing was imported or called" in message
        and len(message.splitlines()) <= 6
        and len(message) < 1000
    )


NAMES = {
    "a command, CVE-2026-68508": "os.system",
    "Hydra's instantiate, which checks less": "hydra.utils.instantiate",
    "an alias through a module's imports, GHSA-37p2-j732-x8pj": "logging.os.system",
    "an alias through a registered module": "stagereg.stagers.pinned_cached.torch.os.system",
    "another module's name of a registered component": f"{HERE}.stagereg.stagers.pinned_cached.PinnedCachedStager",
    "the registry's own table": "stagereg.registry.REGISTRY.built_in.update",
    "a module": HERE,
    "globals of a registered function": f"{KNOWN}.__globals__.get",
    "subclasses of everything": "stagereg.stagers.pinned_cached.PinnedCachedStager.__base__.__subclasses__",
    "a space after": f"{KNOWN} ",
    "a colon": ":".join(KNOWN.rsplit(".", 1)),
    "a letter of another alphabet": KNOWN.replace("o", "\u043e"),
    "letters that Python's parser would take for the same": KNOWN.replace("k", "\uff4b"),
    "nothing": "",
    "a very long name": "a." * 100_000,
    "no text: bytes": KNOWN.encode(),
    "no text: a mapping": {"name": KNOWN},
    "no text: null": None,
    "a function": os.system,
    "a class": subprocess.Popen,
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_name_that_is_not_exactly_a_registered_one_is_refused(name: Any) -> None:
    assert withstands(lambda: stagereg.instantiate({"_target_": name}))
    assert withstands(lambda: stagereg.instantiate({"_target_": LAZY, "inner": [{"_target_": name}]}))


BAD = {"_target_": TRAP}
CREATED = "${oc.create:{_target_: lock_trap.fire}}"
POSITIONS: dict[str, Callable[[], Any]] = {
    "at the top": lambda: stagereg.instantiate(BAD),
    "as a dataclass": lambda: stagereg.instantiate(Node()),
    "as a dataclass's class": lambda: stagereg.instantiate(Node),
    "in an ordered mapping": lambda: stagereg.instantiate({"a": collections.OrderedDict(BAD)}),
    "as a partial": lambda: stagereg.instantiate({"_target_": TRAP, "_partial_": True}),
    "under a key that it does not take": lambda: stagereg.instantiate({"_target_": LAZY, "???": BAD}),
    "below _partial_": lambda: stagereg.instantiate({"_target_": LAZY, "_partial_": True, "inner": BAD}),
    "below _recursive_: false": lambda: stagereg.instantiate({"_target_": LAZY, "_recursive_": False, "inner": BAD}),
    "by an interpolated node": lambda: stagereg.instantiate(
        OmegaConf.create({"bad": BAD, "a": {"_target_": LAZY, "inner": "${bad}"}}).a
    ),
    "by the parts of a name": lambda: stagereg.instantiate({"_target_": "${m}.${n}", "m": "lock_trap", "n": "fire"}),
    "by a resolver": lambda: stagereg.instantiate({"_target_": LAZY, "inner": CREATED}),
    "by Hydra's escape": lambda: stagereg.instantiate({"_target_": "${oc.decode:${oc.env:LOCK_TARGET}}"}),
    "with a list that allows it": lambda: stagereg.instantiate({**BAD, "allow": [TRAP]}),
    "with Hydra's key that allows it": lambda: stagereg.instantiate({**BAD, "_execution_whitelist_": TRAP}),
    "given as the target": lambda: stagereg.instantiate({"_target_": LAZY}, _target_=TRAP),
    "given instead of the target": lambda: stagereg.instantiate(BAD, _target_=LAZY),
    "given in a tuple": lambda: stagereg.instantiate({"_target_": LAZY}, inner=({"a": (BAD,)},)),
    "given below a node": lambda: stagereg.instantiate({"_target_": LAZY, "inner": {"a": {}}}, inner={"a": BAD}),
    "given resolved into a node": lambda: stagereg.instantiate({"_target_": LAZY, "inner": {}}, inner={"a": CREATED}),
    "given with the program's arguments": lambda: stagereg.instantiate({"_target_": LAZY, "_args_": [BAD]}, 1),
}


@pytest.mark.parametrize("attack", POSITIONS.values(), ids=POSITIONS.keys())
def test_a_target_is_refused_wherever_and_however_it_is_written(
    attack: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCK_TARGET", TRAP)
    monkeypatch.setenv("HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE", f"{TRAP}:os.system")  # Hydra 1.3 lets these through
    assert withstands(attack)


def leaf_among(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "inner", "_args_", "_convert_", "_partial_", "_x"])
    wrapped = st.builds(lambda key, child, more: {**more, key: child}, keys, children, st.dictionaries(keys, st.none()))
    component = st.builds(lambda node: {"_target_": LAZY, **node}, wrapped)
    beside = st.integers(0, 2)
    rows = st.builds(lambda child, before: [{"_target_": LAZY}] * before + [child], children, beside)
    return st.one_of(wrapped, component, rows, rows.map(tuple), children.map(lambda c: OmegaConf.create({"c": c})))


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.just(BAD), leaf_among, max_leaves=8))
def test_a_target_is_refused_at_any_depth(tree: Any) -> None:
    assert withstands(lambda: stagereg.instantiate(tree))
    assert withstands(lambda: stagereg.instantiate({"_target_": LAZY}, inner=tree))


@settings(max_examples=40, deadline=None)
@given(st.text(), st.integers(0, len(KNOWN)), st.integers(0, len(KNOWN)))
def test_any_change_to_a_registered_name_is_another_name(text: str, start: int, end: int) -> None:
    name = KNOWN[:start] + text + KNOWN[end:]
    if name != KNOWN and "${" not in name:
        assert withstands(lambda: stagereg.instantiate({"_target_": name.replace("???", "?")}))


class Liar(str):
    """Text whose comparison, hash and printed form are those of another text."""

    claims: str

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(self.claims)

    def __str__(self) -> str:
        return self.claims

    def __format__(self, spec: str) -> str:
        return self.claims


def test_a_str_subclass_is_read_by_its_characters_alone() -> None:
    false, true = Liar(TRAP), Liar(KNOWN)
    false.claims, true.claims = KNOWN, TRAP
    assert withstands(lambda: stagereg.instantiate({"_target_": false}))
    assert withstands(lambda: stagereg.instantiate({"_target_": LAZY}, inner={"_target_": false}))
    assert stagereg.instantiate({"_target_": true}) == known()


def test_a_function_under_a_registered_name_is_not_called() -> None:
    def fake(**kwargs: Any) -> str:
        return "fake"

    fake.__module__, fake.__qualname__ = KNOWN.rsplit(".", 1)
    assert stagereg.instantiate({"_target_": fake}) == known()


def resolver(name: str, *values: Any) -> list[Any]:
    """Register a resolver that gives another value each time, the last one forever; return what it has given."""
    given: list[Any] = []

    def answer() -> Any:
        given.append(values[min(len(given), len(values) - 1)])
        return given[-1]

    resolving(name, answer)
    return given


def resolving(name: str, answer: Callable[[], Any]) -> None:
    assert name in RESOLVERS
    # OmegaConf 2.4 has another name for it and warns of this one; before, the other one was something else.
    new = tuple(int(part) for part in omegaconf.__version__.split(".")[:2]) >= (2, 4)
    (OmegaConf.register_resolver if new else OmegaConf.register_new_resolver)(name, answer)


def test_a_target_is_read_once() -> None:
    given = resolver("flip", KNOWN, TRAP)
    assert stagereg.instantiate({"_target_": "${flip:}"}) == known()
    assert given == [KNOWN]
    OmegaConf.clear_resolver("flip")
    for there in ({}, {"inner": {"a": 1}}):  # where an argument is new, and where it is merged
        given = resolver("flip", KNOWN, TRAP)
        built = stagereg.instantiate({"_target_": KNOWN, **there}, inner={"_target_": "${flip:}"})
        assert (built["inner"], given) == (known(**there.get("inner", {})), [KNOWN])
        OmegaConf.clear_resolver("flip")
    given = resolver("swap", TRAP, KNOWN)
    assert withstands(lambda: stagereg.instantiate({"_target_": LAZY, "inner": {"_target_": "${swap:}"}}))
    assert given == [TRAP]


def test_the_value_of_a_resolver_is_checked() -> None:
    resolver("function", os.system)
    assert withstands(lambda: stagereg.instantiate({"_target_": "${function:}"}))
    for value in (BAD, OmegaConf.create({"deep": [BAD]})):
        resolver("node", value)
        assert withstands(lambda: stagereg.instantiate({"_target_": LAZY, "inner": "${node:}"}))
        OmegaConf.clear_resolver("node")


def test_nothing_that_changes_the_config_meanwhile_has_an_effect() -> None:
    cfg = OmegaConf.create({"a": {"_target_": KNOWN}, "b": "${swap:}", "c": {"_target_": f"{HERE}.spoil"}})
    cfg.d = {"_target_": KNOWN}

    def changing(key: str) -> str:
        cfg[key]._target_ = TRAP
        return key

    def spoil() -> str:
        return changing("d")

    spoil.__qualname__ = "spoil"
    resolving("swap", lambda: changing("a"))
    registry.register("join", "spoil")(spoil)
    assert stagereg.instantiate(cfg) == {"a": known(), "b": "a", "c": "d", "d": known()}


def test_the_return_value_of_a_component_is_not_built_again() -> None:
    def returns() -> dict[str, Any]:
        return dict(BAD)

    returns.__qualname__ = "returns"
    registry.register("join", "returns")(returns)
    assert stagereg.instantiate({"_target_": f"{HERE}.returns"}) == BAD


def test_nesting_without_end_is_an_error_of_the_config() -> None:
    tree: Any = BAD
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(ConfigError, match="nested too deeply"):
        stagereg.instantiate(tree)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        stagereg.instantiate({"a": "${b}", "b": "${a}"})


def test_only_the_target_allowed_in_code_is_built() -> None:
    tree = {"a": [{"_target_": TRAP, "charge": "8"}], "b": {"_target_": KNOWN, "inner": {"_target_": TRAP}}}
    built = stagereg.instantiate(tree, allow=(TRAP,))
    assert built["a"] == [("8", "")]
    assert built["b"]["inner"] == (1, "")
    for other in (BOMB, "lock_trap", "lock_trap.fire.__call__", "lock_trap.builtins.eval"):
        assert withstands(lambda other=other: stagereg.instantiate([BAD, {"_target_": other}], allow=(TRAP,)))
    assert withstands(lambda: stagereg.instantiate(BAD))
    make = stagereg.instantiate({"_target_": TRAP, "_partial_": True, "charge": 2}, allow=[TRAP])
    assert make(name="n") == (2, "n")
    bomb = stagereg.instantiate({"_target_": BOMB, "_args_": [3]}, allow={BOMB})
    assert (bomb.size, bomb.color) == (3, "red")
    assert stagereg.instantiate({"_target_": f"{BOMB}.small"}, allow=(f"{BOMB}.small",)) == "small"


def test_an_allowed_object_goes_by_each_path_that_is_imported() -> None:
    text = {"_args_": ['{"a": 1}']}
    for name in ("json.loads", loads := json.loads):
        assert stagereg.instantiate({"_target_": name, **text}, allow=(loads,)) == {"a": 1}
    for name in ("json.decoder.JSONDecoder", "json.JSONDecoder"):
        decoder = stagereg.instantiate({"_target_": name}, allow=(json.JSONDecoder,))
        assert decoder.decode("[1]") == [1]
    for name in (f"{HERE}.json.decoder.JSONDecoder", "json.JSONEncoder", "lock_trap.JSONDecoder", TRAP):
        assert withstands(lambda name=name: stagereg.instantiate({"_target_": name}, allow=(json.JSONDecoder,)))
    with pytest.raises(TargetNotAllowedError, match=r"Did you mean 'json\.decoder\.JSONDecoder'"):
        stagereg.instantiate({"_target_": "jsonn.JSONDecoder"}, allow=(json.JSONDecoder,))
    policy = {"_target_": "stagereg.checkpoint.checkpointer.Keep", "newst": 1}
    with pytest.raises(ConfigError, match=r"^keep/policy takes no 'newst'"):  # a registered component keeps its checks
        stagereg.instantiate(policy, allow=(stagereg.Keep,))
    with pytest.raises(TargetNotAllowedError):
        stagereg.instantiate({"_target_": "json.decoder.JSONDecoder"}, allow=("json.JSONDecoder",))
    assert stagereg.instantiate({"_target_": "math.sqrt", "_args_": [4]}, allow=(math.sqrt,)) == 2  # written in C


def test_an_argument_that_an_allowed_target_lacks_is_refused() -> None:
    for message, node in {
        r"^lock_trap\.fire takes no 'chrge'\. Did you mean 'charge'\? It takes: charge, name": {"chrge": 1},
        r"^charge needs a value: add charge=\.\.\. to the command line": {"charge": "???"},
        r"^lock_trap\.Bomb takes no 'size'": {"_target_": BOMB, "size": 1},
    }.items():
        with pytest.raises(ConfigError, match=message):
            stagereg.instantiate({"_target_": TRAP, **node}, allow=(TRAP, BOMB))
        assert not sys.modules["lock_trap"].fired


def test_an_allowed_component_keeps_its_kinds_checks() -> None:
    assert stagereg.instantiate({"_target_": KNOWN, "allow": 3}, allow=(KNOWN, known)) == known(allow=3)
    config = {"_target_": f"{HERE}.takes_stager", "stager": {"_target_": KNOWN}}
    with pytest.raises(ConfigError, match="stager takes a stager, not join/known"):
        stagereg.instantiate(config, allow=(KNOWN,))
    assert stagereg.instantiate({**config, "stager": {"_target_": TRAP}}, allow=(TRAP,)) is None


@pytest.mark.parametrize(
    "allow",
    [TRAP, 3, {TRAP: 1}, OmegaConf.create([TRAP]), ["lock_trap.*"], ["fire"], ["lock_trap:fire"], [None], known],
    ids=lambda allow: getattr(allow, "__name__", None) or repr(allow),
)
def test_an_allow_list_is_full_paths_and_objects_from_code(allow: Any) -> None:
    with pytest.raises(ConfigError, match=r"package\.module\.Name"), auditing(FORBIDDEN_EVENTS) as audited:
        stagereg.instantiate(BAD, allow=allow)
    assert not audited


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lock_nowhere.a.b", "ModuleNotFoundError: No module named 'lock_nowhere'"),
        ("lock_trap.fyre", "AttributeError: module 'lock_trap' has no attribute 'fyre'"),
        ("lock_exits.a", "SystemExit: 3"),
        ("lock_trap.number", "TypeError: it is 3, which cannot be called"),
    ],
)
def test_an_allowed_path_that_cannot_be_imported_is_an_error(path: str, message: str) -> None:
    with pytest.raises(RegistryError, match=rf"{re.escape(path)}(.|\n)*{message}"):
        stagereg.instantiate({"_target_": path}, allow=(path,))


def test_targets_are_the_paths_of_all_components_or_of_one_kind() -> None:
    stager = "stagereg.stagers.pinned_cached.PinnedCachedStager"
    assert {KNOWN, LAZY, stager} <= set(targets())
    assert targets() == sorted(set(targets()))
    assert stager in targets("stager")
    assert KNOWN not in targets("stager")
    assert all(registry.find_target(path) for path in targets())
    registry.register("join", "local")(lambda: None)
    assert not [path for path in targets() if "<locals>" in path or "<lambda>" in path]  # which no config can name
    with pytest.raises(UnknownNameError, match="Did you mean 'stager'"):
        targets("stagr")


def test_targets_and_a_refusal_need_no_torch() -> None:
    program = (
        "import sys, stagereg\n"
        "from stagereg.config import texts\n"
        "from stagereg.config.instantiate import targets\n"
        "assert texts.value_type(list) is None\n"
        "try: stagereg.instantiate({'a': {'_target_': targets('stager')[0]}, 'b': {'_target_': 'os.system'}})\n"
        "except stagereg.StageregError: print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
