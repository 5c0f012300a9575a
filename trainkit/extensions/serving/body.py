"""The body of a request, read within limits of size and time; and what a request is refused with."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from starlette.requests import Request


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP's.
        text: why.
        closes: the connection ends after the answer: what comes next on it may be a late body.
            Otherwise the rest of the body is read and dropped: a client that sends all of it before
            it reads would lose the answer with the connection.
    """

    def __init__(self, status: int, text: str, *, closes: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.headers = {"connection": "close"} if closes else None


async def read_body(request: Request, max_mb: float, timeout_s: float) -> bytes:
    """Return the body.

    Raises:
        RequestError: it is larger, or takes longer.
    """
    try:
        return await asyncio.wait_for(_read(request, max_mb), timeout_s)
    except asyncio.TimeoutError:
        raise RequestError(
            408, f"The body did not arrive within {timeout_s:g} s (client_timeout_s).", closes=True
        ) from None


async def _read(request: Request, max_mb: float) -> bytes:
    most = int(max_mb * 2**20)
    announced = request.headers.get("content-length", "")
    text = f"The body is larger than {max_mb:g} MiB, the most that is taken (max_body_mb)."
    if announced.isdecimal() and int(announced) > most:
        # then the client sends the body only if it is asked to
        asks = request.headers.get("expect", "").lower() == "100-continue"
        raise RequestError(413, text, closes=asks)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise RequestError(413, text)
    return bytes(body)


def refuse_constant(name: str) -> NoReturn:
    """Raise for NaN and Infinity, which Python's json reads."""
    raise ValueError(f"{name} is not a number of JSON")
