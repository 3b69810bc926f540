"""Find the address at which other ranks reach this machine, and open listening sockets."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import weakref
from pathlib import Path

_log = logging.getLogger(__name__)
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NOWHERE = ("192.0.2.1", "2001:db8::1")  # documentation addresses; nothing is sent to them


def is_one_machine() -> bool:
    """Return whether the launcher's environment variables show that all ranks of the run are on this machine."""
    variables = os.environ
    here = variables.get("LOCAL_WORLD_SIZE")
    if "SLURM_STEP_NUM_NODES" in variables and "TORCHELASTIC_RUN_ID" not in variables:
        here = variables.get("SLURM_STEP_NUM_TASKS") if variables["SLURM_STEP_NUM_NODES"] == "1" else None
    return _is_loopback(variables.get("MASTER_ADDR", "")) or (here is not None and here == variables.get("WORLD_SIZE"))


def loopback() -> str:
    """Return ``MASTER_ADDR`` if it is a loopback address, otherwise 127.0.0.1."""
    master = os.environ.get("MASTER_ADDR", "")
    return master if _is_loopback(master) and master != "localhost" else "127.0.0.1"


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on ``host``, or on all interfaces if this machine does not have that address.

    Each forked child closes its copy of the socket.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        opened = socket.create_server(("", port), family=family, backlog=512, dualstack_ipv6=both)
    _log.debug("stagereg: this process listens on %s port %d", *opened.getsockname()[:2])
    close_in_forks(opened)
    return opened


def close_in_forks(opened: socket.socket) -> None:
    """Close a socket in each forked child, since an open copy would hide the exit of this process from other ranks."""
    _open.add(opened)


def own_address() -> str:
    """Return the address at which the other ranks of this run reach this machine. Never raises.

    If all ranks are on this machine, return a loopback address. Otherwise return the first address that exists: of the
    interface ``GLOO_SOCKET_IFNAME``, of the route to ``MASTER_ADDR``, of the default route, of the loopback interface.
    """
    if is_one_machine():
        return loopback()
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and (found := _interface(name)):
            return found
    master = os.environ.get("MASTER_ADDR", "")
    found = _toward(master) if master else ""
    if found and (_is_loopback(master) or not _is_loopback(found)):
        return found
    # A machine's own name often resolves to 127.0.1.1, which other machines cannot reach.
    return next(filter(None, map(_toward, _NOWHERE)), "127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _toward(host: str) -> str:
    """Return this machine's source address for packets to a host; empty if no route exists. Sends no packet."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _interface(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, its = line.split()
            if its == name and scope == "00":  # global scope
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(socket.socket.close, _open)))
