"""The search space of a tuning search, its objective, and the study that keeps its trials."""

from __future__ import annotations

import itertools

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from stagereg import machine, registry
from stagereg.errors import ConfigError, StageregError
from stagereg.stagers.host import HostStager
from stagereg.sweep.candidates import space
from stagereg.sweep.objective import Objective
from stagereg.sweep.program import Composed
from stagereg.sweep.search_space import Choices, Floats, Ints, search_space, text
from stagereg.sweep.study import Study
from stagereg.sweep.tune_space import Parameter, Space


def composed(stager: str = "pinned_cached", every: object = 100) -> Composed:
    target = registry.find("stager", stager).path
    config = {"stager": {"_target_": target, "threads": 2, "max_in_flight": 2}, "checkpoint": {"every": every}, "lr": 1}
    return Composed(config, {"stager": stager, "storage": "dcp", "data": "even"})


def by_name(found: Space) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in found.parameters}


# -- the space


def test_by_default_a_search_varies_the_stagers_their_options_and_the_interval():
    found = by_name(space(composed(), [], []))
    assert found["stager"].values.texts()[0] == "pinned_cached"
    assert {"blocking", "overlapped", "shared", "incremental"} < {*found["stager"].values.texts()}
    assert found["checkpoint.every"].values.texts() == ("25", "50", "100")
    assert found["stager.max_in_flight"].values.texts() == ("1", "2", "3")
    threads = [int(value) for value in found["stager.threads"].values.texts()]
    assert 2 in threads
    assert max(threads) == max(2, machine.cores())
    assert found["stager.detect"].options == ("incremental",)
    assert not [name for name in found if name.split(".")[-1] in ("type_check", "verify", "wait_s", "reserve_gb")]


def test_a_stager_that_breaks_promises_is_tried_only_where_it_is_named():
    found = space(composed(), [], [])
    assert "torch_default" not in by_name(found)["stager"].values.texts()
    assert any(line.startswith("stager=torch_default: it breaks promises") for line in found.left_out)
    named = by_name(space(composed(), [], ["stager=torch_default,blocking"]))
    assert named["stager"].values.texts() == ("torch_default", "blocking")
    assert named["stager.use_shared_memory"].options == ("torch_default",)
    assert "torch_default" in by_name(space(composed("torch_default"), [], []))["stager"].values.texts()


def test_a_parameter_set_by_an_override_is_not_varied():
    found = by_name(space(composed(), ["stager=pinned_cached", "stager.threads=2", "checkpoint.every=100"], []))
    assert {*found} == {"stager.max_in_flight"}
    # A stager that does not take what is set for all cannot be run.
    left = space(composed(), ["stager.reserve_gb=1"], [])
    assert {*by_name(left)["stager"].values.texts()} == {"pinned_cached", "overlapped", "shared"}
    assert "stager=blocking: it takes no reserve_gb" in left.left_out


def test_longer_intervals_are_tried_only_where_their_cost_is_judged():
    weighed = by_name(space(composed(), [], [], interval=True))["checkpoint.every"]
    assert weighed.values.texts() == ("25", "50", "100", "200", "400")
    assert "checkpoint.every" not in by_name(space(composed(every="auto"), [], []))


def test_options_are_asked_for_only_where_the_chosen_stager_has_them():
    found = space(composed(), [], ["stager.reserve_gb=0,0.5"])
    for chosen in itertools.islice(found.combinations(), 2000):
        assert ("stager.detect" in chosen) == (chosen["stager"] == "incremental")
        assert ("stager.reserve_gb" in chosen) == (chosen["stager"] in ("pinned_cached", "overlapped", "shared"))
        assert found.choose(lambda p, chosen=chosen: chosen[p.key]) == chosen


def test_with_only_just_the_given_parameters_are_varied():
    assert {*by_name(space(composed(), [], ["lr=1,2"], only=True))} == {"lr"}
    assert {*by_name(space(composed(), [], ["storage=glob(d*)"], only=True))} == {"storage"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("stager.thread=1,2", "takes 'thread' ("),
        ("stager=blokcing,shared", "Did you mean 'blocking'?"),
        ("stager=glob(x*)", "matches no stager"),
        ("data=glob(*)", "write out the options of other groups"),
        ("~lr", "names no values"),
        ("lr", "cannot be read"),
        ("lr=interval(2,1)", "from a smaller number to a greater one"),
        ("lr=tag(log,interval(0,1))", "above 0"),
        ("lr=choice(1)", "fewer than two values"),
        ("nope=1,2", "+nope"),
    ],
)
def test_a_parameter_that_cannot_be_varied_is_reported_with_the_remedy(given, message):
    with pytest.raises(StageregError) as caught:
        space(composed(), [], [given])
    assert given in str(caught.value)
    assert message in str(caught.value)


def test_hydras_grammar_is_taken_as_hydra_means_it():
    assert search_space("x=a,b").values == Choices(("a", "b"))
    assert search_space("+x=1,true,null,'1',[1,2]").values == Choices(("1", "true", "null", "'1'", "[1,2]"))
    assert search_space("x=range(1,9,2)").values == Ints(1, 7, 2)
    assert search_space("x=range(0,1,0.25)").values == Choices(("0.0", "0.25", "0.5", "0.75"))
    assert search_space("x=interval(1,8)", default=4).values == Ints(1, 8)
    assert search_space("x=int(interval(1,8))").values == Ints(1, 8)
    assert search_space("x=tag(log,interval(0.1,1))", default=0.5).values == Floats(0.1, 1.0, log=True)


# Hydra's grammar has no way to write a key that reads as a number or another value.
KEYS = st.from_regex(r"[a-z]+", fullmatch=True).filter(lambda k: k not in ("nan", "inf", "null", "true", "false"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50)
@given(VALUES)
def test_a_value_is_written_so_that_hydra_reads_the_same(value):
    assert OverridesParser.create().parse_override(f"x={text(value)}").value() == value


def test_overrides_are_the_differences_from_the_program_and_all_options_of_another_component():
    found = space(composed(), [], [])
    assert found.overrides(found.defaults()) == ()
    same = found.defaults() | {"stager.threads": "1"}
    assert found.overrides(same) == ("stager.threads=1",)
    other = {"stager": "blocking", "stager.threads": "2", "stager.max_in_flight": "2", "checkpoint.every": "50"}
    # The program may set options for the stager it has: the defaults of another stager are unknown here.
    assert {*found.overrides(other)} == {f"{key}={value}" for key, value in other.items()}


def test_options_that_mean_different_things_are_different_parameters(registry_as_before):
    @registry.register("stager", "rough")
    class Rough(HostStager):
        def __init__(self, detect: bool = False, needed: bool = True) -> None: ...

    Rough.__qualname__ = "Rough"
    found = [p for p in space(composed(), [], ["stager=rough,incremental"]).parameters if p.key == "stager.detect"]
    assert {(p.options, p.values.texts()) for p in found} == {
        (("rough",), ("false", "true")),
        (("incremental",), ("declared", "content")),
    }
    assert len({p.name for p in found}) == 2


# -- the objective


def test_expected_lost_time_is_least_at_a_shorter_interval_where_failures_are_more_often():
    figures = {"checkpoints": 3.0, "lost_s": 0.3, "step_s": 0.01, "write_s": 0.05}

    def best(mtbf_s: float) -> int:
        objective = Objective.of(composed(), None, None, mtbf_s)
        return min(range(10, 3000, 10), key=lambda every: objective.value(figures, {"checkpoint.every": str(every)}))

    # Young: the square root of twice the cost, 0.1 s, times the time between failures; in steps of 0.01 s.
    assert best(10.0) == pytest.approx(100 * (2 * 0.1 * 10) ** 0.5, rel=0.15)
    assert best(1000.0) == pytest.approx(100 * (2 * 0.1 * 1000) ** 0.5, rel=0.05)


def test_the_error_for_an_objective_that_a_run_does_not_record_names_it():
    stall = Objective.of(composed(), None, None, None)
    with pytest.raises(ConfigError, match="it took no checkpoint"):
        stall.value({"loss": 1.0}, {})
    expected = Objective.of(composed(), None, None, 3600.0)
    with pytest.raises(ConfigError, match="cost of a checkpoint"):
        expected.value({"step_s": 1.0}, {})
    with pytest.raises(ConfigError, match="too few steps"):
        expected.value({"checkpoints": 1.0, "lost_s": 1.0}, {})
    with pytest.raises(ConfigError, match=r"checkpoint\.every, not None"):
        Objective.of(composed(every="${every}"), None, None, 3600.0).value({}, {})


def test_an_automatic_interval_is_judged_as_the_interval_of_a_long_run():
    figures = {"checkpoints": 3.0, "lost_s": 0.3, "step_s": 0.01, "write_s": 0.05}
    fixed, auto = (Objective.of(composed(every=every), None, None, 1000.0) for every in (100, "auto"))
    least = min(fixed.value(figures, {"checkpoint.every": str(every)}) for every in range(1000, 2000))
    assert (
        auto.value(figures, {}) == fixed.value(figures, {"checkpoint.every": "auto"}) == pytest.approx(least, rel=1e-6)
    )
    # A program that plans for rarer failures than there are saves too rarely.
    assert auto.value(figures, {"checkpoint.mtbf": "'100h'"}) > 1.2 * least
    assert auto.value(figures, {"checkpoint.mtbf": "nonsense"}) == auto.value(figures, {})


# -- the study

LR = Space((Parameter("lr", "lr", Choices(("1", "2", "3"))),), composed())


def search(study: Study, number: int) -> list[str]:
    tried = []
    for _ in range(number):
        asked = study.ask()
        if asked is None:
            break
        tried.append(asked.chosen.get("lr", "-"))
        value = float(asked.chosen.get("lr", 9))
        study.tell(asked.__class__(**{**vars(asked), "status": "completed", "value": value}))
    return tried


def test_every_combination_is_tried_once_beginning_with_the_defaults(tmp_path):
    study = Study(str(tmp_path / "study.db"), LR, {}, False, 0)
    tried = search(study, 9)
    assert tried[0] == "1"
    assert sorted(tried) == ["1", "2", "3"]
    best = study.best()
    assert best is not None
    assert best.chosen == {"lr": "1"}
    assert best.overrides == ()
    again = Study(str(tmp_path / "study.db"), LR, {}, False, 5)
    assert search(again, 1) == []
    assert len(again.tried()) == 3


def test_defaults_outside_of_the_space_are_tried_too(tmp_path):
    other = Space((Parameter("lr", "lr", Choices(("7", "8"))), Parameter("+x", "+x", Ints(1, 2))), composed())
    study = Study(str(tmp_path / "study.db"), other, {}, True, 0)
    first = study.ask()
    assert first is not None
    assert first.overrides == ()
    assert first.chosen == {"lr": "1"}
    study.tell(first)
    assert study.tried() == [], "what was interrupted is as good as not asked for"
    assert search(study, 9)[0] == "1"
    assert len(study.tried()) == 5


def test_a_search_with_the_same_seed_chooses_the_same(tmp_path):
    wide = Space((Parameter("lr", "lr", Floats(0.5, 9.0)),), composed())
    first, second = (search(Study(str(tmp_path / f"{name}.db"), wide, {}, False, 1), 3) for name in "ab")
    assert first == second
    # A search that is continued does not draw the same values again.
    assert not {*first[1:]} & {*search(Study(str(tmp_path / "a.db"), wide, {}, False, 1), 2)}
