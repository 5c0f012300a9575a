"""Network: which host names mean this host, and the interfaces on which a job's processes connect.

check_names          all hosts of -H have an address, before anything is started
choose               the driver's: by name, or by the route to the hosts
worker_interface     a worker's: by name, or by the route to the driver. Hosts name their cards as they like: a login node's
                     may be bond0, and a compute node's eth0
interface_to         that of the route to a host
"""

from __future__ import annotations

import fcntl
import functools
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import ConfigError

# variable of a job's processes: the secret that signs what they send to the rendezvous server
SECRET = "HOROVOD_RENDEZVOUS_SECRET"
# "1" in a worker's environment: it looks for its interface itself
FINDS_INTERFACE = "TRAINKIT_FINDS_INTERFACE"
DRIVER = "driver="  # before the name of the driver's interface
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Network:
    """The network of a job's processes."""

    address: str  # IPv4 address of the rendezvous server
    # network interfaces of workers that do not look for their own; Gloo uses the first, NCCL all
    interfaces: tuple[str, ...]
    # whether the address is unreachable from other hosts; never set for an interface chosen by the
    # user
    is_closed: bool = False


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


def check_names(hosts: Iterable[str]) -> None:
    """Check that all these hosts' names are known here: ssh would be tried with them until the
    job's time is over.

    Raises:
        ConfigError: a name has no address, and is not an alias of ssh's configuration.
    """
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if not is_local(host) and not _has_alias(host):
                raise ConfigError(
                    f"--hosts names '{host}', of which no address can be looked up here: {error}."
                    " Correct the name, or give the host's address; an alias of ~/.ssh/config is"
                    " legal, too."
                ) from None


def _has_alias(host: str) -> bool:
    """Return whether ssh's configuration leads to a host by another name,
    or through another host.
    """
    if (ssh := shutil.which("ssh")) is None:
        return False
    done = subprocess.run(
        [ssh, "-G", host],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    known = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    return known.get("hostname", host) != host.lower() or not known.keys().isdisjoint(
        ("proxyjump", "proxycommand")
    )


def choose(hosts: Iterable[str], interfaces: Sequence[str], driver: str | None = None) -> Network:
    """Choose the network for these hosts.

    Args:
        hosts: names; at least one.
        interfaces: the user's choice for the workers, if any.
        driver: the user's choice for the driver's own; None: the first of `interfaces`.

    Raises:
        ConfigError: an interface does not exist, or a host is unreachable.
    """
    if interfaces or driver:
        own = driver or interfaces[0]
        return Network(address_of(own), tuple(interfaces) or (own,))
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        return Network("127.0.0.1", ("lo",), is_closed=True)
    address = own_address(remote[0])
    return Network(address, (interface_of(address),))


def worker_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker's interface, if it looks for it itself; check that a named
    one is here.

    Args:
        environ: the worker's, as the driver has set it.

    Raises:
        ConfigError: there is none.
    """
    name = environ.get("HOROVOD_GLOO_IFACE")
    if environ.get(FINDS_INTERFACE) != "1":
        if name is not None:
            address_of(name)
        return {}
    name = interface_of(own_address(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]))
    return {"HOROVOD_GLOO_IFACE": name, "NCCL_SOCKET_IFNAME": name}


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
