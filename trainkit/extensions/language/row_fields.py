"""What stands beside the texts of a conversation, for the chat template: tools, calls of them, and
the template's own variables.

Each may be its JSON text, as columns of .parquet files have it, and OpenAI's form has arguments of
calls; a template that received the text would write it as a string, quoted once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import DataError


def tools_of(row: Mapping[Any, Any], place: str) -> Any:
    """Return descriptions of the tools that the assistant may call; None without.

    Raises:
        DataError: they are no list, nor the JSON text of one.
    """
    tools = _of_json(row.get("tools") or None, f"{place}: its tools are")
    if tools is None or (isinstance(tools, Sequence) and not isinstance(tools, str)):
        return tools or None
    raise DataError(
        f"{place}: its tools are of type {type(tools).__name__}; they must be a list of"
        ' descriptions, as [{"type": "function", "function": {"name": ...}}], or its JSON text.'
    )


def template_variables_of(row: Mapping[Any, Any], place: str) -> dict[str, Any]:
    """Return the row's `chat_template_kwargs`, as of TRL: variables of the chat template.

    Raises:
        DataError: they are no mapping, nor the JSON text of one.
    """
    given = _of_json(row.get("chat_template_kwargs") or {}, f"{place}: chat_template_kwargs is")
    if not isinstance(given, Mapping):
        raise DataError(
            f"{place}: chat_template_kwargs is of type {type(given).__name__}; it must be a mapping"
            ' of variables of the chat template, as {"enable_thinking": false}.'
        )
    # a column of datasets has each key of any row, with None where a row lacks it
    return {str(key): value for key, value in given.items() if value is not None}


def parsed_calls(calls: Any, place: str) -> Any:
    """Return the `tool_calls` of a message, with arguments as objects.

    Args:
        calls: as they were read; other types than lists are left as they are, for the template.
        place: the message, for messages to the user.

    Raises:
        DataError: arguments are a text that is no JSON object.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return calls
    return [_parsed(call, f"{place}, tool call {i}") for i, call in enumerate(calls, 1)]


def _parsed(call: Any, place: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _parsed(function, place)}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    # a call without arguments may have no text at all
    arguments = _of_json(text, f"{place}: its arguments are") if text.strip() else {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"{place}: its arguments are the text {text!r}; it must be a JSON object, as"
            ' {"city": "Bern"}, or the object itself.'
        )
    return {**call, "arguments": arguments}


def _of_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} a text that is not JSON: {error}.") from error
