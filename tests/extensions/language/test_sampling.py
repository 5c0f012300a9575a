"""Sampling from a model of transformers: its own greedy text, draws that touch no other numbers,
and where a text ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipes.sft_data import byte_tokenizer
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.language.sampling import (
    Ask,
    asked,
    begin,
    continue_all,
    draw,
    pieces_of,
)
from trainkit.extensions.language.sources import TransformersSource, load_tokenizer, stops_of

CHAT = [{"role": "user", "content": "1 + 1 = ?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer of bytes with ChatML's template."""
    return byte_tokenizer()


def causal(model_type: str = "llama", **config: Any) -> Any:
    """Return a tiny model with random weights, in eval mode."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    made = transformers.AutoConfig.for_model(
        model_type,
        **sizes | (heads if model_type == "llama" else {}) | {"eos_token_id": 2} | config,
    )
    return transformers.AutoModelForCausalLM.from_config(made).eval()


def answer(model: Any, tokenizer: Any, prompt: Any, **draws: Any) -> Iterator[str]:
    """Return the pieces of one answer."""
    return pieces_of(TransformersSource(model, tokenizer), Ask(prompt, **draws))


@pytest.mark.parametrize("model_type", ["llama", "mamba"])
@pytest.mark.parametrize("prompt", ["1 + 1", CHAT], ids=["text", "chat"])
def test_the_likeliest_text_is_that_of_transformers(
    model_type: str, prompt: Any, tokenizer: Any
) -> None:
    """With a model's cache, and of a model that has none of that kind."""
    model = causal(model_type)
    made = "".join(answer(model, tokenizer, prompt, max_new_tokens=12, temperature=0))
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    assert made == tokenizer.decode(theirs[ids.shape[1] :], skip_special_tokens=True)


def test_a_draw_has_its_own_random_numbers(tokenizer: Any) -> None:
    """A fit that shows an answer in a hook draws the same masks and orders after it; a seed repeats
    an answer.
    """
    model = causal("gpt2", n_head=2).train()  # which has dropout
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=3)]
    assert torch.equal(torch.rand(3), expected)
    assert first == [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=3)]
    assert first != [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=4)]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("top_k", "top_p", "possible"),
    [
        (None, None, {0, 1, 2, 3}),
        (None, 0.79, {1, 3}),
        (None, 0.81, {0, 1, 3}),
        (None, 0.01, {1}),
        (3, 0.999, {0, 1, 3}),
        (2, 1.0, {1, 3}),
    ],
)
def test_a_draw_is_among_the_likeliest(
    top_k: int | None, top_p: float | None, possible: set[int]
) -> None:
    """The fewest that have the probability together, after the largest k, as transformers' own
    warpers leave them.
    """
    warpers = transformers.LogitsProcessorList()
    if top_k is not None:
        warpers.append(transformers.TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(transformers.TopPLogitsWarper(top_p))
    shares = torch.tensor([0.15, 0.5, 0.05, 0.3])
    logits = warpers(None, shares.log()[None])
    assert {*logits[0].isfinite().nonzero().flatten().tolist()} == possible
    generator = torch.Generator().manual_seed(0)
    drawn = {int(draw(shares.log(), 1.0, top_k, top_p, generator)) for _ in range(200)}
    assert drawn == possible


def test_a_letter_of_several_bytes_comes_whole(tokenizer: Any) -> None:
    """No piece is a broken letter, and together they are the text."""
    ids = iter(tokenizer("é€")["input_ids"])

    class Spells:
        config = causal().config
        generation_config = None
        device = "cpu"

        def __call__(self, **_: Any) -> Any:
            logits = torch.zeros(1, 1, 259)
            logits[0, 0, next(ids)] = 1
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    pieces = [*answer(Spells(), tokenizer, "x", max_new_tokens=5, temperature=0)]
    assert pieces == ["", "é", "", "", "€"]


def test_a_chat_ends_where_its_template_ends_an_answer(tokenizer: Any) -> None:
    """Also if that is another token than the one which ends a text of the model."""
    model = causal(eos_token_id=0)
    assert stops_of(model, tokenizer, is_chat=True) == {0, 2}
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert stops_of(model, tokenizer, is_chat=False) == {0}
    assert stops_of(model, tokenizer, is_chat=True) == {0, 2}


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system message') }}"])
def test_a_tokenizer_without_a_template_for_a_question_ends_as_a_text(template: Any) -> None:
    """A fit that was of texts, or of conversations with a system message each, leaves its folder."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = template
    assert stops_of(causal(eos_token_id=0), tokenizer, is_chat=True) == {0}


def test_a_text_without_room_is_refused(tokenizer: Any) -> None:
    """A model's longest text is an end too."""
    model = causal(max_position_embeddings=8, eos_token_id=None)
    assert len([*answer(model, tokenizer, "12345", max_new_tokens=50)]) <= 3
    with pytest.raises(ConfigError, match="The prompt has 9 tokens; it must be 1 to 7"):
        next(answer(model, tokenizer, "123456789"))
    with pytest.raises(ConfigError, match="The prompt has 0 tokens"):
        next(answer(model, tokenizer, ""))


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (None, "There is no tokenizer"),
        ("absent", "tokenizer is 'absent'; it must be a folder"),
        ("EMPTY", "no tokenizer can be loaded from it"),
    ],
)
def test_a_missing_tokenizer_is_explained(folder: str | None, said: str, tmp_path: Path) -> None:
    """No network is asked."""
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(str(tmp_path) if folder == "EMPTY" else folder)


PROMPTS = ["1 + 1", "a much longer prompt, of other words", "x", "12 + 30 = ?"]
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1},
    "gpt2": {"n_head": 2, "n_positions": 128},
    "mistral": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "sliding_window": 6,
    },
    "opt": {
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 128,
    },
    "bloom": {"n_head": 2},
    "mamba": {},
}


@pytest.mark.parametrize("model_type", [*TYPES])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_batch_answers_as_each_alone(model_type: str, temperature: float, tokenizer: Any) -> None:
    """Token for token, of prompts and answers of other lengths: with relative, rotary and absolute
    positions, sliding windows, and for a model that reads one text at a time.
    """
    model = causal(model_type, **TYPES[model_type])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that a wrong mask or position changes the answer
    source = TransformersSource(model, tokenizer)
    sizes = (9, 3, 12, 6)
    asks = [
        Ask(prompt, max_new_tokens=size, temperature=temperature, seed=size)
        for prompt, size in zip(PROMPTS, sizes, strict=True)
    ]
    together = [begin(source, ask) for ask in asks]
    texts = {id(one): "" for one in together}
    for one, piece in continue_all(source, together):
        texts[id(one)] += piece
    for one, ask in zip(together, asks, strict=True):
        alone = begin(source, ask)
        text = "".join(piece for _, piece in continue_all(source, [alone]))
        assert (one.ids, one.finish, texts[id(one)]) == (alone.ids, alone.finish, text)
    assert len({tuple(one.ids[one.num_prompt :][:3]) for one in together}) > 1


class Counting(torch.nn.Module):
    """A model that notes how many tokens each call reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.own, self.read = model, []
        self.config, self.generation_config = model.config, model.generation_config
        self.device = model.device

    def forward(
        self, input_ids: Any, past_key_values: Any = None, attention_mask: Any = None, **more: Any
    ) -> Any:
        """Call the model."""
        self.read.append(tuple(input_ids.shape))
        return self.own(
            input_ids=input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            **more,
        )


def test_a_batch_reads_each_token_once(tokenizer: Any) -> None:
    """By the cache, and an answer that has ended is read no more."""
    model = Counting(causal(eos_token_id=None))
    source = TransformersSource(model, tokenizer)
    asks = [Ask("long prompt", 4, temperature=0), Ask("x", 2, temperature=0)]
    for _ in continue_all(source, [begin(source, ask) for ask in asks]):
        pass
    assert model.read == [(2, 11), (2, 1), (1, 1), (1, 1)]


def test_a_text_that_ends_an_answer_is_not_part_of_it(tokenizer: Any) -> None:
    """Also if it comes in pieces; what only began like it is shown."""

    class Says:
        config = causal().config
        generation_config = None
        device = "cpu"

        def __init__(self, text: str) -> None:
            self.ids = iter(tokenizer(text)["input_ids"])

        def __call__(self, **_: Any) -> Any:
            logits = torch.zeros(1, 1, 259)
            logits[0, 0, next(self.ids)] = 1
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    def said(text: str, stop: tuple[str, ...], most: int = 99) -> tuple[str, str]:
        source = TransformersSource(Says(text), tokenizer)
        one = begin(source, Ask("x", most, 0, stop=stop))
        return "".join(piece for _, piece in continue_all(source, [one])), one.finish

    assert said("one END two", ("END",)) == ("one ", "stop")
    assert said("one END two", ("two", "ne E")) == ("o", "stop")
    assert said("one EN", ("END",), most=6) == ("one EN", "length")
    assert said("one ENDED", ("ENDER", "ENDED")) == ("one ", "stop")


def test_a_chat_model_reads_a_text_as_a_message(tokenizer: Any) -> None:
    """After the system's, if there is one; another model continues it."""
    model = causal()
    assert asked(TransformersSource(model, tokenizer), "x") == "x"
    chat = TransformersSource(model, tokenizer, answers=True)
    assert asked(chat, "x", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
    ]


def test_messages_without_a_template_are_refused() -> None:
    """And so is what a template raises on."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        next(answer(causal(), tokenizer, CHAT))
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ConfigError, match="refuses the messages: TemplateError: no such role"):
        next(answer(causal(), tokenizer, CHAT))


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("place", [0, 1])
def test_no_token_is_drawn_of_logits_that_are_not_numbers(temperature: float, place: int) -> None:
    """torch's argmax takes NaN for the largest."""
    logits = torch.tensor([1.0, 2.0, 0.5])
    logits[place] = torch.nan
    with pytest.raises(TaskError, match="NaN or Inf, so none can be drawn"):
        draw(logits, temperature, None, None, torch.Generator())
