"""The values of a config on the ranks, and the code of a script that runs in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from stagereg.launch.agreed_values import resolved, take
from stagereg.launch.rank import _DIFFERS

from ..support.app import App
from ..support.programs import TORCHRUN, run

SCRIPT = """
import json, os, random
from omegaconf import OmegaConf
import stagereg

OmegaConf.register_new_resolver("drawn", lambda: random.SystemRandom().randrange(10**9))
OmegaConf.register_new_resolver("rank", lambda: int(os.environ.get("RANK", "0")))


def found(cfg, *keys):
    import torch.distributed as dist

    ranks, own = [None] * dist.get_world_size(), {key: cfg[key] for key in keys}
    own |= {key: OmegaConf.to_container(each, resolve=True) for key, each in own.items() if OmegaConf.is_config(each)}
    dist.all_gather_object(ranks, own)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(ranks), flush=True)


@stagereg.main(config_path="conf", config_name="app")
def train(cfg):
    found(cfg, "given", "id", "again", "rank", "local")


@stagereg.main(config_path="conf", config_name="app")
def evaluate(cfg):
    found(cfg, "lr")


if __name__ == "__main__":
    train()
    print("AFTER", os.environ.get("RANK"), flush=True)
    evaluate()
"""
VALUES: dict[str, Any] = {
    "version": "0.10",
    "commit": "12e5",
    "nothing": None,
    "flag": "true",
    "path": "ck/epoch=6",
    "title": 'it\'s "a", b: {c} \\',
    "numbers": {"one": "1", "more": [1, "2,3"]},
}
CONFIG = {**VALUES, "given": {}, "lr": 1, "nproc": 1, "id": "${drawn:}", "again": "${id}-${drawn:}", "rank": "${rank:}"}
LINE = [f"+given.{key}=${{{key}}}" for key in VALUES] + ["local=${oc.env:LOCAL_RANK}", "+unused=${oc.env:NOT_SET}"]


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path, {"conf/app.yaml": OmegaConf.to_yaml({**CONFIG, "local": "-"}), "app.py": SCRIPT})


def ranks_of(line: str) -> list[dict[str, Any]]:
    """The values on each rank, which a line of the script has; what resolvers give is the same on all."""
    ranks = json.loads(line.removeprefix("FOUND "))
    assert [each["given"] for each in ranks] == [VALUES] * len(ranks)
    assert [each["rank"] for each in ranks] == [int(each["local"]) for each in ranks] == [*range(len(ranks))]
    return ranks


def test_ranks_get_the_values_that_the_launcher_composed_and_end_with_their_function(app: App) -> None:
    done = app.fork(*LINE, "nproc=${oc.env:COUNT}", COUNT="2")
    found, *after = done.stdout.splitlines()
    first, second = ranks_of(found)
    assert (first["id"], first["again"]) == (second["id"], second["again"])
    assert after == ["AFTER None"]
    # The second call is refused: its ranks would begin with the first one.
    *warnings, refusal = done.stderr.splitlines()
    assert refusal.startswith(
        "stagereg: only the first call of a function of stagereg.main in a script can start ranks"
    )
    assert sorted(warnings) == [f"stagereg: {key} {_DIFFERS}" for key in ("again", "id")]
    assert done.returncode == 1


def test_one_process_gets_the_same_values_and_calls_both_functions(app: App) -> None:
    done = app.fork(*LINE, "+restarts=${oc.env:COUNT}", COUNT="0")
    first, after, second = done.stdout.splitlines()
    assert [each.keys() for each in ranks_of(first)] == [{"given", "id", "again", "rank", "local"}]
    assert (after, second, done.stderr) == ("AFTER None", 'FOUND [{"lr": 1}]', "")


@pytest.mark.slow
def test_ranks_of_torchrun_get_the_same_values_and_refuse_a_config_that_sweeps(app: App) -> None:
    done = run([*TORCHRUN, "app.py", *LINE], app.folder)
    assert done.returncode == 0, done.stderr
    first, second = ranks_of(done.stdout.splitlines()[0])
    assert (first["id"], first["again"]) == (second["id"], second["again"])
    assert [line for line in done.stdout.splitlines() if "lr" in line] == ['FOUND [{"lr": 1}, {"lr": 1}]']
    app.write("conf/sweeps.yaml", "defaults: [app, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {lr: '1,2'}}}\n")
    done = run([*TORCHRUN, "app.py", *LINE, "-cn", "sweeps"], app.folder)
    assert done.returncode == 1
    assert "rank 0: a sweep needs fresh ranks for each job" in done.stderr
    assert "FOUND" not in done.stdout


def test_only_what_resolvers_of_the_program_give_without_a_rank_is_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(99))
    OmegaConf.register_new_resolver("next", lambda: next(count))
    OmegaConf.register_new_resolver("give", {"pair": (1, 2), "list": [1, None], "text": "${x}"}.get)
    OmegaConf.register_new_resolver("variable", os.environ.__getitem__)
    OmegaConf.register_new_resolver("cached", lambda: next(count), use_cache=True)
    monkeypatch.setenv("RANK", "7")
    tree = {
        **{"plain": 1, "variable": "${oc.env:RANK}", "reference": "${draws.0}", "missing": "???"},
        **{"pair": "${give:pair}", "text": "${give:text}", "own": "rank ${variable:RANK}", "fails": "${not_there:}"},
        **{"draws": ["${next:}", "a ${next:}"], "list": "${give:list}", "cached": "${cached:}"},
    }
    config = OmegaConf.create(tree)
    before, found = config.cached, resolved(config)
    values = {".".join(map(str, path)): json.loads(text) for path, text in found}
    assert values == {"draws.0": 1, "draws.1": "a 2", "list": [1, None], "cached": before}
    OmegaConf.set_readonly(config, True)
    assert take(config, found) == ["draws.0", "draws.1"]
    assert [config.draws[0], config.draws[1], config.reference, config.own] == [1, "a 2", 1, "rank 7"]
    for name in ("next", "give", "variable", "cached"):
        OmegaConf.clear_resolver(name)
