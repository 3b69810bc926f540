"""The secret of a run, which authenticates its processes: from the environment, or agreed on by the ranks.

The launcher passes a secret to its ranks in their environment, which other users cannot read. Ranks without a secret,
under another launcher, agree on one: rank 0 writes the secret to a file in memory and publishes its path in the
rendezvous store. Only processes of the same user on the same machine can open the file. On several machines, or in a
sandbox without such files, rank 0 publishes the secret itself, and any process that reaches the store can read it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import time
from typing import Any

from stagereg.base.machine import machine_name
from stagereg.errors import LaunchError
from stagereg.launch.rank import SECRET
from stagereg.launch.run_store import GATHER_S, await_key

_log = logging.getLogger(__name__)


@functools.cache
def given_secret() -> str:
    """Return the secret in the environment, or ``""``. Deletes the variable, to hide it from child processes."""
    return os.environ.pop(SECRET, "")


def agreed_secret(store: Any, rank: int, world_size: int, given: str) -> str:
    """Return ``given``; if it is empty, return a new secret, the same on all ranks. Collective.

    Raises:
        LaunchError: only some ranks have ``given``, or a rank does not start within :data:`GATHER_S` seconds.
    """
    if rank > 0:
        await_key(store, "secret/place", "rank 0 did not start its job")
        place = json.loads(store.get("secret/place"))
        if (place is None) != bool(given):
            store.set("secret/elsewhere", "")  # makes rank 0 stop waiting
            having, lacking = (0, rank) if place is None else (rank, 0)
            raise LaunchError(
                f"rank {having} has {SECRET} in its environment, but rank {lacking} does not. Set the variable to the "
                "same random text on all ranks, or unset it on all ranks."
            )
        return given or _read(store, *place)
    if given:
        store.set("secret/place", "null")
        return given
    secret, memory = secrets.token_hex(32), -1
    try:
        with contextlib.suppress(AttributeError, OSError):  # memfd_create is missing, or forbidden in this container
            memory = os.memfd_create("stagereg-secret")
            os.write(memory, secret.encode())
        store.set("secret/place", json.dumps([machine_name(), f"/proc/{os.getpid()}/fd/{memory}"]))
        deadline = time.monotonic() + GATHER_S
        while (read := store.add("secret/read", 0)) < world_size - 1 and not store.check(["secret/elsewhere"]):
            if time.monotonic() > deadline:
                raise LaunchError(f"only {read + 1} of {world_size} ranks started in {GATHER_S} s. Check all logs.")
            time.sleep(0.01)
        if read < world_size - 1:
            _log.info(
                "stagereg: the ranks exchange the secret of the run through the rendezvous store, and any process that "
                "reaches the store can read it. To avoid that, set %s to the same random text on all ranks.",
                SECRET,
            )
            store.set("secret/text", secret)
    finally:
        if memory >= 0:
            os.close(memory)
    return secret


def _read(store: Any, machine: str, path: str) -> str:
    """Return the secret from the memory of rank 0 on this machine; if that fails, from the store."""
    try:
        if machine == machine_name():
            with open(path) as memory:
                if text := memory.read(200):
                    store.add("secret/read", 1)
                    return text
    except (OSError, ValueError):  # rank 0 runs in another container
        pass
    store.set("secret/elsewhere", "")
    await_key(store, "secret/text", "rank 0 did not start its job")
    return str(store.get("secret/text").decode())
