"""A body above max_body_mb: the client reads why, whether it sends all of it or asks before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line
from trainkit.extensions.exporting.export import export
from trainkit.extensions.serving.app import Service, ServiceOptions

SIZE = 8 << 20  # more than the buffers of two sockets hold
HEAD = b"POST /predict HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
TEXT = b"The body is larger than 1 MiB, the most that is taken"
LENGTH = b"content-length: %d\r\n\r\n" % SIZE
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (SIZE, bytes(SIZE))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A served export that takes bodies of 1 MiB."""
    path = tmp_path_factory.mktemp("export") / "line.pt2"
    export(Line(), path, "torch_export", torch.zeros(2, 3))
    return Service(path, ServiceOptions(max_body_mb=1)).app()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b'"}')


@pytest.mark.parametrize(
    ("fields", "body"),
    [(LENGTH, bytes(SIZE)), (b"transfer-encoding: chunked\r\n\r\n", CHUNKS)],
    ids=["length", "chunked"],
)
def test_a_client_that_sends_all_reads_413(
    connect: Any, app: Any, fields: bytes, body: bytes
) -> None:
    """As Python's http.client and requests do: they read nothing before. The connection stays, and
    a later request on it is answered.
    """

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + fields)
        for start in range(0, len(body), 1 << 16):
            writer.write(body[start : start + (1 << 16)])
            await writer.drain()
        answer = await _answer(reader)
        assert answer.startswith(b"HTTP/1.1 413") and TEXT in answer
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert (await _answer(reader)).startswith(b"HTTP/1.1 200")

    connect(app, client)


def test_a_client_that_asks_before_sends_nothing(connect: Any, app: Any) -> None:
    """As curl does: the answer to `Expect: 100-continue` is 413, and the connection is closed: what
    came next could be the body or another request.
    """

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"expect: 100-continue\r\n" + LENGTH)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413") and TEXT in answer
        assert b"connection: close" in answer.lower()

    connect(app, client)


def test_a_body_that_is_never_whole_is_cut_off(connect: Any, app: Any) -> None:
    """A refused client that sends on and on has the time that any client has."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"content-length: 99999999\r\n\r\n")
        assert TEXT in await _answer(reader)
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)

    connect(app, client)
