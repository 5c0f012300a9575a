"""Two network namespaces of this machine that act as hosts, and a link of a set rate and delay
between them.

    with Link(rate_mbit=100, delay_ms=10) as link:
        subprocess.run([*link.inside(0), "some", "command"])     # on host 0, whose address is link.address(0)

Without limits the link is a veth pair. With them it is a TAP device in each namespace, and a relay:
a process that reads each frame, holds it until a wire of that rate would have carried it and the
delay has passed, and hands it on. Nothing is ever dropped. (tc's netem would do the same; many
kernels come without it.) Frames are those that the kernel hands to a network card: up to 64 kB,
which a card would cut to the MTU; their headers count once. Needs root. To try one:

    python -m benchmarks.links check 100 10        # Mbit/s, ms
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import select
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEVICE = "wire"  # its name on both hosts
_SET_INTERFACE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
_TAP, _NO_PACKET_INFO, _WITH_OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_SEGMENTS = 0b111
_FRAME = 2**16 + 64


def unavailable() -> str | None:
    """Return why there can be no such links here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    name = f"try-{os.getpid()}"
    if (
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode
        != 0
    ):
        return "network namespaces are not allowed here"
    _ip("netns", "delete", name)
    return None


@dataclass
class Link:
    """A link, and the two namespaces at its ends; a context manager.

    Attributes:
        rate_mbit: in each direction at once, or None for no limit.
        delay_ms: one way.
    """

    rate_mbit: float | None = None
    delay_ms: float = 0.0
    _left: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Link:
        with contextlib.ExitStack() as made:
            for host in (0, 1):
                _ip("netns", "add", self._name(host))
                made.callback(_ip, "netns", "delete", self._name(host))
            if self.limited:
                made.enter_context(self._relay())
            else:
                ends = [f"{DEVICE} netns {self._name(host)}" for host in (0, 1)]
                _ip(*f"link add {ends[0]} type veth peer name {ends[1]}".split())
            for host in (0, 1):
                inside = ["-n", self._name(host)]
                _ip(*inside, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
                _ip(*inside, "link", "set", DEVICE, "up")
                _ip(*inside, "link", "set", "lo", "up")
            self._left = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def __str__(self) -> str:
        if not self.limited:
            return "no limit"
        rate = "no limit" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{rate}, {self.delay_ms:g} ms"

    @property
    def limited(self) -> bool:
        """Whether there is a relay."""
        return self.rate_mbit is not None or self.delay_ms > 0

    def address(self, host: int) -> str:
        """Return the address of host 0 or 1."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Return how a command begins that runs on host 0 or 1."""
        return ["ip", "netns", "exec", self._name(host)]

    def checked(self, seconds: float = 1.0) -> tuple[float, float]:
        """Return the link's measured performance between two sockets:
        (round trip in ms, Mbit/s in one direction).
        """
        this = [sys.executable, "-m", "benchmarks.links"]
        command = [*self.inside(1), *this, "answer", self.address(1)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            command = [*self.inside(0), *this, "ask", self.address(1), port, str(seconds)]
            asked = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=60
            )
        round_trip_ms, mbit = map(float, asked.stdout.split())
        return round_trip_ms, mbit

    @contextlib.contextmanager
    def _relay(self) -> Iterator[None]:
        numbers = [str(self.rate_mbit or 0), str(self.delay_ms)]
        command = [
            sys.executable,
            "-m",
            "benchmarks.links",
            "relay",
            *numbers,
            self._name(0),
            self._name(1),
        ]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as relay:
            try:
                assert relay.stdout is not None
                if relay.stdout.readline() != "ready\n":
                    raise OSError("the relay did not start")
                yield
            finally:
                relay.kill()

    def _name(self, host: int) -> str:
        return f"host{host}-{os.getpid()}"


def bytes_so_far() -> int:
    """Return the bytes that this process's host has sent and received over the link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            columns = counters.split()
            return int(columns[0]) + int(columns[8])
    raise OSError(f"there is no device {DEVICE} here")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _tap(host: int, namespace: str) -> int:
    """Return the file of a TAP device whose other side is the namespace's."""
    tap, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"tap{host}-{os.getpid()}"
    flags = _TAP | _NO_PACKET_INFO | _WITH_OFFLOAD_HEADER
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, _SET_OFFLOAD, _CHECKSUMS_AND_SEGMENTS)
    _ip("link", "set", name, "netns", namespace, "name", DEVICE)
    return tap


@dataclass
class _Direction:
    """Frames on their way from one TAP device to the other."""

    source: int
    sink: int
    free_at: float = 0.0
    held: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, seconds_per_byte: float, delay_s: float) -> None:
        """Take all frames that are there."""
        while True:
            try:
                frame = os.read(self.source, _FRAME)
            except BlockingIOError:
                return
            except OSError as error:  # the device is not up yet
                if error.errno != errno.EIO:
                    raise
                return
            self.free_at = max(self.free_at, time.monotonic()) + len(frame) * seconds_per_byte
            self.held.append((self.free_at + delay_s, frame))

    def give(self) -> float:
        """Forward the frames that are due; return the seconds until the next one."""
        while self.held and (wait := self.held[0][0] - time.monotonic()) <= 0:
            # a device that is down takes none, as a wire that was pulled
            with contextlib.suppress(OSError):
                os.write(self.sink, self.held[0][1])
            self.held.popleft()
        return wait if self.held else 1.0


def relay(rate_mbit: float, delay_ms: float, namespaces: tuple[str, str]) -> None:
    """Pass frames until killed."""
    taps = [_tap(host, namespace) for host, namespace in enumerate(namespaces)]
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a link does not wait for the ranks' computing
    seconds_per_byte = 8e-6 / rate_mbit if rate_mbit else 0.0
    ways = {taps[0]: _Direction(taps[0], taps[1]), taps[1]: _Direction(taps[1], taps[0])}
    print("ready", flush=True)
    wait = 0.0
    while True:
        readable, _, _ = select.select(taps, [], [], wait)
        for tap in readable:
            ways[tap].take(seconds_per_byte, delay_ms / 1000)
        wait = max(0.0, min(way.give() for way in ways.values()))


def answer(address: str) -> None:
    """Serve one measurement: send bytes back one by one, then read all that comes."""
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1) == b"?":
                connection.sendall(b"!")
            while chunk := connection.recv(2**20):
                if chunk.endswith(b"."):
                    connection.sendall(b"!")


def ask(address: str, port: int, seconds: float) -> None:
    """Measure, and print the round trip in ms and Mbit/s of what has arrived."""
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(20):
            begin = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(1000 * (time.perf_counter() - begin))
        block, sent, begin = bytes(2**18), 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            connection.sendall(block)
            sent += len(block)
        connection.sendall(b".")
        connection.recv(1)  # it has read the last byte
        print(statistics.median(trips), 8e-6 * sent / (time.perf_counter() - begin))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["relay", "answer", "ask", "check"])
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    if options.what == "relay":
        relay(float(options.rest[0]), float(options.rest[1]), (options.rest[2], options.rest[3]))
    elif options.what == "answer":
        answer(options.rest[0])
    elif options.what == "ask":
        ask(options.rest[0], int(options.rest[1]), float(options.rest[2]))
    else:
        with Link(*map(float, options.rest)) as link:
            print(link, "-> round trip in ms and Mbit/s:", *link.checked())
