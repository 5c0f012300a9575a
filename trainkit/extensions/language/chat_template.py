"""Conversations as tokens, by the tokenizer's own chat template; and which of them are answers.

encode_all        conversations -> documents, cut or left out by rule, and what was counted
  spans_of          where the answers stand in the rendered text

A template that marks answers with {% generation %} is believed. Of others an answer is what the
text gains by its message, after the template's prompt for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.conversations import Conversation
from trainkit.extensions.language.packing import IGNORED, Document

Loss = Literal["answers", "all"]
TooLong = Literal["cut", "leave_out", "refuse"]
_AT_ONCE = 1000  # conversations that the tokenizer encodes together, on all cores
# arguments of apply_chat_template that a row sets by other columns, or never
_OURS = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt"}
_OURS |= {"continue_final_message", "tokenize", "return_dict", "return_assistant_tokens_mask"}
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass
class Encoded:
    """Documents in two arrays, which workers share.

    Attributes:
        tokens: all token numbers, one document after the other; int32.
        trained: whether a token is to be predicted; bool.
        ends: where each document ends; int64.
        num_cut: documents of which the end was left out.
        num_too_long: documents that were left out.
        num_silent: documents left out since none of their tokens is to be predicted.
    """

    tokens: Any
    trained: Any
    ends: Any
    num_cut: int = 0
    num_too_long: int = 0
    num_silent: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> list[int]:
        """Return the tokens of each document."""
        return [int(length) for length in np.diff(self.ends, prepend=0)]

    def document(self, number: int) -> Document:
        """Return one."""
        own = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        ids = torch.from_numpy(self.tokens[own].astype(np.int64))
        return Document(ids, ids.where(torch.from_numpy(self.trained[own]), IGNORED))


def use_template(tokenizer: Any, file: str | None, name: str) -> None:
    """Give a tokenizer the chat template of a file, if there is one.

    Raises:
        ConfigError: it has none, nor does the user give one.
    """
    if file is not None:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"data.tokenizer is '{name}', which has no chat template. Take a tokenizer of a chat"
            " model, or give a template: data.chat_template=FILE.jinja"
        )


def encode_all(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    loss: Loss,
    max_length: int,
    too_long: TooLong,
) -> Encoded:
    """Return the conversations as documents.

    Args:
        conversations: as they were read.
        tokenizer: a fast one of transformers, with a chat template.
        loss: whether only the assistant's messages are predicted, or all tokens.
        max_length: tokens of a document at most.
        too_long: what happens to a longer one: its end is cut off, or it is left out, or an error.

    Raises:
        DataError: the template refuses a conversation, or hides where an answer stands; a document
            is too long, and `too_long` is "refuse".
    """
    counts = {"cut": 0, "leave_out": 0, "silent": 0}
    tokens: list[Any] = []
    trained: list[Any] = []
    ends = [0]
    for begin in range(0, len(conversations), _AT_ONCE):
        batch = conversations[begin : begin + _AT_ONCE]
        for of, (ids, marks) in zip(batch, _encode(batch, tokenizer, loss), strict=True):
            if len(ids) > max_length:
                if too_long == "refuse":
                    raise DataError(
                        f"{of.place} has {len(ids)} tokens; data.max_length is {max_length}. Raise"
                        " it, or set data.too_long to cut or leave_out."
                    )
                counts[too_long] += 1
                if too_long == "leave_out":
                    continue
                ids, marks = ids[:max_length], marks[:max_length]
            if not marks[1:].any():
                counts["silent"] += 1
                continue
            tokens.append(ids)
            trained.append(marks)
            ends.append(ends[-1] + len(ids))
    return Encoded(
        np.concatenate([np.empty(0, np.int32), *tokens]),
        np.concatenate([np.empty(0, np.bool_), *trained]),
        np.array(ends[1:], np.int64),
        counts["cut"],
        counts["leave_out"],
        counts["silent"],
    )


def _encode(batch: Sequence[Conversation], tokenizer: Any, loss: Loss) -> Iterator[tuple[Any, Any]]:
    """Yield each conversation's token numbers, and which of them are to be predicted."""
    has_marks = bool(_MARKS_ANSWERS.search(str(tokenizer.chat_template)))
    texts = [render(tokenizer, conversation) for conversation in batch]
    # the template writes the special tokens
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    for i, conversation in enumerate(batch):
        ids = np.array(encoded["input_ids"][i], np.int32)
        if loss == "all":
            yield ids, np.ones(len(ids), np.bool_)
            continue
        if has_marks and all(message.get("weight", 1) for message in conversation.messages):
            made = render(tokenizer, conversation, tokens=True)
            yield ids, np.array(made["assistant_masks"], np.bool_)
            continue
        begins = np.array(encoded["offset_mapping"][i], np.int64).reshape(-1, 2)[:, 0]
        marks = np.zeros(len(ids), np.bool_)
        for first, last in spans_of(tokenizer, conversation, texts[i]):
            marks |= (begins >= first) & (begins < last)
        yield ids, marks


def spans_of(tokenizer: Any, conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
    """Yield where the answers begin and end in the rendered text, in characters.

    Raises:
        DataError: the template writes an answer differently once others follow it.
    """
    messages = conversation.messages
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("weight", 1):
            continue
        if i == 0:
            raise DataError(
                f"{conversation.place} begins with an answer, and nothing that it answers. Put a"
                " user's or a system message before it, or set data.loss=all."
            )
        asked = render(tokenizer, conversation._replace(messages=messages[:i]), asks=True)
        said = render(tokenizer, conversation._replace(messages=messages[: i + 1]))
        if not (text.startswith(asked) and text.startswith(said)):
            raise DataError(
                f"{conversation.place}, message {i + 1}: the chat template writes it differently"
                " once others follow it, so its tokens cannot be located. Set data.loss=all, or"
                " give a template that marks answers with {% generation %}:"
                " data.chat_template=FILE.jinja"
            )
        yield len(asked), len(said)


def render(
    tokenizer: Any, conversation: Conversation, asks: bool = False, tokens: bool = False
) -> Any:
    """Return the text of a conversation, or its tokens.

    Args:
        tokenizer: has the chat template.
        conversation: the messages.
        asks: whether the template's prompt for an answer follows.
        tokens: for a dict of input_ids and assistant_masks.

    Raises:
        DataError: the template refuses it, or does not read one of its variables.
    """
    _check_variables(tokenizer, conversation)
    messages = [_without_weight(message) for message in conversation.messages]
    more = {"return_dict": True, "return_assistant_tokens_mask": True} if tokens else {}
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=conversation.tools,
            tokenize=tokens,
            add_generation_prompt=asks,
            **more,
            **conversation.variables,
        )
    except Exception as error:  # of a template: anything
        raise DataError(
            f"{conversation.place}: the chat template refuses it: {type(error).__name__}: {error}"
        ) from error


def _check_variables(tokenizer: Any, conversation: Conversation) -> None:
    for name in conversation.variables:
        if name in _OURS:
            raise DataError(
                f"{conversation.place}: chat_template_kwargs has '{name}', which is the row's own"
                " or trainkit's. Leave it out."
            )
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise DataError(
                f"{conversation.place}: chat_template_kwargs has '{name}', which the chat template"
                " does not read. Leave it out, or give a template that does:"
                " data.chat_template=FILE.jinja"
            )


def _without_weight(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "weight"}
