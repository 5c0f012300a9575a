"""A client of an app over a pair of sockets, by each protocol of uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from trainkit.extensions.serving.slow_clients import punctual

TIMEOUT_S = 0.3
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PROTOCOLS = (
    [AutoHTTPProtocol, H11Protocol] if AutoHTTPProtocol is not H11Protocol else [H11Protocol]
)


@pytest.fixture(params=PROTOCOLS, ids=lambda protocol: protocol.__name__)
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[Any, Client], None]]:
    """A function that runs a client of an ASGI app, over a pair of sockets; a hang ends it."""

    async def talk(app: Any, client: Client) -> None:
        config = uvicorn.Config(
            app, http=punctual(request.param, TIMEOUT_S), log_level="critical", access_log=False
        )
        config.load()
        ours, theirs = socket.socketpair()
        protocol: Any = config.http_protocol_class
        state = ServerState()
        await asyncio.get_running_loop().create_connection(
            lambda: protocol(config, state, {}), sock=theirs
        )
        reader, writer = await asyncio.open_connection(sock=ours)
        await asyncio.wait_for(client(reader, writer), 30)
        writer.close()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    yield lambda app, client: asyncio.run(talk(app, client))
