"""Passing errors are retried as long as there is time, with one warning; other errors are raised at once."""

from __future__ import annotations

import errno
import math
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

import stagereg.extensions.buckets.retry as retry
from stagereg.base.deadline import until, within
from stagereg.errors import CheckpointError
from stagereg.extensions.buckets.retry import retrying

boto = pytest.importorskip("botocore.exceptions")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_S", 0.0)


class Trials:
    """Fails with the errors it is given, then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def answered(status: int, code: str = "Some") -> OSError:
    """An error as s3fs translates it: an ``OSError`` whose cause has the store's answer."""
    error = OSError(errno.EIO, "the store's message")
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error.__cause__ = boto.ClientError(response, "PutObject")
    return error


def with_status(status: int) -> Exception:
    error = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})("the store's message")
    error.status_code = status
    return error


PASSING = [  # one for each rule
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    FSTimeoutError(),
    boto.EndpointConnectionError(endpoint_url="http://nowhere"),
    boto.ReadTimeoutError(endpoint_url="http://slow"),
    answered(503, "SlowDown"),
    answered(429),
    *(answered(400, code) for code in sorted(retry._PASSING_CODES)),
    with_status(502),
]
FINAL = [
    PermissionError(errno.EACCES, "Access Denied"),
    IsADirectoryError("no file"),
    OSError(errno.ENOSPC, "full"),
    boto.PartialCredentialsError(provider="env", cred_var="secret_key"),
    boto.ParamValidationError(report="x"),
    answered(403),
    answered(501, "NotImplemented"),
    answered(404, "NoSuchBucket"),
    with_status(401),
    ValueError("a mistake"),
    NotImplementedError("no writing here"),
    CheckpointError("ours"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_passing_error_is_retried(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    trials = Trials(error, error, error)
    assert retrying("writing", "s3://a/b", trials) == "done"
    assert trials.made == 4
    assert len(caplog.records) == 1  # a series warns once
    assert "s3://a/b" in caplog.text


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_a_lasting_error_is_reported_at_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    trials = Trials(error)
    with pytest.raises(Exception, match=r".+") as caught:
        retrying("writing", "s3://a/b", trials)
    assert trials.made == 1
    assert caught.value is error or (isinstance(caught.value, OSError) and "s3://a/b" in str(caught.value))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("error", "kind", "tried"),
    [
        (PermissionError("Forbidden"), PermissionError, ""),
        (FileNotFoundError("The bucket does not exist"), FileNotFoundError, ""),
        (boto.NoCredentialsError(), PermissionError, ""),
        (boto.EndpointConnectionError(endpoint_url="http://x"), OSError, ", tried 10 times"),
    ],
)
def test_an_error_keeps_its_type_and_names_the_object(error: Exception, kind: type[OSError], tried: str) -> None:
    with pytest.raises(kind, match=rf"\(writing{tried}\): 's3://a/b'") as caught:
        retrying("writing", "s3://a/b", Trials(*[error] * 10))
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


def test_no_trial_begins_after_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_S", 60.0)
    trials = Trials(*[TimeoutError()] * 9)
    with within(20.0), within(1000.0), pytest.raises(OSError, match="writing"):  # the earlier limit applies
        retrying("writing", "s3://a/b", trials)
    assert trials.made == 1
    assert until() == math.inf


def test_waits_double_up_to_a_minute_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retry, "FIRST_S", 0.5)
    monkeypatch.setattr(retry.time, "sleep", waits.append)
    for _ in range(5):
        retrying("writing", "s3://a/b", Trials(*[TimeoutError()] * 9))
    for trial in range(9):
        longest = min(0.5 * 2**trial, 60.0)
        assert all(longest / 2 <= wait <= longest for wait in waits[trial::9])
        assert len(set(waits[trial::9])) == 5


def test_an_answer_in_time_is_passed_on_also_if_it_is_a_time_out() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    assert retry.answered("s3://b/x", 60, lambda: "here", pytest.fail) == "here"
    with pytest.raises(TimeoutError, match=r"^its own$"):
        retry.answered("s3://b/x", 60, fails, pytest.fail)
