"""Network: which host names mean this host, its interfaces and its route to others, and what signs
what a job's processes send each other.

interface_to         the interface of the route to a host. Hosts name their cards as they like: a login
                     node's may be bond0, and a compute node's eth0
"""

from __future__ import annotations

import fcntl
import functools
import socket
import struct

from trainkit.errors import ConfigError

# variable of a job's processes: the secret that signs what they send to the rendezvous server
SECRET = "HOROVOD_RENDEZVOUS_SECRET"
DRIVER = "driver="  # before the name of the driver's interface
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@functools.cache
def is_local(host: str) -> bool:
    """Return whether a host's name or address is this host's."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host == socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # binding works only with this host's own addresses
        except OSError:
            return False
    return True


def interface_to(host: str) -> str:
    """Return the name of the interface by which this host reaches another, or itself.

    Raises:
        ConfigError: it is unreachable.
    """
    return "lo" if is_local(host) else interface_of(own_address(host))


def own_address(host: str) -> str:
    """Return the address by which this host reaches another one.

    Raises:
        ConfigError: it is unreachable.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing; makes the system choose a route
        except OSError as error:
            raise ConfigError(_unreachable(host, error)) from None
        return str(probe.getsockname()[0])


def _unreachable(host: str, error: OSError) -> str:
    """Return the error of a host to which no IPv4 route leads."""
    try:
        (*_, (address, *_)), *_ = socket.getaddrinfo(host, None, socket.AF_INET6)
    except OSError:
        return (
            f"There is no route to host '{host}': {error}. Use names that resolve here, or set"
            " --network-interface."
        )
    return (
        f"Host '{host}' has an IPv6 address alone here ({address}). Horovod's ranks connect over"
        " IPv4: give it an IPv4 address, and a name that has one."
    )


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        ConfigError: the interface has none.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"--network-interface is '{interface}', which has no IPv4 address here"
                f" ({error.strerror}); interfaces: {known} (on {socket.gethostname()}). If the"
                " driver's has another name than the workers', give it apart: --network-interfaces"
                f" {DRIVER}NAME, or {DRIVER}NAME,NAME."
            ) from None


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address.

    Raises:
        ConfigError: none has it.
    """
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except ConfigError:
            continue
    raise ConfigError(
        f"No interface has the address {address}, by which this host reaches the others; set"
        " --network-interface."
    )
