"""Models with their tokenizers, as what makes texts reads them.

ModelSource         what is asked of both
TransformersSource  a causal model of transformers; stops_of: the tokens that end its answers
TokenSource         a model of the tokens that `data tokens` writes
load_tokenizer      a tokenizer of transformers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from trainkit.errors import ConfigError
from trainkit.extensions.language.next_token import Cached, Reader
from trainkit.extensions.language.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
_CUT = "�"  # what a part of a letter decodes to


class ModelSource(Protocol):
    """A model and its tokenizer.

    Attributes:
        answers: whether a prompt that is a text is a user's message, and not to be continued.
        room: the longest text of the model, in tokens; None for any.
        device: where draws are made.
    """

    answers: bool
    room: int | None
    device: Any

    def reader(self) -> Reader:
        """Return what reads a batch of texts."""

    def encode(self, prompt: str | Messages) -> list[int]:
        """Return a prompt's tokens."""

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield the text that each token completes, as it comes, and then what is left."""

    def stops(self, is_chat: bool) -> set[int]:
        """Return the tokens that end a text."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a folder, for AutoTokenizer of transformers."""


class TransformersSource:
    """A causal model of transformers, called in eval mode, and its tokenizer; see ModelSource."""

    def __init__(self, model: Any, tokenizer: Any, answers: bool = False) -> None:
        self.answers = answers
        self.room: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        self.device = model.device
        self._model, self._tokenizer = model, tokenizer

    def reader(self) -> Reader:
        """See ModelSource."""
        return Cached(self._model)

    def encode(self, prompt: str | Messages) -> list[int]:
        """See ModelSource.

        Raises:
            ConfigError: there are messages, and the tokenizer has no chat template, or it refuses
                them.
        """
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "The model's tokenizer has no chat template, so it cannot write messages. Give a"
                " text to continue, or the tokenizer of a chat model."
            )
        try:
            text = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # of a template: anything
            raise ConfigError(
                f"The chat template refuses the messages: {type(error).__name__}: {error}"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """See ModelSource."""
        made: list[int] = []
        text = shown = ""
        for token in tokens:
            made.append(token)
            text = self._tokenizer.decode(made, skip_special_tokens=True)
            if text.endswith(_CUT):
                yield ""
            else:
                yield text[len(shown) :]
                shown = text
        if text != shown:
            yield text[len(shown) :]  # an end came in the middle of a letter

    def stops(self, is_chat: bool) -> set[int]:
        """See ModelSource."""
        return stops_of(self._model, self._tokenizer, is_chat)

    def save_tokenizer(self, folder: Path) -> None:
        """See ModelSource."""
        self._tokenizer.save_pretrained(folder)


class TokenSource:
    """A model of the tokens that `data tokens` writes; see ModelSource."""

    answers: bool = False
    room: int | None = None  # what does not fit is no longer seen

    def __init__(self, reader: Callable[[], Reader], tokenizer: Tokenizer, device: Any) -> None:
        self._reader, self._tokenizer, self.device = reader, tokenizer, device

    def reader(self) -> Reader:
        """See ModelSource."""
        return _Narrow(self._reader(), self._tokenizer.vocab_size)

    def encode(self, prompt: str | Messages) -> list[int]:
        """See ModelSource.

        Raises:
            ConfigError: there are messages.
        """
        if not isinstance(prompt, str):
            raise ConfigError(
                "The model has no chat template: it continues texts. Give a text, or take a run of"
                " conf=sft."
            )
        (ids,) = self._tokenizer.encode([prompt or "\n"])
        return [int(number) for number in ids]

    def decode(self, tokens: Iterator[int]) -> Iterator[str]:
        """See ModelSource."""
        return self._tokenizer.decode(tokens)

    def stops(self, is_chat: bool) -> set[int]:
        """See ModelSource."""
        return {self._tokenizer.special_tokens["end_of_text"]}

    def save_tokenizer(self, folder: Path) -> None:
        """See ModelSource."""
        self._tokenizer.save_pretrained(folder)


class _Narrow:
    """A reader whose model has a larger table than the tokenizer."""

    def __init__(self, reader: Reader, vocab_size: int) -> None:
        self._reader, self._vocab_size = reader, vocab_size
        self.can_batch = reader.can_batch

    def read(self, texts: Sequence[list[int]]) -> Tensor:
        return self._reader.read(texts)[:, : self._vocab_size]

    def keep(self, places: Sequence[int]) -> None:
        self._reader.keep(places)


def stops_of(model: Any, tokenizer: Any, is_chat: bool) -> set[int]:
    """Return the tokens that end a text: the model's, the tokenizer's, and in a chat the one that
    the template writes after an answer, if that is a special token.
    """
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops = {*([own] if isinstance(own, int) else own or ()), tokenizer.eos_token_id}
    if is_chat and getattr(tokenizer, "chat_template", None):
        stops.add(_end_of_answer(tokenizer))
    return {stop for stop in stops if stop is not None}


def _end_of_answer(tokenizer: Any) -> int | None:
    question: Messages = [{"role": "user", "content": "?"}]
    answered: Messages = [*question, {"role": "assistant", "content": "!"}]
    try:
        before = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(answered, tokenize=False)
    except Exception:  # of a template: anything, as that a system message is missing
        return None
    after = whole.removeprefix(before).removeprefix("!")
    return _first_special(tokenizer, after) if whole.startswith(before + "!") and after else None


def _first_special(tokenizer: Any, text: str) -> int | None:
    """Return the first token of a text, if it is a special one."""
    first = tokenizer(text, add_special_tokens=False)["input_ids"][0]
    return int(first) if first in tokenizer.added_tokens_decoder else None


def load_tokenizer(folder: str | None) -> Any:
    """Return the tokenizer of a folder.

    Raises:
        ConfigError: there is none.
    """
    import transformers  # noqa: PLC0415 - optional

    if folder is None:
        raise ConfigError(
            "There is no tokenizer: the run has no `pretrained` folder with one. Give the model's:"
            " tokenizer=FOLDER."
        )
    if not Path(folder).is_dir():
        raise ConfigError(
            f"tokenizer is '{folder}'; it must be a folder with a tokenizer of transformers, as"
            " save_pretrained leaves it."
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer is '{folder}', and no tokenizer can be loaded from it: {error}"
        ) from error
