"""Which hosts there are, and with how many slots: from -H, or from a script that is asked each second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable

from trainkit.errors import ConfigError

EVERY_S = 1.0
TIMEOUT_S = 30.0  # a script that takes longer has failed


def parse(text: str, default_slots: int | None, source: str) -> dict[str, int]:
    """Return slots by host, in the order given.

    Args:
        text: "host:slots" or "host", separated by commas or newlines.
        default_slots: of hosts without a number; None: 1.
        source: what to name in an error.

    Raises:
        ConfigError: a line is neither; it names the line.
    """
    hosts: dict[str, int] = {}
    for line in text.replace(",", "\n").splitlines():
        host, colon, slots = line.strip().partition(":")
        if not host and not colon:
            continue
        count = slots.strip() if colon else str(1 if default_slots is None else default_slots)
        if not host or not count.isdecimal() or any(c.isspace() for c in host) or host.startswith("-"):
            raise ConfigError(f"{source} says '{line}'; each host is to be given as 'name:slots' or 'name', one a line.")
        if int(count):
            hosts[host] = int(count)
    return hosts


class Discovery:
    """Asks a script for hosts, from a thread of its own.

    Args:
        script: a shell command that prints hosts.
        default_slots: of hosts for which it prints no number.
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
            ConfigError: it ended with an error, or printed something else than hosts.
        """
        with self._lock:
            if self._stop.is_set():
                return {}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._script, shell=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
        try:
            out, err = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.communicate()
            raise ConfigError(f"--host-discovery-script '{self._script}' took more than {TIMEOUT_S:g} s.") from None
        if self._process.returncode:
            said = " ".join(err.split())[-200:]
            raise ConfigError(
                f"--host-discovery-script '{self._script}' ended with exit code {self._process.returncode}; it is to print "
                f"hosts, one a line, and to end with 0. It said: {said or 'nothing'}"
            )
        return parse(out, self._slots, f"--host-discovery-script '{self._script}'")

    def watch(self, known: dict[str, int], on_change: Callable[[dict[str, int]], None], say: Callable[[str], None]) -> None:
        """Ask each second from now on; a failure is told once, and the last answer holds."""

        def run() -> None:
            last, failing = list(known.items()), False
            while not self._stop.wait(EVERY_S):
                try:
                    hosts = self.ask()
                except ConfigError as error:
                    if not failing and not self._stop.is_set():
                        say(f"{error} The hosts stay as they were")
                    failing = True
                    continue
                if self._stop.is_set():
                    return
                if not hosts:  # a cloud's interface that fails prints nothing: nobody takes all hosts away to end a job
                    if not failing:
                        say(f"--host-discovery-script '{self._script}' names no host. The hosts stay as they were")
                    failing = True
                    continue
                if failing:
                    say("the host discovery script works again")
                failing = False
                if list(hosts.items()) != last:
                    last = list(hosts.items())
                    on_change(hosts)

        threading.Thread(target=run, name="hosts", daemon=True).start()

    def close(self) -> None:
        """Ask no more; end the script if it runs."""
        self._stop.set()
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
