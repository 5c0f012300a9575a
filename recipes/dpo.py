"""Direct preference optimization (Rafailov et al. 2023) of a chat model: any AutoModelForCausalLM of
transformers (trainkit[transformers]), on pairs of answers (recipes/dpo_data.py).

The reference is the starting model: its log-probabilities are computed once
(recipes/dpo_reference.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from recipes import dpo_reference
from recipes.causal_model import ignores_padding
from recipes.dpo_data import Pairs, PreferencePairs
from recipes.sft import ChatModel
from trainkit.arguments import PositiveFloat
from trainkit.errors import CheckpointError, ConfigError, TaskError, did_you_mean
from trainkit.extensions.adapters.quantized import Quantization
from trainkit.extensions.language.packing import IGNORED
from trainkit.run.evaluator import evaluating

Batch = Mapping[str, Tensor]
LOSS_TYPES = ("sigmoid", "robust", "hinge", "ipo")


class PreferenceModel(ChatModel):
    """Learns to prefer the chosen answers, compared with the model that it starts from.

    Logs the loss, and of the rewards (beta times how much likelier an answer has become) the means
    `rewards/chosen`, `rewards/rejected` and `rewards/margins`, and the share `rewards/accuracies` of
    pairs with a positive margin, below `train/`, `val/` or `test/`.

    Args:
        optimizer: see ChatModel, as for all that is not here.
        loss_type: sigmoid (DPO; with `label_smoothing` the conservative one of Mitchell 2023),
            robust (Chowdhury et al. 2024), hinge (SLiC, Zhao et al. 2023) or ipo (Azar et al. 2023,
            by the mean over an answer's tokens).
        beta: how near the model stays to the starting one; ipo's tau.
        label_smoothing: the probability that a pair's answers are exchanged.
        disable_dropout: train without the model's dropout; that of adapters is their own setting.
    """

    batch_shape = "a dict of input_ids [B, 2, T] and labels [B, 2, T], of preference pairs"
    batch_weight = trainkit.Task.batch_weight  # a pair is a sample

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        loss_type: str = "sigmoid",
        beta: PositiveFloat = 0.1,
        label_smoothing: float = 0.0,
        model: str | None = None,
        revision: str | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        disable_dropout: bool = True,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        save_pretrained: bool = True,
        quantization: Quantization | None = None,
    ) -> None:
        _check_loss(loss_type, label_smoothing)
        super().__init__(
            optimizer,
            lr,
            model,
            revision,
            model_type,
            config,
            attention,
            no_weight_decay,
            save_pretrained,
            quantization=quantization,
        )
        self.loss_type, self.beta, self.label_smoothing = loss_type, beta, label_smoothing
        for module in self.model.modules() if disable_dropout else ():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self._tables: dpo_reference.Tables = {}
        self._hashes: dict[str, str] | None = None  # those of the checkpoint to resume from

    def setup(self, stage: str) -> None:
        """Choose whether padding gets a mask: none, if the model does not see it."""
        super().setup(stage)
        self._masks_padding = not ignores_padding(self.model)

    # -- the reference ------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._refer()

    def on_validation_start(self) -> None:
        self._refer_to_evaluate()

    def on_test_start(self) -> None:
        self._refer_to_evaluate()

    def on_predict_start(self) -> None:
        self._refer_to_evaluate()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dpo_reference"] = dpo_reference.hashes_of(self._tables)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._hashes = checkpoint.get("dpo_reference", {})

    def _refer_to_evaluate(self) -> None:
        if self.trainer.state.phase != "fit":
            self._refer()

    def _refer(self) -> None:
        """Give the data the reference: computed at a run's start, else that of its start."""
        run, data = self.trainer, self.trainer.datamodule
        if not isinstance(data, PreferencePairs):  # a replay: its batches hold it
            return
        pairs, hashes, self._hashes = [data.train, data.val], self._hashes, None
        folder = run.run_dir / dpo_reference.FOLDER
        if run.state.phase == "fit" and run.checkpoints.resumed_from is None:
            self._tables = {each.digest: self._compute(each, data) for each in pairs}
            run.engine.comm.run_on_main(partial(dpo_reference.save, folder, self._tables))
        else:
            if hashes == {}:
                raise CheckpointError(
                    "The checkpoint is not one of conf=dpo: it does not say which model its pairs"
                    " are compared with. To start from its weights: init_weights=CHECKPOINT in"
                    " place of ckpt_path."
                )
            self._tables = run.engine.comm.run_on_main(
                lambda: dpo_reference.load(folder, pairs, hashes, self._tables)
            )
        data.reference = torch.cat([self._tables[each.digest] for each in pairs]).to(
            run.engine.device
        )

    def _compute(self, pairs: Pairs, data: PreferencePairs) -> Tensor:
        run = self.trainer
        run.say(f"reference        {len(pairs):,} pairs under the starting model")

        def logps_of(places: Sequence[int]) -> Tensor:
            batch = data.collate([pairs[place] for place in places])
            on_device = {name: tensor.to(run.engine.device) for name, tensor in batch.items()}
            return self.logps(on_device)

        with evaluating(self), run.precision.autocast():
            return dpo_reference.compute(run, pairs, data.batch_size, logps_of)

    # -- a step -------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._evaluate(batch, "train", on_step=True, on_epoch=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the margin of the rewards of each pair, [B]."""
        chosen_B, rejected_B = self._rewards(self._ratios(batch))
        return chosen_B - rejected_B

    def _evaluate(self, batch: Batch, stage: str, **how: bool) -> Tensor:
        ratios_B2 = self._ratios(batch)
        lengths_B2 = (batch["labels"] != IGNORED).sum(-1)
        loss = preference_loss(
            ratios_B2, lengths_B2, self.loss_type, self.beta, self.label_smoothing
        ).mean()
        self.log(f"{stage}/loss", loss, prog_bar=True, **how)
        chosen_B, rejected_B = self._rewards(ratios_B2.detach())
        for name, values_B in (
            ("chosen", chosen_B),
            ("rejected", rejected_B),
            ("margins", chosen_B - rejected_B),
            ("accuracies", (chosen_B > rejected_B).to(chosen_B.dtype)),
        ):
            self.log(f"{stage}/rewards/{name}", values_B.mean(), **how)
        return loss

    def _rewards(self, ratios_B2: Tensor) -> tuple[Tensor, Tensor]:
        return self.beta * ratios_B2[:, 0], self.beta * ratios_B2[:, 1]

    def _ratios(self, batch: Batch) -> Tensor:
        """Return the log-probabilities less those under the starting model, [B, 2]."""
        if "reference" not in batch:
            raise TaskError(
                "A batch has no reference: log-probabilities [B, 2] of its pairs under the starting"
                " model. Take the data of recipes/dpo_data.py, or put them into the batch."
            )
        return self.logps(batch) - batch["reference"]

    def logps(self, batch: Batch) -> Tensor:
        """Return the log-probability of each answer after its prompt, [B, 2], in float32 at least."""
        rows = {
            name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")
        }
        mask = rows["attention_mask"] if self._masks_padding else None
        logits_NTV = self(rows["input_ids"], mask)[:, :-1]
        logits_NTV = logits_NTV.to(torch.promote_types(logits_NTV.dtype, torch.float32))
        next_NT = rows["labels"][:, 1:]
        losses = functional.cross_entropy(
            logits_NTV.flatten(0, 1), next_NT.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return -losses.view_as(next_NT).sum(1).view(-1, 2)


def preference_loss(
    ratios_B2: Tensor,
    lengths_B2: Tensor,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of each pair, [B]; see PreferenceModel.

    Args:
        ratios_B2: log-probabilities of the chosen and the rejected answer, less those under the
            reference.
        lengths_B2: tokens of these answers.
        loss_type: see PreferenceModel, as for the rest.
    """
    if loss_type == "ipo":
        means_B2 = ratios_B2 / lengths_B2
        return (means_B2[:, 0] - means_B2[:, 1] - 1 / (2 * beta)) ** 2
    margins_B = beta * (ratios_B2[:, 0] - ratios_B2[:, 1])
    if loss_type == "hinge":
        return functional.relu(1 - margins_B)
    right_B, wrong_B = -functional.logsigmoid(margins_B), -functional.logsigmoid(-margins_B)
    if loss_type == "robust":
        total_B = (1 - label_smoothing) * right_B - label_smoothing * wrong_B
        return total_B / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right_B + label_smoothing * wrong_B


def _check_loss(loss_type: str, label_smoothing: float) -> None:
    if loss_type not in LOSS_TYPES:
        raise ConfigError(
            f"task.loss_type is '{loss_type}'; it must be one of {', '.join(LOSS_TYPES)}."
            f"{did_you_mean(loss_type, LOSS_TYPES)}"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"task.label_smoothing is {label_smoothing}; it must be at least 0 and below 0.5."
        )
    if label_smoothing and loss_type in ("hinge", "ipo"):
        raise ConfigError(
            f"task.label_smoothing is {label_smoothing}, which has no effect with"
            f" task.loss_type={loss_type}. Leave it out, or use sigmoid or robust."
        )
