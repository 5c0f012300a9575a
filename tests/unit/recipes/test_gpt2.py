"""recipes/gpt2.py: transformers' mathematics, and its weights in and out;
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
from recipes.gpt2 import GPT2
from recipes.language_model import LanguageModel
from recipes.transformer import Attention, by_heads, by_kinds, plan_of_blocks
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.errors import CheckpointError, ConfigError

V, T, D, DEPTH, HEADS = 61, 16, 24, 3, 4


def task(vocab_size: int = V, depth: int = DEPTH, **options: Any) -> LanguageModel:
    """Return a tiny GPT-2 with large random weights, so that each of them matters."""
    torch.manual_seed(5)
    made = LanguageModel(
        GPT2(vocab_size, T, D, depth, HEADS, **options), partial(torch.optim.AdamW, lr=1e-3)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made.eval()


def tokens() -> Tensor:
    """Return three windows."""
    return torch.randint(V, (3, T), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """Return transformers' model with random weights, saved in a folder below tmp_path."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": D, "n_layer": DEPTH, "n_head": HEADS}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_weights_of_transformers_give_its_logits(theirs: Any, tmp_path: Path) -> None:
    """A folder of save_pretrained loads whole, and the forward is that of GPT2LMHeadModel."""
    ours = task()
    weights = ours.translate_weights(read_weights(str(tmp_path / "theirs")))
    assert load_into(ours, weights, "theirs") == []
    with torch.no_grad():
        expected = theirs(input_ids=tokens()).logits
        assert expected.abs().max() > 1
        torch.testing.assert_close(ours(tokens()), expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert ours.compare_config(config) == []


def test_files_without_the_head_load_too(theirs: Any) -> None:
    """Those of GPT2Model have no prefix, and old ones the constants of the mask:
    as those of the hub.
    """
    ours, state = task(), dict(theirs.transformer.state_dict())
    masks = {"h.0.attn.bias": torch.ones(1, 1, T, T), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert load_into(ours, ours.translate_weights(state | masks), "theirs") == []
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens()), theirs(input_ids=tokens()).logits, rtol=0, atol=1e-5
        )


def test_an_export_is_opened_by_transformers(tmp_path: Path) -> None:
    """`from_pretrained` of the exported folder gives equal logits."""
    transformers = pytest.importorskip("transformers")
    ours = task(dropout=0.1)
    trainkit.export(ours, tmp_path / "ours", format="huggingface")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(input_ids=tokens()).logits, ours(tokens()), rtol=0, atol=1e-5
        )
    assert theirs.config.resid_pdrop == theirs.config.attn_pdrop == theirs.config.embd_pdrop == 0.1


def test_the_translation_leads_back(tmp_path: Path) -> None:
    """Without transformers: the exported file has its names and shapes,
    and a second task reads the same bits from it.
    """
    ours, again = task(), task()
    trainkit.export(ours, tmp_path / "ours", format="huggingface", rebuilt=again)
    state = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert len(state) == 2 + 12 * DEPTH + 2
    assert state["transformer.h.2.attn.c_attn.weight"].shape == (D, 3 * D)
    assert state["transformer.h.0.mlp.c_fc.weight"].shape == (D, 4 * D)
    assert state["transformer.wpe.weight"].shape == (T, D) and "lm_head.weight" not in state
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["model_type"], config["n_head"], config["dtype"]) == ("gpt2", HEADS, "float32")
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True)
    )


def test_own_weights_are_not_translated() -> None:
    """A checkpoint of the recipe's own is taken as it is."""
    state = dict(task().state_dict())
    assert task().translate_weights(state) is state


@pytest.mark.parametrize(
    ("options", "said"),
    [({"vocab_size": 60}, "tokens.weight is"), ({"depth": 2}, "h.2.ln_1.weight")],
)
def test_weights_of_another_size_are_refused(options: dict[str, int], said: str) -> None:
    """The error names them."""
    state = {f"transformer.{name}": t for name, t in task().model.to_huggingface()[1].items()}
    other = task(**options)
    with pytest.raises(CheckpointError, match=said):
        load_into(
            other,
            other.translate_weights({n.removeprefix("transformer."): t for n, t in state.items()}),
            "theirs",
        )


def test_heads_are_the_outer_dimension() -> None:
    """Half of the rows of qkv, and of the columns of out, are half of the heads:
    their sum is the whole attention.
    """
    torch.manual_seed(0)
    whole, x = Attention(D, HEADS, 0.0, causal=True), torch.randn(2, T, D)
    parts = []
    for half in (slice(0, D // 2), slice(D // 2, D)):
        part = Attention(D, HEADS // 2, 0.0, causal=True)
        part.qkv, part.out = nn.Linear(D, 3 * D // 2), nn.Linear(D // 2, D, bias=False)
        rows = slice(3 * half.start, 3 * half.stop)
        part.qkv.weight, part.qkv.bias = (
            nn.Parameter(p[rows]) for p in (whole.qkv.weight, whole.qkv.bias)
        )
        part.out.weight = nn.Parameter(whole.out.weight[:, half])
        q, k, v = part.qkv(x).view(2, T, HEADS // 2, 3, -1).transpose(1, 2).unbind(3)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        parts.append(part.out(y.transpose(1, 2).reshape(2, T, D // 2)))
    torch.testing.assert_close(sum(parts) + whole.out.bias, whole(x))
    rows = torch.arange(3 * D)
    assert by_heads(rows, HEADS).tolist()[: 3 * D // HEADS] == [
        *range(6),
        *range(D, D + 6),
        *range(2 * D, 2 * D + 6),
    ]
    assert torch.equal(by_kinds(by_heads(rows, HEADS), HEADS), rows)


def test_the_default_is_gpt2_small() -> None:
    """124,439,808 weights: those of transformers' gpt2."""
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT2().parameters()) == 124_439_808


def test_the_first_weights_are_gpt2s() -> None:
    """Std 0.02, and less where a layer's output is added up;
    biases 0, no text beyond the context.
    """
    torch.manual_seed(0)
    model = GPT2(V, T, 96, 8, 4)
    block = model.blocks[3]
    assert block.wide[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.wide[2].weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.attention.qkv.bias.abs().max() == 0 and model.head.weight is model.tokens.weight
    with pytest.raises(ConfigError, match=r"task\.model\.context is 16; it must be 17 or more"):
        model(torch.zeros(1, T + 1, dtype=torch.int64))
    with pytest.raises(
        ConfigError, match=r"task\.model\.heads is 5; it must divide task\.model\.width=24"
    ):
        GPT2(V, T, D, 1, 5)


def test_ranks_share_attention_by_heads() -> None:
    """The plan names layers that GPT-2 has; ranks that would cut a head are refused."""
    names = {name for name, _ in task().named_modules()}
    plan = plan_of_blocks(4, 2)
    assert {pattern.replace("*", "0") for pattern in plan} <= names
    assert list(plan.values()) == ["colwise", "rowwise"] * 2
    with pytest.raises(
        ConfigError, match=r"engine\.tensor is 3; it must divide task\.model\.heads=4"
    ):
        plan_of_blocks(4, 3)


@pytest.mark.parametrize(
    ("theirs_has", "line"),
    [
        ({"n_head": 1}, "n_head is 1 in config.json, and 4 here; set task.model.heads=1"),
        (
            {"activation_function": "relu"},
            "activation_function is relu in config.json, and gelu_new here",
        ),
        ({"n_head": HEADS, "resid_pdrop": 0.5}, None),  # dropout is free
    ],
)
def test_the_config_of_other_weights_is_compared(
    theirs_has: dict[str, Any], line: str | None
) -> None:
    """With what changes answers, and no shape."""
    own = task().model.to_huggingface()[0]
    assert task().compare_config(own) == []
    assert task().compare_config(own | theirs_has) == ([] if line is None else [line])
