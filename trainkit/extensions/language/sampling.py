"""What a causal model of transformers answers, token by token, drawn from random numbers of its
own: those of a fit around it are not touched.

answer      the text that continues a text, or answers a conversation, in pieces
sample      token numbers, from the model and its cache
stops_of    the tokens that end an answer
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
_CUT = "�"  # what a part of a letter decodes to


def answer(
    model: Any,
    tokenizer: Any,
    prompt: str | Messages,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Yield the text of each new token, "" for a part of a letter.

    Args:
        model: a causal model of transformers, in eval mode.
        tokenizer: of transformers: the model's.
        prompt: a text, which is continued; or messages, which the tokenizer's chat template
            renders, and which are answered.
        max_new_tokens: at most; a token of `stops_of` ends it earlier, and so does the model's
            longest text.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: draw among this many likeliest tokens (Fan et al. 2018, section 5.4).
        top_p: draw among the fewest tokens that have this probability together (Holtzman et al.
            2020, section 3.1), above 0 to 1; after top_k.
        seed: of the draws.

    Raises:
        ConfigError: the prompt has no token, or no room is left after it.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not ids or (room is not None and len(ids) >= room):
        raise ConfigError(
            f"The prompt has {len(ids)} tokens; it must be 1 to"
            f" {'any number' if room is None else room - 1}, so that one more fits the model."
        )
    if room is not None:
        max_new_tokens = min(max_new_tokens, room - len(ids))
    is_chat = not isinstance(prompt, str)
    stops = stops_of(model, tokenizer, is_chat)
    tokens = sample(
        model, torch.tensor([ids], device=model.device), stops, temperature, top_k, top_p, seed
    )
    made: list[int] = []
    text = shown = ""
    for left, token in zip(reversed(range(max_new_tokens)), tokens, strict=False):
        made.append(token)
        text = tokenizer.decode(made, skip_special_tokens=True)
        if text.endswith(_CUT) and left:
            yield ""
        else:
            yield text[len(shown) :]
            shown = text
    if text != shown:
        yield text[len(shown) :]  # an end came in the middle of a letter


@torch.no_grad()
def sample(
    model: Any,
    ids_1T: Tensor,
    stops: set[int],
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> Iterator[int]:
    """Yield tokens until one of `stops`; see `answer`. A model without a cache reads the whole text
    for each.
    """
    generator = torch.Generator(ids_1T.device).manual_seed(seed)
    cache, fresh_1T = None, ids_1T
    while True:
        out = model(input_ids=fresh_1T, past_key_values=cache, use_cache=True)
        chosen = _draw(out.logits[0, -1].float(), temperature, top_k, top_p, generator)
        if int(chosen) in stops:
            return
        yield int(chosen)
        cache = getattr(out, "past_key_values", None)
        ids_1T = torch.cat([ids_1T, chosen.view(1, 1)], 1)
        fresh_1T = ids_1T if cache is None else chosen.view(1, 1)


def _draw(
    logits_V: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Return a token, [1]."""
    if temperature == 0:
        return logits_V.argmax()[None]
    best_K, places_K = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
    shares_K = (best_K / temperature).softmax(-1)
    if top_p is not None:
        before_K = shares_K.cumsum(-1) - shares_K
        shares_K = shares_K.where(before_K < top_p, 0)
    return places_K[torch.multinomial(shares_K, 1, generator=generator)]


def stops_of(model: Any, tokenizer: Any, is_chat: bool) -> set[int]:
    """Return the tokens that end a text: the model's, the tokenizer's, and in a chat the one that
    the template writes after an answer, if that is a special token.
    """
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops = {*([own] if isinstance(own, int) else own or ()), tokenizer.eos_token_id}
    if is_chat:
        question: Messages = [{"role": "user", "content": "?"}]
        before = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(
            [*question, {"role": "assistant", "content": "!"}], tokenize=False
        )
        after = whole.removeprefix(before).removeprefix("!")
        if whole.startswith(before + "!") and after:
            stops.add(_first_special(tokenizer, after))
    return {stop for stop in stops if stop is not None}


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
