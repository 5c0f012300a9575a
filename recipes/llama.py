"""Llama from scratch: transformers' model (trainkit[transformers]) in published shapes, by one dial.

Its Task is that of all language models (recipes/language_model.py), with documents apart, z-loss,
and a loss that never holds all logits. With experts (recipes/experts.py) it is transformers' Mixtral,
or GLM-4.5, whose routers have biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import trainkit
from recipes.experts import ExpertLoad, Routed, Routers, even_loss, in_float64, joined
from recipes.hf import load_model, transformers
from recipes.language_model import LanguageModel
from recipes.weights_config import differences_of_config
from trainkit.arguments import NonNegativeFloat, PositiveInt
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.sequence import part, sum_of_parts
from trainkit.extensions.context.transformers import parts_of_rows, share_attention
from trainkit.extensions.language.document_masks import rows_of
from trainkit.extensions.language.next_token import CachedWithin, Reader, Whole
from trainkit.extensions.language.packing import IGNORED, documents_of
from trainkit.extensions.language.token_loss import TokenLoss, token_loss

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_LLAMA_3 = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
# Numbers of _SHAPE, and what else differs from transformers' LlamaConfig.
SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    # 130,000 weights, for trials
    "tiny": ((64, 176, 2, 4, 4), {}),
    # GaLore (Zhao et al. 2024), configs/llama_60m.json and its neighbours; first in ReLoRA
    "60m": ((512, 1376, 8, 8, 8), {}),
    "130m": ((768, 2048, 12, 12, 12), {}),
    "350m": ((1024, 2736, 24, 16, 16), {}),
    # Llama 3.2, without the scaling of its positions to long texts, which came after pre-training
    "1b": ((2048, 8192, 16, 32, 8), {**_LLAMA_3, "tie_word_embeddings": True}),
    "3b": ((3072, 8192, 28, 24, 8), {**_LLAMA_3, "tie_word_embeddings": True}),
    # Llama 2 (Touvron et al. 2023)
    "7b": ((4096, 11008, 32, 32, 32), {"rms_norm_eps": 1e-5}),
    # Llama 3 (Grattafiori et al. 2024, table 3)
    "8b": ((4096, 14336, 32, 32, 8), _LLAMA_3),
}


# of a step, without `task.balance_factor`: Fedus et al. 2022 (Switch), section 2.2; Wang et al. 2024
_FACTORS = {"loss": 0.01, "bias": 0.001}


def make_llama(
    size: str,
    vocab_size: int,
    context: int,
    config: dict[str, Any] | None = None,
    attention: str | None = None,
    mixture: dict[str, Any] | None = None,
) -> Any:
    """Return a LlamaForCausalLM with random weights, or a model with experts; see Llama.

    Args:
        mixture: model_type, and what else differs from the size's; None for no experts.

    Raises:
        ConfigError: an unknown size, or argument of the config.
    """
    if size not in SIZES:
        raise ConfigError(f"task.size is '{size}'; it must be one of {', '.join(SIZES)}.")
    numbers, rest = SIZES[size]
    whole = dict(zip(_SHAPE, numbers, strict=True)) | rest
    whole |= {"vocab_size": vocab_size, "max_position_embeddings": context}
    whole |= {"bos_token_id": None, "eos_token_id": None} | (config or {})
    options = {} if attention is None else {"attn_implementation": attention}
    model_type, rest = "llama", dict(mixture or {})
    model_type = rest.pop("model_type", model_type)
    if model_type == "glm4_moe":
        rest["moe_intermediate_size"] = whole["intermediate_size"]
        turned = whole.get("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        rest["rope_parameters"] = turned | {"partial_rotary_factor": 1.0}
    auto = transformers.AutoModelForCausalLM
    model = load_model(auto, None, model_type, whole | rest, **options)
    model.context = context
    return model


def mixture_of(
    experts: int | None,
    experts_per_token: int | None,
    balance: str | None,
    balance_factor: float | None,
    config: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Return what a model with experts has in place of Llama's; None without experts.

    Raises:
        ConfigError: a setting that would have no effect, or fewer experts than a token goes to.
    """
    given = {"experts_per_token": experts_per_token, "balance": balance}
    given["balance_factor"] = balance_factor
    if experts is None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"task.{name} is {value}, and task.experts is null: there are no experts. Set"
                    " task.experts=8, say, or leave it out."
                )
        return None
    for name in ("router_aux_loss_coef", "output_router_logits"):
        if name in (config or {}):
            raise ConfigError(
                f"task.config.{name} is set: transformers' load-balancing loss is one of each"
                " microbatch on each rank, so it would differ with their number. task.balance=loss"
                " and its task.balance_factor, 0.01 by default, have the loss that does not."
            )
    each = 2 if experts_per_token is None else experts_per_token
    if each > experts:
        raise ConfigError(
            f"task.experts_per_token is {each}, and task.experts is {experts}: a token goes to at"
            " most all of them. Lower the one or raise the other."
        )
    if balance != "bias":
        kind = {"model_type": "mixtral", "num_local_experts": experts}
        return kind | {"num_experts_per_tok": each}
    kind = {"model_type": "glm4_moe", "n_routed_experts": experts, "num_experts_per_tok": each}
    kind |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    return kind | {"n_group": 1, "topk_group": 1, "use_qk_norm": False}


class Llama(LanguageModel):
    """Predicts each next token of a document. A step's gradient is that of the mean over its
    predicted tokens, on any number of ranks.

    `train/loss` and `val/loss` are the cross-entropy; `train/z_loss` is what is added to it in
    training. `val/loss` is the mean over all predicted tokens (those that a text's last window shares
    with the one before count twice); `train/loss_epoch` that of the batches' means, by samples.

    Args:
        optimizer: see TextTask, as for `lr` and the last one.
        size: the shape, by its name in SIZES.
        vocab_size: the number of different tokens; more than the data's is legal.
        context: the longest input, in tokens.
        config: arguments of transformers' LlamaConfig that differ from the size's.
        documents: apart: attention does not cross from one document of a row into another,
            positions begin again, and no document predicts another's first token. joined: a row is
            one text. auto: apart, if the data has a token that ends a text.
        z_loss: the factor of log^2 Z in the loss; see token_loss.
        loss_chunk: tokens of a microbatch that have logits at a time; None for all.
        attention: transformers' attn_implementation; None for its choice.
        experts: the number of feed-forward layers, each as wide as the size's, of which a token goes
            through some, in place of one; None for one.
        experts_per_token: through how many; 2 by default.
        balance: how experts come to get as many tokens each. loss, the default: training adds a
            loss, logged as `train/balance_loss`; the model is a Mixtral. bias: biases of the choice
            move after each step; the model is a GLM-4.5, which has one more expert for all tokens.
        balance_factor: of the loss (0.01 by default), or what a bias moves by (0.001).
    """

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        size: Literal["tiny", "60m", "130m", "350m", "1b", "3b", "7b", "8b"] = "tiny",
        vocab_size: PositiveInt = 256,
        context: PositiveInt = 256,
        config: dict[str, Any] | None = None,
        documents: Literal["auto", "apart", "joined"] = "auto",
        z_loss: NonNegativeFloat = 0.0,
        loss_chunk: PositiveInt | None = 1024,
        attention: Literal["sdpa", "eager", "flex_attention"] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        experts: PositiveInt | None = None,
        experts_per_token: PositiveInt | None = None,
        balance: Literal["loss", "bias"] | None = None,
        balance_factor: NonNegativeFloat | None = None,
    ) -> None:
        mixture = mixture_of(experts, experts_per_token, balance, balance_factor, config)
        # made once the engine is there: a large one takes no memory until it is split
        make = partial(make_llama, size, vocab_size, context, config, attention, mixture)
        super().__init__(make, optimizer, lr, no_weight_decay, z_loss, loss_chunk)
        self.documents, self._attention = documents, attention
        self._end_of_text: int | None = None
        self._load: ExpertLoad | None = None
        self._even_factor = 0.0
        if mixture is not None:
            kind = balance or "loss"
            factor = _FACTORS[kind] if balance_factor is None else balance_factor
            self._load = ExpertLoad(factor if kind == "bias" else None)
            self._even_factor = factor if kind == "loss" else 0.0

    def configure_model(self) -> None:
        """Make the model; its attention is that of context ranks, if there are any."""
        super().configure_model()
        share_attention(self, self.model, self._attention)
        if self._load is not None:
            self._load.routers = Routers(self.model)

    def configure_callbacks(self) -> list[trainkit.Callback]:
        """Return what counts the experts' tokens."""
        return [] if self._load is None else [self._load]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self._load is None:
            return
        ranks = self.trainer.engine.ranks
        for name, size, has in (
            ("pipeline", ranks.pipeline_size, "a stage has some layers"),
            ("context", ranks.context_size, "a rank has a part of each row"),
        ):
            if size > 1:
                raise ConfigError(
                    f"engine.{name} is {size}, and task.experts is set: the experts of all layers are"
                    f" balanced together, by whole rows, and {has}. Use engine.{name}=1, with"
                    " engine.tensor or FSDP2 alone."
                )
        in_float64(self, self.model)

    def setup(self, stage: str) -> None:
        """Learn from the data which token ends a text.

        Raises:
            ConfigError: documents are to be apart, and the data has no such token.
        """
        if self.documents == "joined":
            return
        try:
            data = self.trainer.datamodule
        except TaskError:  # an export builds the Task without a run
            return
        special = getattr(data, "special_tokens", {})
        self._end_of_text = special.get("end_of_text")
        if self._end_of_text is None and self.documents == "apart":
            raise ConfigError(
                f"task.documents is 'apart', but {type(data).__name__} has no token that ends a"
                " text. Set task.documents=joined, or take data=tokens."
            )

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V]."""
        return self.model.lm_head(self._states(tokens_BT, positions_BT))

    def batch_weight(self, batch: Tensor) -> Tensor:
        """Return the number of tokens that the batch predicts."""
        if self._end_of_text is None:
            return torch.tensor(batch[:, 1:].numel(), device=batch.device)
        return (batch[:, :-1] != self._end_of_text).sum()

    def parallelize(self, mesh: Any) -> dict[str, str]:
        """Share attention by heads, and wide layers by width (Shoeybi et al. 2019).

        Raises:
            ConfigError: the ranks do not divide the heads.
        """
        config, ranks = self.model.config, mesh.size()
        for name in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, name) % ranks:
                raise ConfigError(
                    f"engine.tensor is {ranks}; it must divide task.config.{name}="
                    f"{getattr(config, name)}: ranks share attention by heads."
                )
        colwise = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        rowwise: tuple[str, ...] = ("self_attn.o_proj",)
        if self._load is None:  # experts are whole on each rank
            colwise += ("mlp.gate_proj", "mlp.up_proj")
            rowwise += ("mlp.down_proj",)
        plan = dict.fromkeys(colwise, "colwise") | dict.fromkeys(rowwise, "rowwise")
        return {f"model.model.layers.*.{layer}": style for layer, style in plan.items()}

    def compare_config(self, config: Mapping[str, Any]) -> list[str]:
        """Return how the config of a folder differs from the model's, one line each."""
        return differences_of_config(config, self.model.config, "task.config")

    def translate_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of `save_pretrained` by this Task's names; others as they are."""
        weights = joined(weights, self.model)
        if {*self.model.state_dict()}.isdisjoint(weights):
            return weights
        return {f"model.{name}": tensor for name, tensor in weights.items()}

    def export_huggingface(self, folder: Path) -> None:
        """Write the model's own folder, for transformers' `from_pretrained`."""
        transformers.utils.logging.disable_progress_bar()
        self.model.save_pretrained(folder)

    def _reader(self) -> Reader:
        context = self.model.context
        return CachedWithin(self.model, Whole(self, context, self.device), context)

    def _states(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Return what the output layer reads, [B, T, D]."""
        with rows_of(documents=positions_BT is not None):
            out = self.model.model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
        return out.last_hidden_state

    def _losses(self, text_BT: Tensor) -> TokenLoss:
        """Return the means over the predicted tokens; those of all ranks that share them."""
        positions_BT, labels_BT = None, text_BT[:, 1:]
        if self._end_of_text is not None:
            # positions that begin again are how transformers knows where a document begins
            positions_BT, labels_BT = documents_of(text_BT, self._end_of_text)
        tokens_BT, positions_BT = parts_of_rows(text_BT[:, :-1], positions_BT)
        labels_N = part(labels_BT, fill=IGNORED).flatten()
        states_ND = self._states(tokens_BT, positions_BT).flatten(0, 1)
        sums = token_loss(states_ND, labels_N, self.model.lm_head, self.loss_chunk, self.z_loss)
        count = self.batch_weight(text_BT).clamp(min=1)
        return TokenLoss(*(sum_of_parts(total) / count for total in sums))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._load is None:
            return super().training_step(batch, batch_idx)
        assert self._load.routers is not None  # configure_model has run
        with self._load.routers.watched() as routed:
            loss = super().training_step(batch, batch_idx)
        self._load.look(routed)
        if not self._even_factor:
            return loss
        added = self._even_factor * self._even_loss(routed, batch)
        self.log("train/balance_loss", added, on_step=True, on_epoch=True)
        return loss + added

    def _even_loss(self, routed: list[Routed], batch: Tensor) -> Tensor:
        """Return the mean over rows, each weighted by its predicted tokens, as the step's loss is."""
        losses_B = even_loss(routed, len(batch))
        if self._end_of_text is None:
            return losses_B.mean()
        counts_B = (batch[:, :-1] != self._end_of_text).sum(1)
        return (losses_B * counts_B).sum() / counts_B.sum().clamp(min=1)

    def _evaluate(self, batch: Tensor, stage: str) -> None:
        self._log_loss(self._loss(batch), stage, batch_size=int(self.batch_weight(batch)))
