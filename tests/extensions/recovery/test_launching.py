"""What the launcher and the ranks take of the options of recovery."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.distributed import HashStore

import stagereg.extensions.recovery.launching as launching
from stagereg.errors import ConfigError, LaunchError
from stagereg.extensions.recovery.launching import RecoveryLauncher, RecoveryRank, _checked_timeout
from stagereg.extensions.recovery.rank_failure import EmergencySave
from stagereg.launch.run_store import RunStore


@pytest.mark.parametrize(("given", "seconds"), [("10s", 10.0), (3, 3.0), ("1h", 3600.0), ("2.5", 2.5), ("1m30s", 90.0)])
def test_a_heartbeat_timeout_is_a_duration(given: Any, seconds: float) -> None:
    assert _checked_timeout(OmegaConf.create({"heartbeat_timeout": given})) == seconds
    assert _checked_timeout(OmegaConf.create({})) == 10.0


@pytest.mark.parametrize("given", ["0.5s", "2h", "soon", -1, True, None, [3]])
def test_another_heartbeat_timeout_is_refused_before_ranks_start(given: Any) -> None:
    with pytest.raises(LaunchError, match="is not a duration from 1s to 1h"):
        RecoveryLauncher().check(OmegaConf.create({"heartbeat_timeout": given}))


@pytest.mark.parametrize("restarts", [0, 1])
def test_restarts_need_a_launcher(restarts: int) -> None:
    assert RecoveryLauncher().check(OmegaConf.create({"restarts": restarts})) is (restarts > 0)


@pytest.mark.parametrize("restarts", [-1, 1.5, True])
def test_restarts_are_counted(restarts: Any) -> None:
    with pytest.raises(ConfigError, match=f"^restarts must be a whole number of at least 0, not {restarts}"):
        RecoveryLauncher().check(OmegaConf.create({"restarts": restarts}))


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_has_failed_waits_for_the_emergency_save_and_is_monitored_until_it_leaves(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    calls: list[str] = []
    monitor = SimpleNamespace(failed={}, close=lambda: calls.append("closed"))
    monkeypatch.setattr(launching, "FailureMonitor", lambda *_: monitor)
    monkeypatch.setattr(launching, "agreed_secret", lambda *_: "sesame")
    monkeypatch.setattr(EmergencySave, "await_saved", lambda _: calls.append("saved"))
    this: Any = SimpleNamespace(rank=0, world_size=2, store=RunStore(HashStore(), 0, 2))
    rank, error = RecoveryRank(), ValueError("of another rank")

    def run() -> None:
        with rank.around(this, OmegaConf.create({})):
            if fails:
                raise error

    if not fails:
        run()
        assert calls == ["closed"]
        return
    with pytest.raises(ValueError, match="of another rank"):
        run()
    rank.ending(error)
    assert calls == ["saved"]
    rank.leave()
    assert calls == ["saved", "closed"]
