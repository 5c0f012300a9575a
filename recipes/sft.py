"""Supervised fine-tuning of a chat model: any AutoModelForCausalLM of transformers
(trainkit[transformers]), on conversations (recipes/sft_data.py).

A step's gradient is that of the mean over its predicted tokens, on any number of ranks, whether
documents share rows or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from recipes.causal_model import (
    has_plain_head,
    ignores_padding,
    keeps_documents_apart,
    logits_of,
    states_of,
)
from recipes.hf import TransformersTask, load_model, transformers
from trainkit.api.view import with_role
from trainkit.arguments import PositiveInt
from trainkit.errors import ConfigError, TaskError, did_you_mean
from trainkit.extensions.adapters.quantized import (
    Quantization,
    compute_in,
    described,
    loading_options,
    stay_trainable,
)
from trainkit.extensions.context.sequence import is_shared, part, sum_of_parts
from trainkit.extensions.context.transformers import parts_of_rows, refusal, share_attention
from trainkit.extensions.language.packing import IGNORED, VARLEN
from trainkit.extensions.language.sampling import Ask, pieces_of
from trainkit.extensions.language.sources import Messages, TransformersSource, load_tokenizer
from trainkit.extensions.language.token_loss import token_loss

Batch = Mapping[str, Any]
# see logits_of
_Inputs = tuple[Tensor, Tensor | None, Tensor | None, dict[str, Any] | None]
# of the byte tokenizer's 259 tokens
_TINY: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


class ChatModel(TransformersTask):
    """Predicts the tokens of answers, or all.

    `train/loss_epoch` is the mean of the batches' means, by samples; `val/loss` the mean over all
    predicted tokens.

    Args:
        optimizer: see TransformersTask, as for `lr` and the last two.
        model: a folder of save_pretrained, or a hub's name as "org/model"; None for random weights.
        revision: of the hub's model: a branch, a tag or a commit.
        model_type: as llama; None with `model` None too: a tiny Llama for bytes.
        config: arguments of the type's config.
        attention: transformers' attn_implementation: sdpa, eager, flex_attention,
            flash_attention_2, ...; None for its choice.
        loss_chunk: tokens of a microbatch that have logits at a time in the loss, see token_loss;
            None for all.
        quantization: nf4 loads the linear layers of `model` in 4 bits, to be frozen beside adapters
            (QLoRA): callbacks=lora; see extensions/adapters/quantized.py.
    """

    batch_shape = "a dict of input_ids [B, T] and labels [B, T], of conversations"

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        model: str | None = None,
        revision: str | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        save_pretrained: bool = True,
        loss_chunk: PositiveInt | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        if (model, model_type, config) == (None, None, None) and quantization is None:
            model_type, config = "llama", _TINY
        if revision is not None and (model is None or Path(model).is_dir()):
            raise ConfigError(
                f"task.revision is '{revision}', but task.model is {model}, which is not of a hub."
                " Leave it out."
            )
        known = ["eager", *transformers.AttentionInterface().valid_keys()]
        if attention is not None and attention not in known and "/" not in attention:
            raise ConfigError(
                f"task.attention is '{attention}', which transformers lacks."
                f"{did_you_mean(attention, known)} It has {', '.join(known)}."
            )
        loaded = load_model(
            transformers.AutoModelForCausalLM,
            model,
            model_type,
            config,
            **({} if attention is None else {"attn_implementation": attention}),
            **({} if revision is None else {"revision": revision}),
            **({} if quantization is None else loading_options(quantization, model)),
        )
        stay_trainable(loaded)
        super().__init__(loaded, optimizer, lr, no_weight_decay, save_pretrained)
        self.loss_chunk, self.quantization = loss_chunk, quantization
        self._attention = attention
        self._masks_padding = True
        if loss_chunk is not None and not has_plain_head(loaded):
            raise ConfigError(
                f"task.loss_chunk is {loss_chunk}, but the logits of {type(loaded).__name__} are not"
                " its output layer's, of its last states alone. Set task.loss_chunk=null."
            )

    def setup(self, stage: str) -> None:
        """Choose the layout of the data's batches: what this model keeps apart.

        Raises:
            ConfigError: the data asks for packed rows, and the model would mix their documents; or
                weights of 4 bits would be trained; or there are context ranks, of whose parts the
                model would compute something else.
        """
        ranks = share_attention(self, self.model, self._attention)
        if ranks > 1 and (why := refusal(self.model, ranks)):
            raise ConfigError(why)
        try:
            data = self.trainer.datamodule
        except TaskError:  # an export builds the Task without a run
            return
        if self.quantization is not None:
            self._set_up_quantized(stage)
        if not hasattr(data, "used_layout"):
            return
        if data.layout != "padded":
            self._choose_layout(data)
        self._masks_padding = data.used_layout == "padded" and not ignores_padding(self.model)

    def _choose_layout(self, data: Any) -> None:
        if str(self.model.config._attn_implementation).startswith("flash"):
            data.used_layout = "flat"
        elif not data.packing and data.layout == "auto":
            data.used_layout = "padded"
        elif keeps_documents_apart(self.model):
            data.used_layout = "packed"
        elif data.layout == "packed":
            raise ConfigError(
                f"data.layout is 'packed', but {type(self.model).__name__} does not keep the"
                " documents of a row apart: their gradients would mix. Set data.layout=auto or"
                " padded, or another model."
            )
        else:
            data.used_layout = "padded"
            self.trainer.say(
                f"{type(self.model).__name__} does not keep the documents of a row apart: each gets"
                " a row of its own, padded. The gradients are the same, a step takes longer."
            )

    def _set_up_quantized(self, stage: str) -> None:
        if stage == "fit" and not with_role(self.trainer.callbacks, "layers"):
            raise ConfigError(
                f"task.quantization is '{self.quantization}': weights of 4 bits cannot be trained,"
                " only adapters beside them. Add callbacks=lora, or leave task.quantization out."
            )
        compute_in(self.model, self.trainer.precision.compute_dtype)
        self.trainer.say(f"quantized        {described(self.model)}")

    def on_fit_start(self) -> None:
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)
        held = self.model.config.get_text_config().vocab_size
        if tokenizer is not None and len(tokenizer) > held:
            raise ConfigError(
                f"The tokenizer has {len(tokenizer)} tokens and the model {held}: it belongs to"
                " another model. Give the model's own, data.tokenizer=FOLDER; for random weights"
                f" set task.config.vocab_size={len(tokenizer)}."
            )
        super().on_fit_start()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        varlen: dict[str, Any] | None = None,
    ) -> Tensor:
        """Return logits [B, T, V]; see logits_of."""
        return logits_of(self.model, input_ids, attention_mask, position_ids, varlen)

    def batch_weight(self, batch: Batch) -> Tensor:
        """Return the number of tokens that the batch predicts."""
        return (batch["labels"] != IGNORED).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the likeliest next token at each place, [B, T]."""
        return self._logits(batch).argmax(-1)

    def generate(
        self,
        prompt: str | Messages,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        tokenizer: str | None = None,
        system: str | None = None,
    ) -> Iterator[str]:
        """Yield the answer to a user's message, or to messages, as it is sampled; see
        language.sampling.Ask.

        Args:
            prompt: what the user says; or messages of role and content.
            max_new_tokens: as there, like the next four.
            temperature: 0 takes the likeliest token each time.
            top_k: draw among so many tokens.
            top_p: draw among the fewest tokens of this probability together.
            seed: of the draws.
            tokenizer: a folder of save_pretrained.
            system: a message of the system before the user's.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        ask = Ask(messages, max_new_tokens, temperature, top_k, top_p, seed)
        yield from pieces_of(self.text_source(tokenizer), ask)

    def text_source(self, tokenizer: str | None = None) -> TransformersSource:
        """Return what `generate` and `serve` answer with: a text is a user's message."""
        return TransformersSource(self.model, load_tokenizer(tokenizer), answers=True)

    def _evaluate(self, batch: Batch, stage: str) -> None:
        count = int(self.batch_weight(batch))
        self.log(f"{stage}/loss", self._loss(batch), prog_bar=True, batch_size=count)

    def _logits(self, batch: Batch) -> Tensor:
        return self(*self._inputs(batch))

    def _inputs(self, batch: Batch) -> _Inputs:
        mask = batch.get("attention_mask") if self._masks_padding else None
        varlen = {name: batch[name] for name in VARLEN if name in batch}
        return batch["input_ids"], mask, batch.get("position_ids"), varlen

    def _loss(self, batch: Batch) -> Tensor:
        inputs, end, next_BT = self._inputs(batch), -1, batch["labels"][:, 1:]
        if is_shared():  # padding is on the right, where no token sees it: no mask
            own = parts_of_rows(batch["input_ids"], batch.get("position_ids"))
            inputs, end = (own[0], None, own[1], None), None
            next_BT = functional.pad(next_BT, (0, 1), value=IGNORED)  # as many as tokens
        next_N = part(next_BT, fill=IGNORED).flatten()
        count = self.batch_weight(batch).clamp(min=1)
        if self.loss_chunk is not None:
            states_BTD = states_of(self.model, *inputs)
            head = self.model.get_output_embeddings()
            sums = token_loss(states_BTD[:, :end].flatten(0, 1), next_N, head, self.loss_chunk)
            return sum_of_parts(sums.cross_entropy) / count
        logits_NV = self(*inputs)[:, :end].flatten(0, 1)
        # in float32 at least
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        total = functional.cross_entropy(logits_NV, next_N, ignore_index=IGNORED, reduction="sum")
        return sum_of_parts(total) / count
