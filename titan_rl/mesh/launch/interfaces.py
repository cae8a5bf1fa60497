"""This host's way to another: the address that others reach it at, and the interface that has it."""

import fcntl
import socket
import struct
from contextlib import closing

_SIOCGIFADDR = 0x8915


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
