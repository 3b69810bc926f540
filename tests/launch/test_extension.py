"""What extensions raise fails no run, and an option of an extension that is missing is refused."""

from __future__ import annotations

import logging

import pytest
from omegaconf import OmegaConf

import stagereg.launch.extension as extension
from stagereg.errors import LaunchError
from stagereg.launch.extension import RankExtension, answers, first


class Fails(RankExtension):
    def failed_ranks(self) -> list[int]:
        raise ValueError("no cheese")


class Knows(RankExtension):
    def failed_ranks(self) -> list[int]:
        return [3]


def test_what_an_extension_raises_is_logged_and_the_others_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert answers([Fails(), Knows()], lambda each: each.failed_ranks()) == [[3]]
        assert first([Fails(), Knows()], lambda each: each.failed_ranks()) == [3]
    assert [record.getMessage() for record in caplog.records] == ["stagereg: Fails failed: ValueError('no cheese')"] * 2


def test_an_option_without_its_extension_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "has", lambda name: False)
    extension.expect_installed(OmegaConf.create({"restarts": 0}))
    extension.expect_installed(OmegaConf.create({"restarts": "${oc.env:ABSENT,0}", "heartbeat_timeout": "10s"}))
    with pytest.raises(LaunchError, match="heartbeat_timeout=20s needs stagereg/extensions/recovery"):
        extension.expect_installed(OmegaConf.create({"heartbeat_timeout": "20s"}))
    extension.expect_installed(OmegaConf.create({}))
    for off in ("off", False, None):
        extension.expect_installed(OmegaConf.create({"numa": off}))
    with pytest.raises(LaunchError, match="numa=auto needs stagereg/extensions/numa"):
        extension.expect_installed(OmegaConf.create({"numa": "auto"}))
    with pytest.raises(
        LaunchError, match=r"restarts=3 needs stagereg/extensions/recovery, .* that directory"
    ) as refused:
        extension.expect_installed(OmegaConf.create({"restarts": 3}))
    assert "\n" not in str(refused.value)
