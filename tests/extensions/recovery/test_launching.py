"""What the launcher and the ranks take of the options of recovery."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from stagereg.errors import ConfigError, LaunchError
from stagereg.extensions.recovery.launching import RecoveryLauncher, _checked_timeout


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
