"""Clients that hold a connection of the server are cut off:
slow headers, a slow body, an answer that is not read.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extensions.serving.conftest import TIMEOUT_S
from tests.helpers.toy import Line
from trainkit.extensions.exporting.export import export
from trainkit.extensions.serving.app import Service, ServiceOptions

REQUEST = (
    b"POST /predict HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length:"
    b" 16\r\n\r\n"
)


async def late(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request after the limit."""
    while (await receive())["more_body"]:
        pass
    await asyncio.sleep(2 * TIMEOUT_S)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


async def _drip(writer: asyncio.StreamWriter, text: bytes) -> None:
    try:
        while True:
            for byte in text:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(TIMEOUT_S / 10)
    except OSError:
        pass


@pytest.mark.parametrize(
    "before", [b"", b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"], ids=["first", "second"]
)
def test_headers_that_never_end_are_cut_off(connect: Any, before: bytes) -> None:
    """A byte from time to time holds no connection,
    neither of the first request nor of a later one.
    """

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if before:
            writer.write(before)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"POST / HTTP/1.1\r\n")
        dripping = asyncio.ensure_future(_drip(writer, b"x: y\r\n"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        dripping.cancel()

    connect(late, client)


def test_a_request_may_wait_for_its_answer(connect: Any) -> None:
    """The limit is the client's: an answer that takes longer arrives."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(REQUEST + bytes(16))
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    connect(late, client)


def test_an_answer_that_is_not_read_is_cut_off(connect: Any) -> None:
    """A client that reads nothing holds neither the answer nor its task."""
    ended: list[bool] = []

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        ended.append(True)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        while not ended:
            await asyncio.sleep(0.01)

    connect(large, client)


def test_a_body_that_never_ends_is_408(connect: Any, tmp_path: Path) -> None:
    """It is answered, and the connection closed."""
    path = tmp_path / "line.pt2"
    export(Line(), path, "torch_export", torch.zeros(2, 3))
    app = Service(path, ServiceOptions(client_timeout_s=TIMEOUT_S)).app()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST.replace(b"16", b"9999"))
        dripping = asyncio.ensure_future(_drip(writer, b" "))
        answer = await reader.readuntil(b"}")
        dripping.cancel()
        assert (
            answer.startswith(b"HTTP/1.1 408")
            and b"did not arrive within 0.3 s (client_timeout_s)" in answer
        )
        assert b"connection: close" in answer.lower()

    connect(app, client)
