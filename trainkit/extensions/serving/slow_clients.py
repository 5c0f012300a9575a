"""Cuts off clients that hold a connection: a byte of the headers a minute, or an answer that is
never read.

The body of a request is the app's to wait for (app.py): Ray's proxy, too, leads it there.
"""

from __future__ import annotations

import asyncio
from typing import Any


def punctual(protocol: Any, timeout_s: float) -> type[asyncio.Protocol]:
    """Return a protocol of uvicorn with a limit of time for headers, and for each time that the
    client lets the answer wait.

    Args:
        protocol: HttpToolsProtocol or H11Protocol; its `cycle` is the request whose headers are
            complete.
        timeout_s: the limit.
    """

    class Punctual(protocol):  # type: ignore[misc]
        _headers: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._headers = _abort_later(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                _cancel(self._headers)
                self._headers = None
            elif self._headers is None:  # of the next request
                self._headers = _abort_later(self.transport)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading = _abort_later(self.transport)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self._reading)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            _cancel(self._headers)
            _cancel(self._reading)

    def _abort_later(transport: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(timeout_s, transport.abort)

    return Punctual


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
