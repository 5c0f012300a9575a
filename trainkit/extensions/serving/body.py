"""The body of a request, read within limits of size and time; and what a request is refused with."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from starlette.requests import Request


class RequestError(Exception):
    """A request that cannot be answered; `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def read_body(request: Request, max_mb: float, timeout_s: float) -> bytes:
    """Return the body.

    Raises:
        RequestError: it is larger, or takes longer.
    """
    try:
        return await asyncio.wait_for(_read(request, max_mb), timeout_s)
    except asyncio.TimeoutError:
        raise RequestError(
            408, f"The body did not arrive within {timeout_s:g} s (client_timeout_s)."
        ) from None


async def _read(request: Request, max_mb: float) -> bytes:
    most = int(max_mb * 2**20)
    announced = request.headers.get("content-length", "")
    refusal = RequestError(413, f"The body is larger than {max_mb:g} MiB, the most that is taken.")
    if announced.isdecimal() and int(announced) > most:
        raise refusal
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise refusal
    return bytes(body)


def refuse_constant(name: str) -> NoReturn:
    """Raise for NaN and Infinity, which Python's json reads."""
    raise ValueError(f"{name} is not a number of JSON")
