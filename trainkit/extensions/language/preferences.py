"""Preference pairs of files: two answers to a prompt, of which one is better; and their tokens.

read_pairs      a file -> pairs, checked row by row
encode_pairs    pairs -> documents, cut or left out by rule, and what was counted

The formats are those of TRL: "prompt", "chosen" and "rejected" as texts or as lists of messages;
without "prompt" it is what the other two begin with.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainkit.errors import DataError
from trainkit.extensions.language.chat_template import Encoded, TooLong, render
from trainkit.extensions.language.conversations import Conversation, messages_of, rows_of
from trainkit.extensions.language.row_fields import template_variables_of, tools_of

_FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages.'
_AT_ONCE = 1000  # pairs that the tokenizer encodes together, on all cores


class AnswerPair(NamedTuple):
    """Two answers to a prompt.

    Attributes:
        prompt: a text, or messages, as the other two.
        chosen: the better answer.
        rejected: the other one.
        tools: descriptions of the tools that the assistant may call; None without.
        place: the row, for messages to the user: "pairs.jsonl, row 3".
        variables: of the chat template, beside these.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    tools: Any
    place: str
    variables: Mapping[str, Any] = {}

    @property
    def is_text(self) -> bool:
        """Return whether it has no messages, and so needs no chat template."""
        return isinstance(self.prompt, str)


@dataclass
class EncodedPairs:
    """Pairs in tokens.

    Attributes:
        documents: of pair i the chosen one is document 2 i, the rejected one 2 i + 1. They count
            pairs: a pair is cut if one of its documents is.
        num_equal: pairs left out since both documents are the same, perhaps once they are cut.
        num_rewritten: pairs in which the prompt by itself ends with other tokens than before an
            answer, which then begins where they differ.
    """

    documents: Encoded
    num_equal: int = 0
    num_rewritten: int = 0

    def __len__(self) -> int:
        return len(self.documents) // 2

    def digest(self) -> str:
        """Return 16 digits that follow from all tokens, and from which of them are predicted."""
        held = self.documents
        result = hashlib.sha256()
        for array in (held.tokens, held.trained, held.ends):
            result.update(np.ascontiguousarray(array).tobytes())
        return result.hexdigest()[:16]


def read_pairs(source: str | Path) -> list[AnswerPair]:
    """Return the pairs of a file or folder.

    Raises:
        DataError: it is of another kind or empty, or a row is not a pair; it names the row.
        ConfigError: a package that reads it is missing.
    """
    path = Path(source)
    rows = rows_of(path, "preference pairs")
    pairs = [pair_of(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    if not pairs:
        raise DataError(f"{path} has no rows. A row is a preference pair: {_FORM}")
    return pairs


def pair_of(row: Any, place: str) -> AnswerPair:
    """Return the pair of a row.

    Raises:
        DataError: it is not one.
    """
    if not isinstance(row, Mapping) or any(row.get(key) is None for key in ("chosen", "rejected")):
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        hint = ""
        if isinstance(row, Mapping) and "messages" in row:
            hint = " Conversations without a rejected answer are data of conf=sft."
        raise DataError(
            f"{place} has no pair of 'chosen' and 'rejected'; it has {has}.{hint} A row is {_FORM}"
        )
    prompt = row.get("prompt")
    chosen, rejected = (_side(row[key], f"{place}, {key}") for key in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{place}: chosen and rejected are a text and a list of messages. A row is {_FORM}"
        )
    if isinstance(prompt, str) == isinstance(chosen, str) and prompt is not None:
        prompt = _side(prompt, f"{place}, prompt")
    elif prompt is None or isinstance(prompt, str):
        text = prompt
        prompt, chosen, rejected = _split(chosen, rejected, place)
        if text is not None and text not in [message["content"] for message in prompt]:
            raise DataError(
                f"{place} has a text as its prompt, and messages that begin otherwise. Leave out"
                f" the column prompt, or make it a list of messages. A row is {_FORM}"
            )
    else:
        raise DataError(
            f"{place}: its prompt is a list of messages, and its answers texts. A row is {_FORM}"
        )
    variables = template_variables_of(row, place)
    if variables and isinstance(prompt, str):
        raise DataError(
            f"{place} has chat_template_kwargs, which have no effect on texts: no chat template"
            " writes them. Leave the column out, or give lists of messages."
        )
    return AnswerPair(prompt, chosen, rejected, tools_of(row, place), place, variables)


def _side(value: Any, place: str) -> Any:
    return value if isinstance(value, str) else messages_of(value, place, _FORM)


def _split(chosen: Any, rejected: Any, place: str) -> tuple[Any, Any, Any]:
    """Return what both begin with, and the rest of each: one message or one letter at least."""
    size = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), -1)
    if size < 0:  # one is the beginning of the other
        size = min(len(chosen), len(rejected)) - 1
    elif size and chosen[size - 1] == " ":
        size -= 1  # a space belongs to the word that follows
    if size < 1:
        raise DataError(
            f"{place} has no prompt, and chosen and rejected share no beginning that could be it."
            f" A row is {_FORM}"
        )
    return chosen[:size], chosen[size:], rejected[size:]


def encode_pairs(
    pairs: Sequence[AnswerPair], tokenizer: Any, max_length: int, too_long: TooLong
) -> EncodedPairs:
    """Return the pairs as documents. All tokens that follow the prompt are predicted.

    Args:
        pairs: as they were read.
        tokenizer: of transformers, with a chat template if there are messages.
        max_length: tokens of a document at most, with the prompt.
        too_long: what happens to a pair with a longer one: the ends of both are cut off, or it is
            left out, or an error.

    Raises:
        DataError: the template refuses a pair, or one is too long, and `too_long` is "refuse".
    """
    counts = {"cut": 0, "leave_out": 0, "silent": 0, "equal": 0, "rewritten": 0}
    tokens: list[Any] = []
    trained: list[Any] = []
    for begin in range(0, len(pairs), _AT_ONCE):
        batch = pairs[begin : begin + _AT_ONCE]
        for of, (prompt, *both) in zip(batch, _encode(batch, tokenizer), strict=True):
            size = min(_num_shared(prompt, ids) for ids in both)
            counts["rewritten"] += size < len(prompt)
            longest = max(map(len, both))
            if longest > max_length:
                if too_long == "refuse":
                    raise DataError(
                        f"{of.place} has {longest} tokens; data.max_length is {max_length}. Raise"
                        " it, or set data.too_long to cut or leave_out."
                    )
                counts[too_long] += 1
                if too_long == "leave_out":
                    continue
                both = [ids[:max_length] for ids in both]
            if size >= min(map(len, both)):
                counts["silent"] += 1
            elif np.array_equal(*both):
                counts["equal"] += 1
            else:
                tokens += both
                trained += [np.arange(len(ids)) >= size for ids in both]
    documents = Encoded(
        np.concatenate([np.empty(0, np.int32), *tokens]),
        np.concatenate([np.empty(0, np.bool_), *trained]),
        np.cumsum([len(ids) for ids in tokens], dtype=np.int64),
        counts["cut"],
        counts["leave_out"],
        counts["silent"],
    )
    return EncodedPairs(documents, counts["equal"], counts["rewritten"])


def _encode(batch: Sequence[AnswerPair], tokenizer: Any) -> Iterator[list[Any]]:
    """Yield the token numbers of each pair: of the prompt, and of the prompt with each answer."""
    for is_text, pairs in itertools.groupby(batch, lambda pair: pair.is_text):
        texts = [text for pair in pairs for text in _texts(pair, tokenizer)]
        # a template writes the special tokens
        encoded = tokenizer(texts, add_special_tokens=is_text)["input_ids"]
        for i in range(0, len(encoded), 3):
            yield [np.array(ids, np.int32) for ids in encoded[i : i + 3]]


def _texts(pair: AnswerPair, tokenizer: Any) -> Iterator[str]:
    if pair.is_text:
        end = tokenizer.eos_token or ""
        yield pair.prompt
        for answer in (pair.chosen, pair.rejected):
            yield pair.prompt + answer + end * (not answer.endswith(end))
        return
    asked = Conversation(pair.prompt, pair.tools, pair.place, pair.variables)
    yield render(tokenizer, asked, asks=True)
    for answer in (pair.chosen, pair.rejected):
        yield render(tokenizer, asked._replace(messages=[*pair.prompt, *answer]))


def _num_shared(one: Any, other: Any) -> int:
    """Return with how many equal numbers both begin."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
