"""The connection of a trial of Ray Tune and the job that it runs in processes of its own.

The trial listens, and starts the job with two variables more: its address and a secret, drawn for
one trial. Rank 0 connects, sends each report, and learns whether the trial continues.

    rank 0 -> trial   SIGNATURE {"metrics": ..., "folder": ...}\\n        trial -> rank 0   SIGNATURE {"continues": ...}\\n

Messages are signed (extensions/elastic/signing.py) with their direction and number, so that none can be
forged or repeated.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any, BinaryIO

from trainkit.errors import EngineError
from trainkit.extensions.elastic.signing import is_signed, new_secret, sign

_ADDRESS = "TRAINKIT_TRIAL_ADDRESS"
_SECRET = "TRAINKIT_TRIAL_SECRET"
_TARGET = "trial"
_POLL_S = 0.2
_FIRST_WORD_S = 10.0
Report = Callable[[dict[str, Any], "str | None"], bool]


class TrialLink:
    """Rank 0's end."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self._connection = connection
        self._secret = secret
        self._number = 0
        self._file: BinaryIO = connection.makefile("rwb")  # type: ignore[assignment]

    def report(self, metrics: dict[str, Any], folder: str | None) -> bool:
        """Send metrics and a checkpoint's folder, which the trial has copied on return; return
        whether the trial continues.

        Raises:
            EngineError: the trial's process has ended.
        """
        try:
            _write(
                self._file,
                self._secret,
                "REPORT",
                self._number,
                {"metrics": metrics, "folder": folder},
            )
            answer = _read(self._file, self._secret, "ANSWER", self._number)
        except (OSError, ValueError) as error:
            raise EngineError(
                "The process of this trial has ended, and its job ends with it."
            ) from error
        self._number += 1
        return bool(answer["continues"])

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._connection.close()


def connect() -> TrialLink | None:
    """Return the connection to the trial that started this job; None if no trial did.

    Raises:
        EngineError: the trial cannot be reached.
    """
    address, secret = os.environ.get(_ADDRESS), os.environ.get(_SECRET)
    if not address or not secret:
        return None
    host, _, port = address.rpartition(":")
    try:
        return TrialLink(socket.create_connection((host, int(port))), secret)
    except OSError as error:
        raise EngineError(f"The trial at {address} cannot be reached: {error}.") from error


def is_trial() -> bool:
    """Return whether this process is the job of a trial."""
    return bool(os.environ.get(_ADDRESS))


class TrialServer:
    """The trial's end.

    Attributes:
        variables: for the environment of the job.
    """

    def __init__(self, host: str) -> None:
        """Listen at `host`, the address of this node."""
        self._socket = socket.create_server((host, 0))
        self._socket.settimeout(_POLL_S)
        self._secret = new_secret()
        self.variables = {
            _ADDRESS: f"{host}:{self._socket.getsockname()[1]}",
            _SECRET: self._secret,
        }

    def serve(self, report: Report, is_running: Callable[[], bool]) -> None:
        """Pass each report of the job to `report`, and its answer to the job,
        as long as the job runs.
        """
        while is_running():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            with connection, connection.makefile("rwb") as file:
                connection.settimeout(_FIRST_WORD_S)
                self._follow(connection, file, report)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _follow(self, connection: socket.socket, file: BinaryIO, report: Report) -> None:
        number = 0
        while True:
            try:
                message = _read(file, self._secret, "REPORT", number)
            except (OSError, ValueError):  # the job has ended, or this is no process of it
                return
            connection.settimeout(None)
            _write(
                file,
                self._secret,
                "ANSWER",
                number,
                {"continues": report(message["metrics"], message["folder"])},
            )
            number += 1


def _nonce(number: int) -> str:
    return f"{0:032x}.{number}"  # one connection, one secret: the number is enough


def _write(file: BinaryIO, secret: str, kind: str, number: int, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    file.write(sign(secret, kind, _TARGET, _nonce(number), body).encode() + b" " + body + b"\n")
    file.flush()


def _read(file: BinaryIO, secret: str, kind: str, number: int) -> dict[str, Any]:
    signature, _, body = file.readline().rstrip(b"\n").partition(b" ")
    if not is_signed(
        secret, kind, _TARGET, _nonce(number), body, signature.decode("ascii", "replace")
    ):
        raise ValueError("the connection has ended, or the message is not signed")
    message: dict[str, Any] = json.loads(body)
    return message
