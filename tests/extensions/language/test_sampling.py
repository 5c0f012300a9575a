"""Sampling from a model of transformers: its own greedy text, draws that touch no other numbers,
and where a text ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipes.sft_data import byte_tokenizer
from trainkit.errors import ConfigError
from trainkit.extensions.language.sampling import answer, load_tokenizer, sample, stops_of

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
    model = causal()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=3)]
    assert torch.equal(torch.rand(3), expected)
    assert first == [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=3)]
    assert first != [*answer(model, tokenizer, CHAT, max_new_tokens=8, seed=4)]


class Fixed:
    """A model of four tokens with the probabilities 0.5, 0.3, 0.15 and 0.05, whatever the text."""

    def __call__(self, **_: Any) -> Any:
        """Return its logits."""
        shares = torch.tensor([[[0.15, 0.5, 0.05, 0.3]]])
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=shares.log())


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
    logits = warpers(None, Fixed()().logits[0])
    assert {*logits[0].isfinite().nonzero().flatten().tolist()} == possible
    drawn = sample(Fixed(), torch.tensor([[0]]), set(), 1.0, top_k, top_p, 0)
    assert {token for token, _ in zip(drawn, range(200), strict=False)} == possible


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
