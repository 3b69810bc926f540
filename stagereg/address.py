"""The address at which other machines of a run reach this one, by what the launcher has set."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_NOWHERE = ("192.0.2.1", "2001:db8::1")  # for documentation alone; nothing is sent there


def own_address() -> str:
    """Return the address at which other machines of this run reach this one; never fails.

    That of the interface that ``GLOO_SOCKET_IFNAME`` names, else the one that leads to ``MASTER_ADDR``, else the one
    that leads anywhere; 127.0.0.1 if nothing does.
    """
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and (found := _interface(name)):
            return found
    master = os.environ.get("MASTER_ADDR", "")
    found = _toward(master) if master else ""
    if found and (_is_loopback(master) or not _is_loopback(found)):
        return found
    # A machine's own name often means 127.0.1.1 on it, where no other machine reaches it.
    return next(filter(None, map(_toward, _NOWHERE)), "127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _toward(host: str) -> str:
    """Return this machine's address in what it sends to a host; nothing if no route leads there. Sends nothing."""
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
            if its == name and scope == "00":  # global
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""
