"""Hosts and their slots: from -H, or from a script that is run every second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable

from trainkit.errors import ConfigError
from trainkit.safety.threads import printed, start_thread

EVERY_S = 1.0
TIMEOUT_S = 30.0  # a longer run of the script counts as failed


def parse(text: str, default_slots: int | None, source: str) -> dict[str, int]:
    """Return slots by host, in the order given.

    Args:
        text: "host:slots" or "host", separated by commas or newlines.
        default_slots: slots of hosts without a number; None: 1.
        source: name of the source, for errors.

    Raises:
        ConfigError: a line has another form, or an IPv6 address; the message has the line.
    """
    hosts: dict[str, int] = {}
    for line in text.replace(",", "\n").splitlines():
        host, colon, slots = line.strip().partition(":")
        if not host and not colon:
            continue
        if line.count(":") > 1:
            raise ConfigError(
                f"{source} says '{line.strip()}', an IPv6 address. Horovod's ranks connect over"
                " IPv4: give the host's IPv4 address, or a name that has one, as 'name:slots'."
            )
        count = slots.strip() if colon else str(1 if default_slots is None else default_slots)
        if (
            not host
            or not count.isdecimal()
            or any(c.isspace() for c in host)
            or host.startswith("-")
        ):
            raise ConfigError(
                f"{source} says '{line}'; each host must be 'name:slots' or 'name', one per line."
            )
        if int(count):
            hosts[host] = int(count)
    return hosts


class Discovery:
    """Runs a host discovery script, a shell command that prints hosts, in its own thread;
    arguments as those of `parse`.
    """

    def __init__(self, script: str, default_slots: int | None) -> None:
        self._script = script
        self._slots = default_slots
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self) -> dict[str, int]:
        """Run the script once.

        Raises:
            ConfigError: it failed, or printed something other than hosts.
        """
        with self._lock:
            if self._stop.is_set():
                return {}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._script,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
            )
        try:
            out, err = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.communicate()
            raise ConfigError(
                f"--host-discovery-script '{self._script}' took more than {TIMEOUT_S:g} s."
            ) from None
        if self._process.returncode:
            said = " ".join(err.split())[-200:]
            raise ConfigError(
                f"--host-discovery-script '{self._script}' ended with exit code"
                f" {self._process.returncode}; it must print hosts, one per line, and end with 0."
                f" Its error output: {said or 'none'}"
            )
        return parse(out, self._slots, f"--host-discovery-script '{self._script}'")

    def watch(
        self,
        known: dict[str, int],
        on_change: Callable[[dict[str, int]], None],
        say: Callable[[str], None],
    ) -> None:
        """Run the script every second from now on;
        report a failure once and keep the last result.
        """

        def run() -> None:
            last = list(known.items())
            failing = False
            while not self._stop.wait(EVERY_S):
                try:
                    hosts = self.ask()
                except ConfigError as error:
                    if not failing and not self._stop.is_set():
                        say(f"{error} The hosts stay unchanged")
                    failing = True
                    continue
                if self._stop.is_set():
                    return
                # empty output is a failure, as of a cloud's API: a job is not ended by removing all
                # hosts
                if not hosts:
                    if not failing:
                        say(
                            f"--host-discovery-script '{self._script}' names no host. The hosts"
                            " stay unchanged"
                        )
                    failing = True
                    continue
                if failing:
                    say("the host discovery script works again")
                failing = False
                if list(hosts.items()) != last:
                    last = list(hosts.items())
                    on_change(hosts)

        start_thread(
            "hosts",
            run,
            printed("The hosts stay unchanged until the script has run again.", retry_s=EVERY_S),
        )

    def close(self) -> None:
        """Stop; end the script if it is running."""
        self._stop.set()
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
