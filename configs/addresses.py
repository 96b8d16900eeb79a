"""Hosts of addresses, and which of them are loopback."""

from __future__ import annotations

import ipaddress


def host_of(address: str) -> str:
    """The host of tcp://HOST:PORT or HOST:PORT."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def on_loopback(address: str) -> bool:
    """Whether the host of tcp://HOST:PORT or HOST:PORT is a loopback one."""
    host = host_of(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
