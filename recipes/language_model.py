"""Tasks of text: the next token (GPT), and masked tokens (BERT), for any model from tokens [B, T]
to logits [B, T, V].

A model has `vocab_size` and `context`; with `from_huggingface` and `to_huggingface` too, it starts
from weights of transformers (`init_weights=FOLDER`; a run that does prints `note_of_weights`, if the
model has one), and is exported to a folder for it (`python -m trainkit export format=huggingface`).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from recipes.schedule import with_schedule
from recipes.transformer import plan_of_blocks
from recipes.weights_config import differences
from trainkit.arguments import NonNegativeFloat, PositiveInt
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.sequence import mean_of_parts, part, sum_of_parts
from trainkit.extensions.language.next_token import Reader, Whole
from trainkit.extensions.language.sampling import Ask, pieces_of
from trainkit.extensions.language.sources import TokenSource
from trainkit.extensions.language.token_loss import TokenLoss, token_loss
from trainkit.extensions.language.tokenizer import open_tokenizer
from trainkit.optim import decay_groups

_BYTES = 256
_UNMASKED = -100  # a label that counts in no loss


class TextTask(trainkit.Task):
    """A model of tokens, its optimizer, and its weights in transformers' form.

    Args:
        model: tokens [B, T] to logits [B, T, V], T up to `model.context`; or what makes it, once
            the engine is there, so that a large one takes no memory until it is split (`_partial_:
            true` in a config).
        optimizer: makes an optimizer from parameter groups.
        lr: makes a schedule from the optimizer and the number of steps of the run; None for a
            constant rate.
        no_weight_decay: kinds of parameters without weight decay: norm, bias, embedding.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
    ) -> None:
        super().__init__()
        self.optimizer, self.lr, self.no_weight_decay = optimizer, lr, no_weight_decay
        self._make: Callable[[], nn.Module] | None = None
        if isinstance(model, nn.Module):
            self.model = model
        else:
            self._make = model

    def configure_model(self) -> None:
        if self._make is not None:
            self.model = self._make()

    @property
    def tokens_per_sample(self) -> float | None:
        """Return the tokens of a window, for the rate in the progress bar."""
        return getattr(self.model, "context", None)

    @property
    def example_input_array(self) -> Tensor:
        """Return tokens [2, T] for export: a batch of the data holds the targets too."""
        return torch.arange(2 * self.model.context).view(2, -1) % getattr(
            self.model, "vocab_size", _BYTES
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT)

    def on_fit_start(self) -> None:
        """Compare the vocabularies: a larger number would be an index out of range.
        Keep the tokenizer, for `generate`.
        """
        data, held = self.trainer.datamodule, getattr(self.model, "vocab_size", _BYTES)
        needed, tokenizer = getattr(data, "vocab_size", None), getattr(data, "tokenizer", None)
        if needed is not None and held < needed:
            raise ConfigError(
                f"task.model.vocab_size is {held}; it must be {needed} or more, the data's. Set"
                f" task.model.vocab_size={needed}."
            )
        if (
            isinstance(tokenizer, Path)
            and self.trainer.is_global_zero
            and not self.trainer.options.fast_dev_run
        ):
            shutil.copyfile(tokenizer, self.trainer.run_dir / "tokenizer.json")

    def parallelize(self, mesh: Any) -> dict[str, str] | None:
        """Share the blocks of the models here over the ranks of a tensor group;
        a model of another kind has no plan.
        """
        heads = getattr(self.model, "heads", None)
        return None if heads is None else plan_of_blocks(heads, mesh.size())

    def compare_config(self, config: Mapping[str, Any]) -> list[str]:
        """Return how the config of a model of this form differs, one line each."""
        if not hasattr(self.model, "settings"):
            return []
        ours = dict(self.model.settings())
        if hasattr(self.model, "note_of_weights"):  # it says this one
            ours.pop("activation_function", None)
        heads = dict.fromkeys(("n_head", "num_attention_heads"), "task.model.heads")
        return differences(config, ours, heads)

    def translate_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights of transformers by this Task's names; others as they are."""
        translate = getattr(self.model, "from_huggingface", None)
        translated = translate(weights) if translate else None
        if translated is None:
            return weights
        if note := getattr(self.model, "note_of_weights", None):
            with contextlib.suppress(TaskError):  # an export reads its own file, without a run
                self.trainer.say(note)
        return {f"model.{name}": tensor for name, tensor in translated.items()}

    def export_huggingface(self, folder: Path) -> None:
        """Write config.json and model.safetensors, for transformers' `from_pretrained`."""
        if not hasattr(self.model, "to_huggingface"):
            raise TaskError(
                f"transformers has no model of {type(self.model).__name__}'s kind, so it cannot be"
                " written for it; export format=safetensors writes its weights."
            )
        config, weights = self.model.to_huggingface()
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def configure_optimizers(self) -> Any:
        return with_schedule(
            self,
            self.optimizer(decay_groups(self.model, no_weight_decay=self.no_weight_decay)),
            self.lr,
        )


class LanguageModel(TextTask):
    """Predicts each next token, under the cross-entropy.
    All windows have one length, so each token weighs the same.

    Args:
        model: see TextTask, as for the next three.
        z_loss: the factor of log^2 Z that training adds to the loss, logged as `train/z_loss`; see
            token_loss. The model then has `states`, what its layer `head` reads.
        loss_chunk: tokens of a microbatch that have logits at a time, which needs `states` too; None
            for all.
    """

    batch_shape = "tokens [B, T + 1]"

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        z_loss: NonNegativeFloat = 0.0,
        loss_chunk: PositiveInt | None = None,
    ) -> None:
        super().__init__(model, optimizer, lr, no_weight_decay)
        self.z_loss, self.loss_chunk = z_loss, loss_chunk

    def _losses(self, text_BT: Tensor) -> TokenLoss:
        """Return the means over the predicted tokens; those of all ranks that share them."""
        tokens_BT, next_N = part(text_BT[:, :-1]), part(text_BT[:, 1:]).flatten()
        if self.loss_chunk is None and not self.z_loss:
            loss = functional.cross_entropy(self(tokens_BT).flatten(0, 1), next_N)
            loss = mean_of_parts(loss)
            return TokenLoss(loss, torch.zeros_like(loss))
        if not hasattr(self.model, "states"):
            raise ConfigError(
                f"task.loss_chunk is {self.loss_chunk} and task.z_loss {self.z_loss:g}, but"
                f" {type(self.model).__name__} has no states(tokens): what its layer `head` reads."
                " Give it one, as recipes.gpt.GPT has, or set task.loss_chunk=null task.z_loss=0."
            )
        states_ND = self.model.states(tokens_BT).flatten(0, 1)
        sums = token_loss(states_ND, next_N, self.model.head, self.loss_chunk, self.z_loss)
        count = text_BT[:, 1:].numel()
        return TokenLoss(*(sum_of_parts(total) / count for total in sums))

    def _loss(self, text_BT: Tensor) -> Tensor:
        return self._losses(text_BT).cross_entropy

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss, added = self._losses(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        if not self.z_loss:
            return loss
        self.log("train/z_loss", added, on_step=True, on_epoch=True)
        return loss + added

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Tensor, stage: str) -> None:
        self._log_loss(self._loss(batch), stage)

    def _log_loss(self, loss: Tensor, stage: str, **options: Any) -> None:
        is_bytes = getattr(self.model, "vocab_size", _BYTES) == _BYTES
        self.log(f"{stage}/loss", loss, prog_bar=not is_bytes, **options)
        if is_bytes:
            self.log(f"{stage}/bits_per_byte", loss / math.log(2), prog_bar=True, **options)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the likeliest token after each window, [B]."""
        return self(batch[:, -self.model.context :])[:, -1].argmax(-1)

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> Iterator[str]:
        """Yield the text that continues a prompt, as it is sampled; `python -m trainkit generate`
        prints it.

        Args:
            prompt: tokens before its last `model.context` have no effect.
            max_new_tokens: tokens to sample; the token that ends a text ends it earlier.
            temperature: divides the logits; 0 takes the likeliest token each time.
            top_k: sample among this many likeliest tokens; None for all.
            top_p: sample among the fewest tokens that have this probability together; None for all.
            seed: of the draws.
            tokenizer: a tokenizer.json; None for bytes.
        """
        ask = Ask(prompt, max_new_tokens, temperature, top_k, top_p, seed)
        yield from pieces_of(self.text_source(tokenizer), ask)

    def text_source(self, tokenizer: str | None = None) -> TokenSource:
        """Return what `generate` and `serve` continue texts with.

        Raises:
            ConfigError: the tokenizer is another model's.
        """
        own, held = open_tokenizer(tokenizer), getattr(self.model, "vocab_size", _BYTES)
        if own.vocab_size > held or (tokenizer is None and held > _BYTES):
            given = f"{tokenizer} has {own.vocab_size}" if tokenizer else "there is no tokenizer"
            raise ConfigError(
                f"The model has {held} tokens, but {given}. Give the tokenizer of its data:"
                " tokenizer=FILE."
            )
        return TokenSource(self._reader, own, self.device)

    def _reader(self) -> Reader:
        return Whole(self, self.model.context, self.device)


class MaskedLanguageModel(TextTask):
    """Predicts masked tokens. A step's gradient is that of the mean over its masked tokens, on any
    number of ranks.

    A batch is (tokens [B, T], labels [B, T]): the tokens before masking where they are predicted,
    -100 elsewhere. `val/loss` is the mean over all masked tokens; `train/loss_epoch` that of the
    batches' means, by samples.
    """

    batch_shape = "masked tokens [B, T] and labels [B, T]"

    def batch_weight(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the number of tokens that the batch predicts."""
        return (batch[1] != _UNMASKED).sum()

    def _evaluated(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens_BT, labels_BT = batch
        logits_BTV, count = self(tokens_BT), self.batch_weight(batch).clamp(min=1)
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        logits_NV, labels_N = logits_BTV.flatten(0, 1), labels_BT.flatten()
        total = functional.cross_entropy(
            logits_NV, labels_N, ignore_index=_UNMASKED, reduction="sum"
        )
        return total / count, (logits_BTV.argmax(-1) == labels_BT).sum() / count

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._evaluated(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        (loss, accuracy), count = self._evaluated(batch), int(self.batch_weight(batch))
        self.log(f"{stage}/loss", loss, prog_bar=True, batch_size=count)
        self.log(f"{stage}/acc", accuracy, prog_bar=True, batch_size=count)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the likeliest token at each place, [B, T]."""
        return self(batch[0]).argmax(-1)
