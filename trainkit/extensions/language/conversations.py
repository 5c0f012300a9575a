"""Conversations of files: a .jsonl, a .parquet, or a folder of datasets' save_to_disk; checked row
by row.

A row has "messages", a list of {"role": ..., "content": ...}, and may have "tools" and
"chat_template_kwargs". The names are those of the OpenAI chat format, as transformers' chat
templates take them, and TRL's.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.errors import ConfigError, DataError, did_you_mean
from trainkit.extensions.language.row_fields import (
    parsed_calls,
    template_variables_of,
    tools_of,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
# names of other formats, and what they are called here
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_FORM = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", ...}]}'


class Conversation(NamedTuple):
    """Messages in their order.

    Attributes:
        messages: each a dict of role, content, and what else the chat template reads.
        tools: descriptions of the tools that the assistant may call; None without.
        place: the row, for messages to the user: "chat.jsonl, row 3".
        variables: of the chat template, beside these.
    """

    messages: Sequence[dict[str, Any]]
    tools: Any
    place: str
    variables: Mapping[str, Any] = {}


def read_conversations(source: str | Path) -> list[Conversation]:
    """Return the conversations of a file or folder.

    Raises:
        DataError: it is of another kind or empty, or a row has no messages; it names the row.
        ConfigError: a package that reads it is missing.
    """
    path = Path(source)
    rows = rows_of(path, "conversations")
    conversations = [
        conversation_of(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)
    ]
    if not conversations:
        raise DataError(f"{path} has no rows. A row is a conversation: {_FORM}")
    return conversations


def conversation_of(row: Any, place: str) -> Conversation:
    """Return the conversation of a row.

    Raises:
        DataError: it has no messages, or one of them is not as the format says.
    """
    if not isinstance(row, Mapping) or "messages" not in row:
        has = (
            ", ".join(map(str, row)) if isinstance(row, Mapping) and row else "nothing of the kind"
        )
        hint = ""
        if isinstance(row, Mapping) and "conversations" in row:
            hint = " Rename the column conversations to messages, from to role, value to content."
        raise DataError(f"{place} has no 'messages'; it has {has}.{hint} A row is {_FORM}")
    return Conversation(
        messages_of(row["messages"], place),
        tools_of(row, place),
        place,
        template_variables_of(row, place),
    )


def messages_of(messages: Any, place: str, form: str = _FORM) -> list[dict[str, Any]]:
    """Return a list of messages, checked.

    Args:
        messages: as they were read.
        place: the row, or its column.
        form: what a row is, for messages to the user.

    Raises:
        DataError: it is empty, or a message is not as the format says.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) == 0:
        raise DataError(f"{place}: its messages are empty or no list. A row is {form}")
    return [_message(each, f"{place}, message {i}") for i, each in enumerate(messages, 1)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{place} is {message!r}; it must be a role and a content: {_FORM}")
    own = {str(key): value for key, value in message.items() if value is not None}
    role = own.get("role")
    if role not in ROLES:
        other = _OTHER_NAMES.get(str(role))
        hint = f" Call it '{other}'." if other else did_you_mean(str(role), list(ROLES))
        raise DataError(f"{place} has the role {role!r}; it must be {_either(ROLES)}.{hint}")
    content = own.get("content", "" if own.get("tool_calls") else None)
    if not isinstance(content, str):
        raise DataError(
            f"{place} has a content of type {type(content).__name__}; it must be a text."
            " Pictures and sounds cannot be trained on here."
        )
    if own.get("weight", 1) not in (0, 1):
        raise DataError(
            f"{place} has the weight {own['weight']!r}; it must be 1, or 0 for an answer that is"
            " not trained on."
        )
    if "tool_calls" in own:
        own["tool_calls"] = parsed_calls(own["tool_calls"], place)
    return {**own, "content": content}


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def rows_of(path: Path, kind: str) -> Iterable[Any]:
    """Return the rows of a file or folder.

    Args:
        path: of a .jsonl, a .parquet, or a folder of datasets' save_to_disk.
        kind: what a row is, for messages to the user: "conversations".

    Raises:
        DataError: it is of another kind, or cannot be read.
        ConfigError: a package that reads it is missing.
    """
    if path.is_dir():
        return _of_datasets(path)
    if path.suffix == ".parquet":
        return _of_parquet(path)
    if path.suffix != ".jsonl" or not path.is_file():
        what = "is of another kind" if path.exists() else "does not exist"
        raise DataError(
            f"{path} {what}; give a .jsonl or a .parquet of {kind}, or a folder of datasets'"
            " save_to_disk."
        )
    return _of_jsonl(path)


def _of_jsonl(path: Path) -> Iterable[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}.") from error


def _of_parquet(path: Path) -> Iterable[Any]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"data.file is {path}, which needs pyarrow: pip install 'trainkit[parquet]'"
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    yield from map(_without_gaps, table.to_pylist())


def _of_datasets(path: Path) -> Iterable[Any]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            f"data.file is the folder {path}, which needs datasets: pip install"
            " 'trainkit[datasets]'"
        ) from error
    try:
        held = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a folder of datasets' save_to_disk: {error}") from error
    if isinstance(held, datasets.DatasetDict):
        raise DataError(
            f"{path} has the splits {', '.join(held)}; give the folder of one, as"
            f" {path / next(iter(held), 'train')}."
        )
    yield from map(_without_gaps, held)


def _without_gaps(value: Any) -> Any:
    """Return a value of a table without the keys that are None, at any depth.

    A table has each key of any row, as the arguments of each tool's calls: a template would write
    them as null (TRL leaves them out too: data_utils.remove_none_values).
    """
    if isinstance(value, list):
        return [_without_gaps(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _without_gaps(item) for key, item in value.items() if item is not None}
