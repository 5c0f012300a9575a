"""Addresses: which hosts are this one, and at which interface a job's processes meet."""

from __future__ import annotations

import fcntl
import functools
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from trainkit.errors import ConfigError

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Network:
    """Where a job's processes meet.

    Attributes:
        address: of the rendezvous server, IPv4.
        interfaces: for Gloo the first, for NCCL all.
        is_closed: whether nobody outside this host can come; an interface that the user chose is never thought to be so.
    """

    address: str
    interfaces: tuple[str, ...]
    is_closed: bool = False


@functools.cache
def is_local(host: str) -> bool:
    """Return whether a host's name or address means this host."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host == socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # the system binds to its own addresses only
        except OSError:
            return False
    return True


def choose(hosts: Iterable[str], interfaces: Iterable[str] | None) -> Network:
    """Return where the processes of these hosts can meet.

    Args:
        hosts: names; at least one.
        interfaces: those that the user has chosen, if any.

    Raises:
        ConfigError: there is no such interface, or no way to a host.
    """
    if interfaces:
        names = tuple(sorted(interfaces))
        return Network(address_of(names[0]), names)
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        return Network("127.0.0.1", ("lo",), is_closed=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote[0], 9))  # sends nothing; the system chooses the way
        except OSError as error:
            raise ConfigError(
                f"There is no way to host '{remote[0]}': {error}. Name hosts that resolve here, or say --network-interface."
            ) from None
        address = str(probe.getsockname()[0])
    return Network(address, (_interface_of(address),))


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        ConfigError: it has none.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"--network-interface is '{interface}', which has no IPv4 address here ({error.strerror}); interfaces: {known}."
            ) from None


def _interface_of(address: str) -> str:
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except ConfigError:
            continue
    raise ConfigError(
        f"No interface has the address {address}, by which this host reaches the others; say --network-interface."
    )
