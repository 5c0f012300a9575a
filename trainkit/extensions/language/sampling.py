"""Texts from a causal model, token by token, drawn from random numbers of their own: those of a fit
around it are not touched.

Ask           a prompt, and how its answer is drawn
asked         a text as a prompt: of a chat model it is a message
begin         Ask -> Answer: the prompt as tokens, checked
continue_all  Answers, several at once -> their texts, in pieces
pieces_of     all of that, for one prompt
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.language.sources import Messages, ModelSource

_NOT_FINITE = (
    "The model's logits of the next token are NaN or Inf, so none can be drawn. Its weights may be"
    " of a run that diverged, or its dtype too narrow: try another checkpoint."
)


@dataclass(frozen=True)
class Ask:
    """A prompt, and how its answer is drawn.

    Attributes:
        prompt: a text, which is continued; or messages of role and content, which the model's chat
            template renders, and which are answered.
        max_new_tokens: at most; a token that ends a text ends it earlier, and so does the model's
            longest text.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among this many likeliest tokens (Fan et al. 2018, section 5.4).
        top_p: draw among the fewest tokens that have this probability together (Holtzman et al.
            2020, section 3.1), above 0 to 1; after top_k.
        seed: of the draws, whatever is answered beside it.
        stop: texts that end an answer, and are not part of it.
    """

    prompt: str | Messages
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()


class Answer:
    """A text that is being continued.

    Attributes:
        ask: what is asked.
        ids: tokens of the prompt, and of the answer so far.
        num_prompt: those of the prompt.
        finish: why it ended: "stop" at a token or a text that ends it, "length" at max_new_tokens
            or the model's longest text, "error" if no token could be drawn; "" before. A caller that
            no longer listens sets it.
    """

    def __init__(self, source: ModelSource, ask: Ask, ids: list[int]) -> None:
        self.ask = ask
        self.ids = ids
        self.num_prompt = len(ids)
        self.finish: Literal["", "stop", "length", "left", "error"] = ""
        self._most = ask.max_new_tokens
        if source.room is not None:
            self._most = min(self._most, source.room - len(ids))
        self._stops = source.stops(not isinstance(ask.prompt, str))
        self._generator = torch.Generator(source.device).manual_seed(ask.seed)
        self._fed: deque[int] = deque()
        self._pieces = source.decode(self._tokens())
        self._held = ""

    @property
    def num_made(self) -> int:
        """Return the number of tokens of the answer."""
        return len(self.ids) - self.num_prompt

    def take(self, logits_V: Tensor) -> str:
        """Draw a token, and return the text that it completes."""
        ask = self.ask
        token = int(draw(logits_V, ask.temperature, ask.top_k, ask.top_p, self._generator))
        if token in self._stops:
            self.finish = "stop"
            return self._without_stop(next(self._pieces, ""))
        self.ids.append(token)
        self._fed.append(token)
        text = next(self._pieces, "")
        if self.num_made >= self._most:
            self.finish = "length"
            text += next(self._pieces, "")
        return self._without_stop(text)

    def _tokens(self) -> Iterator[int]:
        """Yield the tokens of the answer as the decoder asks for them."""
        while self._fed:
            yield self._fed.popleft()

    def _without_stop(self, text: str) -> str:
        """Return what can be shown: neither a text that ends the answer, nor what may begin one."""
        held = self._held + text
        ends = [place for stop in self.ask.stop if (place := held.find(stop)) >= 0]
        if ends:
            self.finish, self._held = "stop", ""
            return held[: min(ends)]
        sizes = range(1, max(map(len, self.ask.stop), default=1))
        may_begin = [
            n for n in sizes if any(stop.startswith(held[-n:]) for stop in self.ask.stop) and held
        ]
        cut = len(held) if self.finish else len(held) - min(len(held), max(may_begin, default=0))
        self._held = held[cut:]
        return held[:cut]


def asked(source: ModelSource, text: str, system: str | None = None) -> str | Messages:
    """Return a text as the model's prompt: a chat model reads it as a user's message."""
    if not source.answers:
        return text
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def begin(source: ModelSource, ask: Ask) -> Answer:
    """Return an answer without tokens.

    Raises:
        ConfigError: the prompt has no token, no room is left after it, or the model has no chat
            template for its messages.
    """
    ids = source.encode(ask.prompt)
    room = source.room
    if not ids or (room is not None and len(ids) >= room):
        raise ConfigError(
            f"The prompt has {len(ids)} tokens; it must be 1 to"
            f" {'any number' if room is None else room - 1}, so that one more fits the model."
        )
    return Answer(source, ask, ids)


def continue_all(
    source: ModelSource,
    answers: Sequence[Answer],
    failed: Callable[[Answer, Exception], object] | None = None,
) -> Iterator[tuple[Answer, str]]:
    """Yield each new token's text, "" for a part of a letter or an end, and of which answer it is.

    Each answer is what it would be by itself, up to the rounding of sums: its draws are its own. A
    model that cannot read texts of several lengths answers them one after the other.

    Args:
        source: the model.
        answers: they are continued to their ends.
        failed: receives an answer of which no token can be drawn, and the error; it ends, and the
            others are continued. Without it the error is raised.
    """
    reader = source.reader()
    if len(answers) > 1 and not reader.can_batch:
        for one in answers:
            yield from continue_all(source, [one], failed)
        return
    left = [one for one in answers if not one.finish]
    while left:
        for one, logits_V in zip(left, reader.read([one.ids for one in left]), strict=True):
            try:
                text = one.take(logits_V)
            except Exception as error:
                if failed is None:
                    raise
                one.finish = "error"
                failed(one, error)
                continue
            yield one, text
        going = [place for place, one in enumerate(left) if not one.finish]
        if len(going) < len(left):
            left = [left[place] for place in going]
            if left:
                reader.keep(going)


def pieces_of(source: ModelSource, ask: Ask) -> Iterator[str]:
    """Yield the text of each new token of one answer, "" for a part of a letter."""
    num_shown = 0
    for one, text in continue_all(source, [begin(source, ask)]):
        if text or one.num_made > num_shown:
            yield text
        num_shown = one.num_made


def draw(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Return a token, [1].

    Raises:
        TaskError: a probability is NaN or Inf. torch.multinomial would say so, and on a GPU end the
            use of the device with it.
    """
    if temperature == 0:
        best = logits_V.argmax()[None]  # NaN counts as the largest
        if logits_V[best].isnan():
            raise TaskError(_NOT_FINITE)
        return best
    logits_V = logits_V.float()  # bfloat16 has too few digits for sums of probabilities
    best_K, places_K = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    shares_K = (best_K / temperature).softmax(-1)
    if not shares_K.isfinite().all():
        raise TaskError(_NOT_FINITE)
    if top_p is not None:
        before_K = shares_K.cumsum(-1) - shares_K
        shares_K = shares_K.where(before_K < top_p, 0)
    return places_K[torch.multinomial(shares_K, 1, generator=generator)]
