"""recipes/bert.py: transformers' mathematics, and its weights in and out;
the test against transformers needs it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import trainkit
from recipes.bert import BERT
from recipes.language_model import MaskedLanguageModel
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.errors import ConfigError

V, T, D, DEPTH, HEADS = 61, 16, 24, 2, 4


def task(token_types: int = 2) -> MaskedLanguageModel:
    """Return a tiny BERT with large random weights, so that each of them matters."""
    torch.manual_seed(5)
    made = MaskedLanguageModel(
        BERT(V, T, D, DEPTH, HEADS, token_types=token_types), partial(torch.optim.AdamW, lr=1e-3)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made.eval()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return three windows, one of them padded, with tokens of both kinds: tokens, mask, types."""
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(3, T, dtype=torch.int64)
    mask[1, 10:] = 0
    return (
        torch.randint(V, (3, T), generator=generator),
        mask,
        torch.randint(2, (3, T), generator=generator),
    )


@pytest.fixture
def theirs() -> Any:
    """Return transformers' model with random weights."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    sizes = {
        "vocab_size": V,
        "max_position_embeddings": T,
        "hidden_size": D,
        "num_hidden_layers": DEPTH,
    }
    config = transformers.BertConfig(**sizes, num_attention_heads=HEADS, intermediate_size=4 * D)
    model = transformers.BertForMaskedLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def same(ours: MaskedLanguageModel, theirs: Any) -> None:
    """Assert that both compute the same, of padded windows with two kinds of tokens,
    and of tokens alone.
    """
    tokens, mask, types = inputs()
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask, token_type_ids=types).logits
        assert expected.abs().max() > 1
        torch.testing.assert_close(
            ours.model(tokens, mask, types)[mask > 0], expected[mask > 0], rtol=0, atol=1e-5
        )
        torch.testing.assert_close(ours(tokens), theirs(input_ids=tokens).logits, rtol=0, atol=1e-5)


def test_weights_of_transformers_give_its_logits(theirs: Any, tmp_path: Path) -> None:
    """A folder of save_pretrained loads whole, and the forward is that of BertForMaskedLM."""
    ours = task()
    theirs.save_pretrained(tmp_path / "theirs")
    assert (
        load_into(ours, ours.translate_weights(read_weights(str(tmp_path / "theirs"))), "theirs")
        == []
    )
    same(ours, theirs)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert ours.compare_config(config) == []


def test_files_of_the_first_bert_load_too(theirs: Any) -> None:
    """With other names of the norms, and with the task of the next sentence, which is left out."""
    ours = task()
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): t
        for name, t in theirs.state_dict().items()
    }
    state = {name.replace("LayerNorm.bias", "LayerNorm.beta"): t for name, t in state.items()}
    state |= {
        "bert.pooler.dense.weight": torch.ones(D, D),
        "cls.seq_relationship.bias": torch.ones(2),
    }
    assert load_into(ours, ours.translate_weights(state), "theirs") == []
    same(ours, theirs)


def test_an_export_is_opened_by_transformers(tmp_path: Path) -> None:
    """`from_pretrained` of the exported folder gives equal logits."""
    transformers = pytest.importorskip("transformers")
    ours = task()
    trainkit.export(ours, tmp_path / "ours", format="huggingface")
    same(ours, transformers.BertForMaskedLM.from_pretrained(tmp_path / "ours").eval())


@pytest.mark.parametrize("token_types", [2, 0])
def test_the_translation_leads_back(token_types: int, tmp_path: Path) -> None:
    """Without transformers: the exported file has its names,
    and a second task reads the same bits from it.
    """
    ours, again = task(token_types), task(token_types)
    with torch.no_grad():
        again.model.tokens.weight.zero_()
    trainkit.export(ours, tmp_path / "ours", format="huggingface", rebuilt=again)
    state = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert len(state) == 5 + 16 * DEPTH + 5
    assert state["bert.encoder.layer.1.attention.self.key.weight"].shape == (D, D)
    assert state["bert.embeddings.token_type_embeddings.weight"].shape == (token_types or 1, D)
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True)
    )


def test_without_kinds_the_first_one_is_everywhere(theirs: Any) -> None:
    """token_types=0 adds transformers' first kind to the places: the same sum."""
    ours, (tokens, *_) = task(token_types=0), inputs()
    assert load_into(ours, ours.translate_weights(dict(theirs.state_dict())), "theirs") == []
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(input_ids=tokens).logits, rtol=0, atol=1e-5)


def test_own_weights_are_not_translated() -> None:
    """A checkpoint of the recipe's own is taken as it is."""
    state = dict(task().state_dict())
    assert task().translate_weights(state) is state


def test_a_window_beyond_the_context_is_refused() -> None:
    """The model has places for `context` tokens;
    its default is BERT-base without pooler: 109,514,298 weights.
    """
    with pytest.raises(ConfigError, match=r"task\.model\.context is 16; it must be 17 or more"):
        task()(torch.zeros(1, T + 1, dtype=torch.int64))
    with torch.device("meta"):
        assert sum(p.numel() for p in BERT().parameters()) == 109_514_298
