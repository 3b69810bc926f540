"""Retry requests to object stores after transient errors.

Waits double from half a second to a minute; each is shortened at random by up to half ("equal jitter", M. Brooker, AWS
Architecture Blog, 2015). Other errors are raised immediately. Retries end after ``TRIALS`` attempts, or at the deadline
set with :func:`.within`. The first retry logs a warning. :func:`answered` sets a timeout for a call that may hang.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from stagereg.base.deadline import until

T = TypeVar("T")

TRIALS = 10  # attempts of a request in total, within about three minutes

FIRST_S = 0.5
LONGEST_S = 60.0

# Transient errors: HTTP statuses; S3 error codes with other HTTP statuses; and parts of exception names, because the
# client packages of object stores have no common base class for network errors.
_PASSING_STATUS = {408, 425, 429, *range(500, 600)} - {501}
_PASSING_CODES = {"BadDigest", "ConditionalRequestConflict", "IncompleteBody", "NoSuchUpload", "OperationAborted"}
_PASSING_CODES |= {"RequestTimeout", "XAmzContentSHA256Mismatch"}
_PASSING_NAMES = ["Connect", "Timeout", "HTTPClient", "Incomplete", "Payload", "Protocol", "Transport", "Response"]
# Permanent errors, by class and by errno. ``_ERRNO`` is for exceptions that packages raise without an errno.
_FINAL = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_FINAL_ERRNO = {errno.EINVAL, errno.ENOSYS, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG, errno.EOPNOTSUPP}
_ERRNO = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT}

_log = logging.getLogger(__name__)

_READS = ("listing", "looking at", "reading")
_REFUSED = (
    "; the store refuses the credentials of this process: set or renew them, correct the clock of this machine, or "
    "grant the permission to list and read"
)


def answered(url: str, seconds: float, act: Callable[[], T], give_back: Callable[[T], None]) -> T:
    """Return the result of ``act``; raise ``TimeoutError`` after ``seconds``. Passes a late result to ``give_back``."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    def late(ended: Future[T]) -> None:
        if ended.exception() is None:
            give_back(ended.result())

    threading.Thread(target=work, name="stagereg-answer", daemon=True).start()
    try:
        if not wait([answer], min(seconds, threading.TIMEOUT_MAX)).done:
            raise TimeoutError(errno.ETIMEDOUT, f"no response within {seconds:g} s", url)
        return answer.result()
    except BaseException:
        answer.add_done_callback(late)
        raise


def retrying(doing: str, url: str, act: Callable[[], T]) -> T:
    """Return the result of ``act``, which must be idempotent, with retries after transient errors.

    Messages contain ``doing`` and ``url``. Errors of the store are raised as ``OSError``; other errors propagate.
    """
    trial = 1
    while True:
        try:
            return act()
        except Exception as error:
            pause = min(FIRST_S * 2 ** (trial - 1), LONGEST_S) * random.uniform(0.5, 1.0)
            passing = is_transient(error)
            if trial == TRIALS or time.monotonic() + pause > until() or not passing:
                a_stores = isinstance(error, OSError) or passing or http_error_of(error)[1] is not None
                if not a_stores and not _is_denied(error):
                    raise  # not an error of the store, so a bug in the program
                told = f"{doing}, tried {trial} times" if trial > 1 else doing
                raise _as_os_error(error, told + _REFUSED * (doing in _READS and _is_denied(error)), url) from error
            if trial == 1:
                _log.warning("Error while %s %s: %s. Retrying up to %d times.", doing, url, _text(error), TRIALS - 1)
        time.sleep(pause)
        trial += 1


def is_transient(error: BaseException) -> bool:
    """Return whether a retry after ``error`` may succeed."""
    code, status = http_error_of(error)
    if _is_denied(error):
        return False
    if status is not None:
        return code in _PASSING_CODES or status in _PASSING_STATUS
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL) and error.errno not in _FINAL_ERRNO
    return any(part in kind.__name__ for part in _PASSING_NAMES for kind in type(error).__mro__)


def http_error_of(error: BaseException) -> tuple[str | None, int | None]:
    """Return the store's error code and the HTTP status of an exception from botocore, gcsfs, azure or aiohttp."""
    for each in (error, error.__cause__):
        response: Any = getattr(each, "response", None)
        if isinstance(response, dict):
            return response.get("Error", {}).get("Code"), response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        for name in ("status_code", "status", "code"):
            status = getattr(each, name, None)
            if isinstance(status, int) and 400 <= status < 600:
                return None, status
    return None, None


def _is_denied(error: BaseException) -> bool:
    """Return whether the store or its client package rejected the credentials, or the credentials lack a permission."""
    names = [kind.__name__ for kind in type(error).__mro__]
    by_name = any(part in name for part in ("Credential", "GoogleAuthError") for name in names)
    by_gcsfs = type(error) is OSError and str(error).startswith("Forbidden: ")  # status 403 in gcsfs
    return by_name or by_gcsfs or http_error_of(error)[1] in (401, 403)


def _as_os_error(error: Exception, more: str, url: str) -> OSError:
    """Convert an error of a store, or of its client package, to an ``OSError`` with the details ``more``."""
    denied = _is_denied(error)
    number = error.errno if isinstance(error, OSError) else None
    known = (each for kind, each in _ERRNO.items() if isinstance(error, kind))
    return OSError(number or next(known, errno.EACCES if denied else errno.EIO), f"{_text(error)} ({more})", url)


def _text(error: BaseException) -> str:
    text = str(error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else error).strip()
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
