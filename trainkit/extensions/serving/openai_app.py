"""The ASGI app of a served language model, in the format of OpenAI's API.

POST /v1/chat/completions   messages -> an answer, whole or as server-sent events
POST /v1/completions        a text -> what continues it
GET /v1/models, /v1/models/NAME, /health, /metrics
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from trainkit.errors import ConfigError
from trainkit.extensions.exporting.program import first_line
from trainkit.extensions.language.sampling import Answer, begin
from trainkit.extensions.language.sources import ModelSource
from trainkit.extensions.serving.app import ServiceOptions
from trainkit.extensions.serving.body import RequestError, read_body
from trainkit.extensions.serving.failures import is_of_device, is_out_of_memory
from trainkit.extensions.serving.openai_format import (
    OpenAIError,
    Read,
    TextRequest,
    chunk,
    last_chunk,
    no_model,
    read_chat,
    read_completion,
    refusal,
    reply,
)
from trainkit.extensions.serving.text_batching import TextBatcher

_log = logging.getLogger("trainkit")
_GONE = RequestError(400, "The client has gone.")


class TextService:
    """Answers the requests of one process."""

    def __init__(
        self, source: ModelSource, name: str, max_new_tokens: int, options: ServiceOptions
    ) -> None:
        """Build it.

        Args:
            source: the model.
            name: the model's, in requests.
            max_new_tokens: tokens of an answer at most.
            options: see there; `max_batch_size` and `max_waiting` count answers.
        """
        self._source, self._name, self._most = source, name, max_new_tokens
        self._options = options
        self._batcher = TextBatcher(
            source, options.max_batch_size, options.batch_wait_ms / 1e3, options.max_waiting
        )
        self._codes: Counter[int] = Counter()
        self._num_tokens: Counter[str] = Counter()
        self._created = int(time.time())
        self._fault = ""  # why the device can be used no more

    def app(self) -> Starlette:
        """Return the app."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        return Starlette(
            routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed}
        )

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, read_chat)

    async def _complete(self, request: Request) -> Response:
        return await self._respond(request, read_completion)

    async def _respond(self, request: Request, read: Read) -> Response:
        try:
            response = await self._answer(request, read)
        except RequestError as error:
            response = JSONResponse(refusal(error), error.status, error.headers)
        except ClientDisconnect:
            response = JSONResponse(refusal(_GONE), 400)
        except Exception as error:
            _log.exception("A request failed.")
            failure = self._failure(error)
            response = JSONResponse(refusal(failure), failure.status)
        self._codes[response.status_code] += 1
        return response

    def _failure(self, error: Exception) -> RequestError:
        """Return what a client reads of an error of the model's."""
        if is_out_of_memory(error):
            return RequestError(
                503, "The server has too little memory for this request. Try again later."
            )
        if is_of_device(error):
            self._fault = (
                f"The model's device has failed ({first_line(error)}). Restart the service."
            )
        return _failure(error)

    async def _answer(self, request: Request, read: Read) -> Response:
        options = self._options
        body = await read_body(request, options.max_body_mb, options.client_timeout_s)
        asked = read(body, self._name, self._most)
        self._batcher.check_room(len(asked.asks))
        answers = self._begin(asked)
        if asked.stream:
            return StreamingResponse(self._events(asked, answers), media_type="text/event-stream")
        made = asyncio.ensure_future(self._whole(answers))
        left = asyncio.ensure_future(_until_left(request))
        await asyncio.wait({made, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not made.done():
            made.cancel()
            raise ClientDisconnect
        return JSONResponse(reply(asked, answers, made.result()))

    def _begin(self, asked: TextRequest) -> list[Answer]:
        try:
            return [begin(self._source, ask) for ask in asked.asks]
        except ConfigError as error:
            is_long = "so that one more fits the model" in str(error)
            raise OpenAIError(
                str(error),
                "messages" if asked.is_chat else "prompt",
                code="context_length_exceeded" if is_long else None,
            ) from error

    async def _whole(self, answers: Sequence[Answer]) -> list[str]:
        texts = [""] * len(answers)
        async for piece in self._batcher.pieces(answers):
            texts[piece.place] += piece.text
        self._count(answers)
        return texts

    async def _events(self, asked: TextRequest, answers: Sequence[Answer]) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        if asked.is_chat:
            for place in range(len(answers)):
                yield _event(chunk(asked, place, None, None))
        try:
            async for piece in self._batcher.pieces(answers):
                if piece.text:
                    yield _event(chunk(asked, piece.place, piece.text, None))
                if piece.finish:
                    yield _event(chunk(asked, piece.place, "", piece.finish))
        except Exception as error:  # the status has been sent: the stream says it
            _log.exception("A request failed.")
            yield _event(refusal(self._failure(error)))
            return
        self._count(answers)
        if asked.include_usage:
            yield _event(last_chunk(asked, answers))
        yield "data: [DONE]\n\n"

    def _count(self, answers: Sequence[Answer]) -> None:
        self._num_tokens["prompt"] += sum(one.num_prompt for one in answers)
        self._num_tokens["completion"] += sum(one.num_made for one in answers)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        asked = str(request.path_params["name"])
        if asked != self._name:
            return JSONResponse(refusal(no_model(asked, self._name)), 404)
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "trainkit",
        }

    async def _health(self, request: Request) -> Response:
        if self._fault:
            return JSONResponse({"status": "failed", "error": self._fault}, 503)
        return JSONResponse({"status": "ok", "model": self._name})

    async def _metrics(self, request: Request) -> Response:
        codes, tokens = sorted(self._codes.items()), sorted(self._num_tokens.items())
        lines = [
            "# TYPE trainkit_requests_total counter",
            *(f'trainkit_requests_total{{code="{code}"}} {count}' for code, count in codes),
            "# TYPE trainkit_tokens_total counter",
            *(f'trainkit_tokens_total{{of="{of}"}} {count}' for of, count in tokens),
            "# TYPE trainkit_batch_answers summary",
            f"trainkit_batch_answers_sum {self._batcher.num_answers}",
            f"trainkit_batch_answers_count {self._batcher.num_batches}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


async def _until_left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _failure(error: BaseException) -> RequestError:
    return RequestError(
        500, f"The service failed: {type(error).__name__}. Its log has the details."
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = (
        f"{request.method} {request.url.path}: {error.detail}. There are POST /v1/chat/completions,"
        " POST /v1/completions, GET /v1/models, GET /health and GET /metrics."
    )
    return JSONResponse(refusal(RequestError(error.status_code, text)), error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse(refusal(_failure(error)), 500)
