"""A stand-in for ssh between the storm's hosts: one file, standard library only.

    remote_shell.py serve ADDRESS                 sshd: runs the commands that clients send
    remote_shell.py connect [-o OPTION]... HOST COMMAND

Like ssh it is a TCP connection that carries stdin, both outputs and the exit code; a client ends
with 255 if the host cannot be reached within ConnectTimeout, or is silent for ServerAliveInterval *
ServerAliveCountMax seconds. If the connection ends, the command's pipes close, and the command
continues. No encryption, no login: for namespaces of one machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import IO

PORT = 2222
_LOST = 255
_HEAD = struct.Struct("!cI")
_DRAIN_S = 2.0  # time for a dead command's last output


class Frames:
    """A connection that carries frames: a letter and bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._left = b""

    def send(self, letter: bytes, content: bytes = b"") -> None:
        """Send a frame; an error is the receiver's to notice."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(_HEAD.pack(letter, len(content)) + content)

    def receive(self) -> tuple[bytes, bytes]:
        """Return the next frame.

        Raises:
            TimeoutError: nothing came in the connection's time limit; what came of a frame is
                retained.
            OSError: the connection has ended.
        """
        letter, size = _HEAD.unpack(self._take(_HEAD.size))
        content = self._take(_HEAD.size + size)[_HEAD.size :]
        self._left = self._left[_HEAD.size + size :]
        return letter, content

    def _take(self, size: int) -> bytes:
        while len(self._left) < size:
            piece = self.connection.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("the connection has ended")
            self._left += piece
        return self._left[:size]

    def copy(self, letter: bytes, source: IO[bytes]) -> None:
        """Send all that a pipe gives."""
        while piece := os.read(source.fileno(), 1 << 16):
            self.send(letter, piece)


def connect(arguments: list[str]) -> int:
    """Run a command on a host; return its exit code, or 255."""
    options, (host, *arguments) = _split(arguments)
    more, command = _split(arguments)  # Horovod's static launcher has some after the host
    options |= more
    try:
        connection = socket.create_connection(
            (host, PORT), timeout=float(options.get("ConnectTimeout", "10"))
        )
    except OSError as error:
        print(f"ssh: connect to host {host} port {PORT}: {error}", file=sys.stderr)
        return _LOST
    frames = Frames(connection)
    connection.settimeout(float(options.get("ServerAliveInterval", "15")))
    frames.send(b"c", " ".join(command).encode())

    def send_stdin() -> None:
        frames.copy(b"i", sys.stdin.buffer)
        frames.send(b"e")

    threading.Thread(target=send_stdin, daemon=True).start()
    return _follow(frames, int(options.get("ServerAliveCountMax", "3")))


def _split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that come first, and the rest."""
    options: dict[str, str] = {}
    while arguments[0].startswith("-"):
        name, _, value = arguments[1].partition("=")
        options[name if arguments[0] == "-o" else arguments[0]] = value
        arguments = arguments[2:]
    return options, arguments


def _follow(frames: Frames, most_silences: int) -> int:
    silences = 0
    while True:
        try:
            letter, content = frames.receive()
        except TimeoutError:
            silences += 1
            if silences > most_silences:
                return _LOST
            threading.Thread(target=frames.send, args=(b"p",), daemon=True).start()
            continue
        except OSError:
            return _LOST
        silences = 0
        if letter == b"x":
            return content[0]
        if letter in b"or":
            os.write(1 if letter == b"o" else 2, content)


def serve(address: str) -> None:
    """Answer connections until killed."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_run, args=(Frames(connection),), daemon=True).start()


def _run(frames: Frames) -> None:
    with frames.connection, contextlib.suppress(OSError):
        _, command = frames.receive()
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        copies = [
            threading.Thread(target=frames.copy, args=one, daemon=True)
            for one in ((b"o", process.stdout), (b"r", process.stderr))
        ]
        for copy in copies:
            copy.start()
        threading.Thread(target=_end, args=(process, frames, copies), daemon=True).start()
        with process.stdin as stdin, contextlib.suppress(OSError):
            while True:
                letter, content = frames.receive()
                if letter == b"i":
                    stdin.write(content)
                    stdin.flush()
                elif letter == b"p":
                    frames.send(b"p")
                else:
                    stdin.close()
                    break
        process.wait()
        for copy in copies:
            copy.join(_DRAIN_S)


def _end(process: subprocess.Popen[bytes], frames: Frames, copies: list[threading.Thread]) -> None:
    code = process.wait()
    for copy in copies:
        copy.join(_DRAIN_S)
    frames.send(b"x", bytes([code % 256]))
    with contextlib.suppress(OSError):
        frames.connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        code = connect(sys.argv[2:])
        os._exit(code)  # a thread may still read stdin
