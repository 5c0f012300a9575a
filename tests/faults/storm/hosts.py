"""Hosts of a storm: network namespaces of this machine on one bridge, with a stand-in for sshd in each.

    with Hosts(folder, 3) as hosts:
        subprocess.Popen([*hosts.launcher, "horovodrun", ...], env=hosts.environment)
        hosts.cut(1); hosts.mend(1); hosts.lose(2); hosts.make(2)

The launcher is in a namespace of its own, which has the bridge. All namespaces share this machine's files, as hosts share a
network filesystem. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHELL = Path(__file__).with_name("remote_shell.py")
_NETWORK = "10.78.0"
_MAC = "02:00:00:00:00:"  # of every host, also after it has booted again
_DEVICE = "wire"  # the interface that every host has, the launcher's too: Horovod is given one name for all
_SLOW = "rate 400kbit burst 16kbit latency 2s"


def unavailable() -> str:
    """Return why there can be no hosts here, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        bridge = subprocess.run(
            f"ip -n {name} link add name bridge type bridge".split(), capture_output=True, text=True, check=False
        )
        return f"bridges are not allowed here: {bridge.stderr.strip()}" if bridge.returncode else ""
    finally:
        _run(f"ip netns delete {name}")


class Hosts:
    """The launcher's host, and numbered hosts from 0; a context manager."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self.count = folder, count
        self._left = contextlib.ExitStack()
        self._servers: dict[int, subprocess.Popen[str]] = {}
        self._mark = f"storm{os.getpid()}"

    def __enter__(self) -> Hosts:
        programs = self._folder / "bin"
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {SHELL} connect "$@"\n')
        ssh.chmod(0o755)
        with contextlib.ExitStack() as made:
            _run(f"ip netns add {self._mark}")
            made.callback(_run, f"ip netns delete {self._mark}")
            # an address of its own: a bridge without one takes that of a port, and changes it with the ports
            _run(f"ip -n {self._mark} link add {_DEVICE} address {_MAC}01 type bridge")
            self._up(self._mark, f"{_NETWORK}.1")
            made.callback(self._lose_all)
            for host in range(self.count):
                self.make(host)
            self._left = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    @property
    def launcher(self) -> list[str]:
        """The beginning of a command that runs on the launcher's host."""
        return ["ip", "netns", "exec", self._mark]

    @property
    def path(self) -> str:
        """PATH with the stand-in for ssh."""
        return f"{self._folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def address(self, host: int) -> str:
        """Return a host's address, its name in the list of hosts."""
        return f"{_NETWORK}.{host + 2}"

    def is_there(self, host: int) -> bool:
        """Whether a host exists."""
        return host in self._servers

    def make(self, host: int) -> None:
        """Boot a host."""
        name, port = self._name(host), f"h{host}"
        _run(f"ip netns add {name}")
        _run(f"ip -n {self._mark} link add {port} type veth peer {_DEVICE} address {_MAC}1{host} netns {name}")
        _run(f"ip -n {self._mark} link set {port} master {_DEVICE} up")
        self._up(name, self.address(host))
        command = [*["ip", "netns", "exec"], name, sys.executable, "-S", "-E", str(SHELL), "serve", self.address(host)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._servers[host] = server
        assert server.stdout is not None
        if server.stdout.readline() != "ready\n":
            raise OSError(f"host {host} does not start")

    def lose(self, host: int) -> None:
        """Take a host's power: its link goes first, so that no peer hears of its end."""
        self.cut(host)
        while left := self.processes(host):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        server = self._servers.pop(host)
        server.communicate()
        _run(f"ip netns delete {self._name(host)}")
        _run(f"ip -n {self._mark} link delete h{host}", check=False)  # it goes with the namespace, a moment later

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        _run(f"ip -n {self._mark} link set h{host} down")

    def mend(self, host: int) -> None:
        """Put a host's cable back."""
        _run(f"ip -n {self._mark} link set h{host} up")

    def slow(self, host: int) -> bool:
        """Limit a host's link to 400 kbit/s in both directions; return whether this kernel can."""
        inside = f"ip netns exec {self._name(host)} tc qdisc add dev {_DEVICE} root tbf {_SLOW}"
        outside = f"ip netns exec {self._mark} tc qdisc add dev h{host} root tbf {_SLOW}"
        return _run(inside, check=False) and _run(outside, check=False)

    def quicken(self, host: int) -> None:
        """End the limit."""
        _run(f"ip netns exec {self._name(host)} tc qdisc del dev {_DEVICE} root", check=False)
        _run(f"ip netns exec {self._mark} tc qdisc del dev h{host} root", check=False)

    def processes(self, host: int) -> list[int]:
        """Return the processes of a host."""
        asked = subprocess.run(["ip", "netns", "pids", self._name(host)], capture_output=True, text=True, check=True)
        return [int(word) for word in asked.stdout.split()]

    def server(self, host: int) -> int:
        """Return the process that stands in for a host's sshd."""
        return self._servers[host].pid

    def _name(self, host: int) -> str:
        return f"{self._mark}-{host}"

    def _lose_all(self) -> None:
        for host in list(self._servers):
            self.lose(host)

    @staticmethod
    def _up(name: str, address: str) -> None:
        _run(f"ip -n {name} address add {address}/24 dev {_DEVICE}")
        _run(f"ip -n {name} link set {_DEVICE} up")
        _run(f"ip -n {name} link set lo up")


def _run(line: str, check: bool = True) -> bool:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"`{line}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.returncode == 0
