"""This host's way to another: the address that others reach it at, and the interface that has it.

A process listens at one address for peers that come from other hosts. Who starts it says which in its environment: the
run for all of its processes (hosts/remote_hosts.py), or who starts a host, for one that has several.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import closing

HOST_ADDRESS = "TITAN_RL_HOST_ADDRESS"
"""Environment variable: at which of its addresses the run's other hosts reach this one."""
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def has_address() -> bool:
    """Whether this host has a configured address for other hosts."""
    return bool(os.environ.get(HOST_ADDRESS))


def host_address() -> str:
    """Address to listen at; loopback unless configured."""
    return os.environ.get(HOST_ADDRESS) or _LOOPBACK


def address_for(others: Sequence[str]) -> str:
    """The one that this host was told, or one on the way to another: a loopback only if all of them are on it."""
    if has_address():
        return host_address()
    addresses = [own_address(other) for other in others]
    return next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), addresses[0])


def own_address(towards: str) -> str:
    """What this host is called on the way to another (a name or an address): what peers can reach. Nothing is sent."""
    [(family, *_, place), *_] = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)
    with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The network interface that has an address; empty if none does, or it is not of IPv4."""
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    return ""


def _address_of(interface: str) -> str:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])
