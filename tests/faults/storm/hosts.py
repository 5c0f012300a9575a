"""Hosts for tests: network namespaces of this machine on one bridge, with sshd, or a stand-in for
it, in each.

    with Hosts(folder, 3) as hosts:
        subprocess.Popen([*hosts.launcher, "horovodrun", ...], env=hosts.environment)
        hosts.cut(1); hosts.mend(1); hosts.lose(2); hosts.make(2)

The launcher is in a namespace of its own, which has the bridge. All namespaces share this machine's
files, as hosts share a network filesystem, but for folders that each host has for itself. Each host
may have a second network card, on a bridge of its own, and an IPv6 address. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHELL = Path(__file__).with_name("remote_shell.py")
_NETWORK = "10.78.0"
_MAC = "02:00:00:00:00:"  # of every host, also after it has booted again
_DEVICE = "wire"  # the interface that every host has, the launcher's too unless it is named
_SPARE, _SPARE_NETWORK = "spare", "10.79.0"  # of the second card
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
            f"ip -n {name} link add name bridge type bridge".split(),
            capture_output=True,
            text=True,
            check=False,
        )
        return f"bridges are not allowed here: {bridge.stderr.strip()}" if bridge.returncode else ""
    finally:
        _run(f"ip netns delete {name}")


def sshd_missing() -> str:
    """Return why hosts cannot run sshd, or an empty text."""
    return (
        ""
        if Path("/usr/sbin/sshd").is_file() and shutil.which("ssh-keygen")
        else "there is no sshd (openssh-server)"
    )


class Hosts:
    """The launcher's host, and numbered hosts from 0; a context manager.

    Args:
        folder: for the programs.
        count: of hosts, without the launcher's.
        own_folder: a folder of which each host has another disk.
        real_ssh: whether sshd runs on each host (sshd_missing says whether it can), and not the
            stand-in.
        ipv6: whether hosts have IPv6 addresses too.
        spare: whether hosts have a second card, in another network.
        launcher_card: the name of the launcher's card.
        named: whether hosts have names of their own, host0, host1, ..., which all of them know.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        own_folder: Path | None = None,
        real_ssh: bool = False,
        ipv6: bool = False,
        spare: bool = False,
        launcher_card: str = _DEVICE,
        named: bool = False,
    ) -> None:
        self._folder, self.count = folder, count
        self._own_folder = own_folder
        self._real_ssh = real_ssh
        self._ipv6 = ipv6
        self._spare = spare
        self._named, self._launcher_card = named, launcher_card
        self._left = contextlib.ExitStack()
        self._servers: dict[int, subprocess.Popen[str]] = {}
        self._mark = f"storm{os.getpid()}"

    def __enter__(self) -> Hosts:
        programs = self._folder / "bin"
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {self._ssh()} "$@"\n')
        ssh.chmod(0o755)
        with contextlib.ExitStack() as made:
            _run(f"ip netns add {self._mark}")
            made.callback(_run, f"ip netns delete {self._mark}")
            # an address of its own: a bridge without one takes that of a port, and changes it with
            # the ports
            _run(f"ip -n {self._mark} link add {self._launcher_card} address {_MAC}01 type bridge")
            if self._spare:
                _run(f"ip -n {self._mark} link add {_SPARE} address {_MAC}02 type bridge")
            self._up(self._mark, 1, self._launcher_card)
            made.callback(self._lose_all)
            if self._named:
                made.callback(self._forget_names)
                for host in range(-1, self.count):
                    self._name_all(self._name(host) if host >= 0 else self._mark)
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

    def address6(self, host: int) -> str:
        """Return a host's IPv6 address."""
        return f"fd78::{host + 2}"

    def spare_address(self, host: int) -> str:
        """Return the address of a host's second card."""
        return f"{_SPARE_NETWORK}.{host + 2}"

    def on(self, host: int) -> list[str]:
        """Return the beginning of a command that runs on a host, with its disks."""
        return ["nsenter", "-t", str(self.server(host)), "-n", "-m", "-u"]

    def is_there(self, host: int) -> bool:
        """Whether a host exists."""
        return host in self._servers

    def make(self, host: int) -> None:
        """Boot a host."""
        name, port = self._name(host), f"h{host}"
        _run(f"ip netns add {name}")
        _run(
            f"ip -n {self._mark} link add {port} type veth peer {_DEVICE} address {_MAC}1{host}"
            f" netns {name}"
        )
        _run(f"ip -n {self._mark} link set {port} master {self._launcher_card} up")
        if self._spare:
            _run(
                f"ip -n {self._mark} link add s{host} type veth peer {_SPARE} address {_MAC}2{host}"
                f" netns {name}"
            )
            _run(f"ip -n {self._mark} link set s{host} master {_SPARE} up")
        self._up(name, host + 2)
        command = ["ip", "netns", "exec", name]
        if self._named:
            command += ["unshare", "-u", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}"]
        if self._own_folder is not None:
            command += [
                "unshare",
                "-m",
                "sh",
                "-c",
                'mount -t tmpfs none "$0" && exec "$@"',
                str(self._own_folder),
            ]
        pipe = subprocess.PIPE
        server = subprocess.Popen(
            [*command, *self._sshd(host)],
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._servers[host] = server
        assert server.stdout is not None
        ready = "Server listening" if self._real_ssh else "ready"
        if ready not in (line := server.stdout.readline()):
            raise OSError(f"host {host} does not start: {line}")

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
        for port in "hs":
            # it goes with the namespace, a moment later
            _run(f"ip -n {self._mark} link delete {port}{host}", check=False)

    def cut(self, host: int) -> None:
        """Pull a host's cable."""
        _run(f"ip -n {self._mark} link set h{host} down")

    def mend(self, host: int) -> None:
        """Put a host's cable back."""
        _run(f"ip -n {self._mark} link set h{host} up")

    def split(self, one: int, other: int) -> None:
        """Let two hosts no longer see each other; the launcher sees both."""
        for a, b in ((one, other), (other, one)):
            _run(f"ip -n {self._name(a)} route add blackhole {self.address(b)}/32")

    def join(self, one: int, other: int) -> None:
        """End the split."""
        for a, b in ((one, other), (other, one)):
            _run(f"ip -n {self._name(a)} route del blackhole {self.address(b)}/32")

    def split_driver(self, host: int) -> None:
        """Let a host and the launcher no longer see each other."""
        _run(f"ip -n {self._name(host)} route add blackhole {_NETWORK}.1/32")
        _run(f"ip -n {self._mark} route add blackhole {self.address(host)}/32")

    def join_driver(self, host: int) -> None:
        """End the split."""
        _run(f"ip -n {self._name(host)} route del blackhole {_NETWORK}.1/32")
        _run(f"ip -n {self._mark} route del blackhole {self.address(host)}/32")

    def slow(self, host: int) -> bool:
        """Limit a host's link to 400 kbit/s in both directions; return whether this kernel can."""
        inside = f"ip netns exec {self._name(host)} tc qdisc add dev {_DEVICE} root tbf {_SLOW}"
        outside = f"ip netns exec {self._mark} tc qdisc add dev h{host} root tbf {_SLOW}"
        return _run(inside, check=False) and _run(outside, check=False)

    def quicken(self, host: int) -> None:
        """End the limit."""
        _run(f"ip netns exec {self._name(host)} tc qdisc del dev {_DEVICE} root", check=False)
        _run(f"ip netns exec {self._mark} tc qdisc del dev h{host} root", check=False)

    def thin(self, host: int, share: float) -> bool:
        """Drop a share of a host's packets in both directions, at random;
        return whether this kernel can.
        """
        rule = f"-m statistic --mode random --probability {share} -j DROP"
        return all(
            _run(f"ip netns exec {self._name(host)} iptables -A {way} {rule}", check=False)
            for way in ("INPUT", "OUTPUT")
        )

    def dropped(self, host: int) -> int:
        """Return how many packets `thin` has dropped."""
        command = [*f"ip netns exec {self._name(host)} iptables -n -v -x -L".split()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(
            int(line.split()[0])
            for line in shown.splitlines()
            if " DROP " in line and "statistic" in line
        )

    def processes(self, host: int) -> list[int]:
        """Return the processes of a host."""
        asked = subprocess.run(
            ["ip", "netns", "pids", self._name(host)], capture_output=True, text=True, check=True
        )
        return [int(word) for word in asked.stdout.split()]

    def server(self, host: int) -> int:
        """Return the process that stands in for a host's sshd."""
        return self._servers[host].pid

    def _name(self, host: int) -> str:
        return f"{self._mark}-{host}"

    def _name_all(self, namespace: str) -> None:
        """Let a namespace know all hosts by name: `ip netns exec` shows these files in /etc."""
        folder = Path("/etc/netns", namespace)
        folder.mkdir(parents=True)
        lines = [f"{self.address(host)} host{host}\n" for host in range(self.count)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def _forget_names(self) -> None:
        for folder in Path("/etc/netns").glob(f"{self._mark}*"):
            shutil.rmtree(folder)

    def _ssh(self) -> str:
        if not self._real_ssh:
            return f"{sys.executable} -S -E {SHELL} connect"
        for name in ("key", "host"):
            _run(f"ssh-keygen -q -t ed25519 -N '' -f {self._folder / name}")
        return (
            f"/usr/bin/ssh -i {self._folder / 'key'} -o"
            f" UserKnownHostsFile={self._folder / 'known_hosts'}"
        )

    def _sshd(self, host: int) -> list[str]:
        if not self._real_ssh:
            return [sys.executable, "-S", "-E", str(SHELL), "serve", self.address(host)]
        Path("/run/sshd").mkdir(exist_ok=True)
        options = {
            "ListenAddress": self.address(host),
            "HostKey": self._folder / "host",
            "AuthorizedKeysFile": self._folder / "key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
        }
        return [
            "/usr/sbin/sshd",
            "-D",
            "-e",
            "-f",
            "/dev/null",
            *(w for k, v in options.items() for w in ("-o", f"{k}={v}")),
        ]

    def _lose_all(self) -> None:
        for host in list(self._servers):
            self.lose(host)

    def _up(self, name: str, number: int, card: str = _DEVICE) -> None:
        _run(f"ip -n {name} address add {_NETWORK}.{number}/24 dev {card}")
        if self._ipv6:
            _run(f"ip -n {name} address add fd78::{number}/64 dev {card} nodad")
        for device in ("lo", card, *[_SPARE] * self._spare):
            _run(f"ip -n {name} link set {device} up")
        if self._spare:
            _run(f"ip -n {name} address add {_SPARE_NETWORK}.{number}/24 dev {_SPARE}")


def _run(line: str, check: bool = True) -> bool:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"`{line}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.returncode == 0
