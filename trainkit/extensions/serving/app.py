"""The ASGI app of a served model; every answer but /metrics is JSON.

POST /predict   {"inputs": ...} as application/json, or a picture as image/jpeg or image/png -> {"predictions": [...]}
GET /           the description of the input      GET /health   200 while it answers, 503 after its device has failed
GET /metrics    for Prometheus
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trainkit.extensions.serving.batching import Batcher
from trainkit.extensions.serving.body import RequestError, read_body
from trainkit.extensions.serving.model import Sample, ServedModel

_PICTURES = ("image/jpeg", "image/png")


@dataclass(frozen=True)
class ServiceOptions:
    """How requests are answered.

    Attributes:
        max_batch_size: samples of a call of the model at most.
        batch_wait_ms: so long the first sample of a batch waits for others.
        max_body_mb: the largest body of a request.
        max_waiting: samples that may wait; more are refused with 503, and with 413 if they come in
            one request.
        client_timeout_s: within it a client sends its request, and reads a part of the answer; a
            slower one is cut off.
    """

    max_batch_size: int = 32
    batch_wait_ms: float = 5.0
    max_body_mb: float = 16.0
    max_waiting: int = 1024
    client_timeout_s: float = 60.0


class Service:
    """Answers the requests of one process."""

    def __init__(self, path: Path, options: ServiceOptions) -> None:
        """Load the model; see ServedModel."""
        self.model = ServedModel(path)
        self._options = options
        self._batcher = Batcher(
            self.model, options.max_batch_size, options.batch_wait_ms / 1e3, options.max_waiting
        )
        self._codes: Counter[int] = Counter()
        self._seconds = 0.0

    def app(self) -> Starlette:
        """Return the app."""
        routes = [
            Route("/", self._describe),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/predict", self._predict, methods=["POST"]),
        ]
        app = Starlette(
            routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed}
        )
        app.state.service = self
        return app

    async def _predict(self, request: Request) -> Response:
        begun = time.perf_counter()
        try:
            samples = await self._read(request)
            response = _answer(await self._batcher.predict(samples))
        except RequestError as error:
            response = JSONResponse({"error": str(error)}, error.status, error.headers)
        except ClientDisconnect:
            response = JSONResponse({"error": "the client has gone"}, 400)
        self._codes[response.status_code] += 1
        self._seconds += time.perf_counter() - begun
        return response

    async def _read(self, request: Request) -> list[Sample]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and kind not in _PICTURES:
            names = ", ".join(("application/json", *_PICTURES))
            raise RequestError(415, f"The content type is '{kind}'; it must be one of {names}.")
        body = await read_body(request, self._options.max_body_mb, self._options.client_timeout_s)
        return (
            [self.model.sample_of_picture(body)]
            if kind in _PICTURES
            else self.model.samples_of_json(body)
        )

    async def _describe(self, request: Request) -> Response:
        description: dict[str, Any] = asdict(self.model.description)
        return JSONResponse({"file": self.model.path.name, **description})

    async def _health(self, request: Request) -> Response:
        if self.model.fault:
            return JSONResponse({"status": "failed", "error": self.model.fault}, 503)
        return JSONResponse({"status": "ok", "file": self.model.path.name})

    async def _metrics(self, request: Request) -> Response:
        answered = sum(self._codes.values())
        lines = [
            "# TYPE trainkit_requests_total counter",
            *(
                f'trainkit_requests_total{{code="{code}"}} {count}'
                for code, count in sorted(self._codes.items())
            ),
            "# TYPE trainkit_request_seconds summary",
            f"trainkit_request_seconds_sum {self._seconds:.6f}",
            f"trainkit_request_seconds_count {answered}",
            "# TYPE trainkit_batch_samples summary",
            f"trainkit_batch_samples_sum {self._batcher.num_samples}",
            f"trainkit_batch_samples_count {self._batcher.num_batches}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _answer(predictions: list[dict[str, Any]]) -> JSONResponse:
    try:
        return JSONResponse({"predictions": predictions})
    except ValueError:
        raise RequestError(
            400, "The model's output for this input has NaN or Inf, which JSON does not have."
        ) from None


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = (
        f"{request.method} {request.url.path}: {error.detail}. There are POST /predict, GET /, GET"
        " /health and GET /metrics."
    )
    return JSONResponse({"error": text}, error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(
        {"error": f"The service failed: {type(error).__name__}. Its log has the details."}, 500
    )
