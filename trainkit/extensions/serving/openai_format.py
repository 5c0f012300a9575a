"""The format of OpenAI's API for chats and completions: requests as what is asked, answers as JSON.

read_chat, read_completion   body -> TextRequest
reply, chunk, usage          answers -> objects of JSON
refusal                      an error -> an object of JSON
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import DataError, did_you_mean
from trainkit.extensions.language.row_fields import parsed_calls
from trainkit.extensions.language.sampling import Answer, Ask
from trainkit.extensions.serving.body import RequestError, refuse_constant

ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_CHOICES = 128
_MOST_STOPS = 4
_KNOWN = {"model", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "stream_options"}
_KNOWN_OF_CHAT = _KNOWN | {"messages", "max_tokens", "max_completion_tokens"}
_KNOWN_OF_COMPLETION = _KNOWN | {"prompt", "max_tokens"}
_LABELS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # for the server's books
# Fields that this server does not have, and the values that ask for nothing.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}


class OpenAIError(RequestError):
    """A request that is refused, with the field of it that is wrong."""

    def __init__(
        self, text: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(status, text)
        self.param, self.code = param, code


@dataclass(frozen=True)
class TextRequest:
    """What a request asks for.

    Attributes:
        asks: the choices, those of one prompt after the other.
        num_choices: of each prompt (`n`).
        is_chat: whether messages are answered.
        model: the name that it gives.
        stream: whether the answer comes in pieces.
        include_usage: whether a stream ends with the numbers of tokens.
        number: of the answer, unique.
        created: seconds since 1970.
    """

    asks: tuple[Ask, ...]
    num_choices: int
    is_chat: bool
    model: str
    stream: bool
    include_usage: bool
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def read_chat(body: bytes, model: str, most: int) -> TextRequest:
    """Return what a body of /v1/chat/completions asks for.

    Args:
        body: JSON.
        model: the name of the model that answers.
        most: tokens of an answer at most, and by default.

    Raises:
        OpenAIError: it is not legal.
    """
    given = _fields(body, _KNOWN_OF_CHAT, model)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise OpenAIError("messages must be a list of one message or more.", "messages")
    prompt = [_message(one, f"messages[{place}]") for place, one in enumerate(messages)]
    sizes = [name for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(sizes) == 2:
        raise OpenAIError("max_tokens and max_completion_tokens are both given.", "max_tokens")
    length = _integer(given, sizes[0], most, 1, most) if sizes else most
    return _request(given, [prompt], length, is_chat=True)


def read_completion(body: bytes, model: str, most: int) -> TextRequest:
    """Return what a body of /v1/completions asks for; see read_chat."""
    given = _fields(body, _KNOWN_OF_COMPLETION, model)
    prompt = given.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not (isinstance(prompts, list) and prompts and all(isinstance(p, str) for p in prompts)):
        raise OpenAIError("prompt must be a text, or a list of texts.", "prompt")
    length = _integer(given, "max_tokens", min(16, most), 1, most)
    return _request(given, prompts, length, is_chat=False)


def _fields(body: bytes, known: set[str], model: str) -> dict[str, Any]:
    """Return the fields of a request that are not null, with legal names."""
    try:
        content = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise OpenAIError(f"The body is not JSON: {error}.") from None
    if not isinstance(content, dict):
        raise OpenAIError("The body must be a JSON object.")
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            if not any(_same(value, one) for one in _WITHOUT_EFFECT[name]):
                raise OpenAIError(f"{name} is not supported by this server; leave it out.", name)
        elif name not in known | _LABELS:
            near = did_you_mean(name, known)
            raise OpenAIError(f"Unrecognized request argument supplied: {name}.{near}", name)
    if not isinstance(given.get("model"), str):
        raise OpenAIError(f"model is missing; this server has '{model}'.", "model")
    if given["model"] != model:
        raise no_model(given["model"], model)
    return given


def _same(value: Any, other: Any) -> bool:
    """Return whether both are equal; false is not 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def no_model(asked: str, model: str) -> OpenAIError:
    """Return the error of a name that is not the model's."""
    return OpenAIError(
        f"The model '{asked}' does not exist; this server has '{model}'.",
        "model",
        404,
        "model_not_found",
    )


def _message(given: Any, place: str) -> dict[str, Any]:
    """Return a message with its content as one text."""
    if not isinstance(given, dict):
        raise OpenAIError(f"{place} must be an object of role and content.", place)
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise OpenAIError(
            f"{place}.role is {json.dumps(role)}; it must be one of {', '.join(ROLES)}.",
            f"{place}.role",
        )
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise OpenAIError(
                f"{place}.content has a part that is not text; this model reads text alone.",
                f"{place}.content",
            )
        content = "".join(map(str, texts))
    if not isinstance(content, str) and not (content is None and given.get("tool_calls")):
        raise OpenAIError(f"{place}.content must be a text.", f"{place}.content")
    message = {**given, "content": content or ""}
    if given.get("tool_calls"):
        try:
            message["tool_calls"] = parsed_calls(given["tool_calls"], place)
        except DataError as error:
            raise OpenAIError(str(error), f"{place}.tool_calls") from error
    return message


def _request(
    given: dict[str, Any], prompts: Sequence[Any], length: int, is_chat: bool
) -> TextRequest:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise OpenAIError("stop must be a text, or a list of texts, none of them empty.", "stop")
    if len(stops) > _MOST_STOPS:
        raise OpenAIError(f"stop has {len(stops)} texts; {_MOST_STOPS} are the most.", "stop")
    number = _integer(given, "n", 1, 1, _MOST_CHOICES)
    seed = _integer(given, "seed", secrets.randbits(31), 0, 2**63 - 1 - _MOST_CHOICES)
    top_k = _integer(given, "top_k", 1, 1, 2**31) if "top_k" in given else None
    top_p = _number(given, "top_p", 1.0, 0, 1)
    if top_p == 0:
        raise OpenAIError("top_p is 0; it must be above 0, and 1 or less.", "top_p")
    temperature = _number(given, "temperature", 1.0, 0, 2)
    stream = given.get("stream", False)
    options = given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise OpenAIError("stream must be true or false.", "stream")
    if not isinstance(options, dict) or not set(options) <= {"include_usage"}:
        raise OpenAIError("stream_options must be {'include_usage': true}.", "stream_options")
    if options and not stream:
        raise OpenAIError("stream_options is given without stream=true.", "stream_options")
    asks = [
        Ask(prompt, length, temperature, top_k, top_p, seed + choice, tuple(stops))
        for prompt in prompts
        for choice in range(number)
    ]
    usage = bool(options.get("include_usage"))
    return TextRequest(tuple(asks), number, is_chat, given["model"], stream, usage)


def _number(given: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise OpenAIError(
            f"{name} is {json.dumps(value)}; it must be a number of {low:g} to {high:g}.", name
        )
    return float(value)


def _integer(given: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise OpenAIError(
            f"{name} is {json.dumps(value)}; it must be a whole number of {low} to {high}.", name
        )
    return value


def reply(request: TextRequest, answers: Sequence[Answer], texts: Sequence[str]) -> dict[str, Any]:
    """Return the whole answer of a request."""
    choices = [
        {
            "index": place,
            **(
                {"message": {"role": "assistant", "content": text}}
                if request.is_chat
                else {"text": text}
            ),
            "logprobs": None,
            "finish_reason": one.finish,
        }
        for place, (one, text) in enumerate(zip(answers, texts, strict=True))
    ]
    name = "chat.completion" if request.is_chat else "text_completion"
    return _object(request, name, choices) | {"usage": usage(request, answers)}


def chunk(request: TextRequest, place: int, text: str | None, finish: str | None) -> dict[str, Any]:
    """Return a part of a streamed answer: a text; None before the first one of a chat."""
    choice: dict[str, Any] = {"index": place, "logprobs": None, "finish_reason": finish}
    if request.is_chat:
        begins = {"role": "assistant", "content": ""}
        choice["delta"] = begins if text is None else {"content": text} if text else {}
        return _object(request, "chat.completion.chunk", [choice])
    choice["text"] = text or ""
    return _object(request, "text_completion", [choice])


def last_chunk(request: TextRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the part of a stream that has the numbers of tokens."""
    name = "chat.completion.chunk" if request.is_chat else "text_completion"
    return _object(request, name, []) | {"usage": usage(request, answers)}


def _object(request: TextRequest, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{request.number}",
        "object": name,
        "created": request.created,
        "model": request.model,
        "choices": choices,
    }


def usage(request: TextRequest, answers: Sequence[Answer]) -> dict[str, int]:
    """Return the numbers of tokens: a prompt counts once, the token that ends an answer does not."""
    prompts = sum(one.num_prompt for one in answers[:: request.num_choices])
    made = sum(one.num_made for one in answers)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": made,
        "total_tokens": prompts + made,
    }


def refusal(error: RequestError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    of = {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    return {"error": {"message": str(error), "type": kind, **of}}


Read = Callable[[bytes, str, int], TextRequest]
