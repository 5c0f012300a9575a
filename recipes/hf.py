"""Tasks for models of transformers (trainkit[transformers]): any AutoModelForSequenceClassification
or AutoModelForCausalLM.

The model is one of a local folder, as `save_pretrained` leaves it, or has random weights: a model
type and its config. The fit's end leaves such a folder too: <run_dir>/pretrained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

import trainkit
from recipes.causal_model import ignores_padding
from recipes.experts import in_float64, joined
from recipes.hf_data import Bytes
from recipes.schedule import with_schedule
from recipes.weights_config import differences_of_config
from trainkit.api.view import with_role
from trainkit.arguments import ExistingFolder, PositiveInt
from trainkit.console import short
from trainkit.errors import ConfigError, TaskError, did_you_mean
from trainkit.extensions.exporting.hub_files import source_of, write_generation
from trainkit.extensions.language.sampling import Ask, pieces_of
from trainkit.extensions.language.sources import TransformersSource, load_tokenizer
from trainkit.optim import decay_groups

try:
    import transformers
except ImportError as error:
    raise ConfigError(
        "This recipe needs transformers: pip install 'trainkit[transformers]'"
    ) from error

Batch = Mapping[str, Tensor]
_MASKED = -100  # a label that counts in no loss
# Kinds that take a mask as their attention reads it. Of a mask of padding transformers asks whether it
# hides anything, for which a GPU's host waits in each forward.
READS_WHOLE_MASKS = (
    "albert",
    "bert",
    "camembert",
    "data2vec-text",
    "distilbert",
    "electra",
    "ernie",
    "nomic_bert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
)


def load_model(
    auto: Any,
    folder: str | None,
    model_type: str | None,
    config: dict[str, Any] | None,
    new_head: bool = False,
    **options: Any,
) -> Any:
    """Return a model of a folder, or one of a type with random weights; in float32, in train mode.

    Args:
        auto: a class of transformers, as AutoModelForCausalLM.
        folder: of a pretrained model, or its name on a hub; then there is neither type nor config.
        model_type: as bert, gpt2, llama.
        config: arguments of the type's config.
        new_head: whether a folder's head of another size is replaced by one of random weights.
        options: further arguments of the config, as num_labels.

    Raises:
        ConfigError: both or neither are given, an unknown type or argument, or a folder without a
            model, or with weights of other sizes than its config's.
    """
    if (folder is None) == (model_type is None) or (folder is not None and config):
        raise ConfigError(
            f"task.model is {folder}, task.model_type is {model_type}, task.config is {config}:"
            " give the folder of a model (task.model=FOLDER task.model_type=null"
            " task.config=null), or a type and its config (task.model=null)."
        )
    if folder is not None:
        try:
            loaded, about = auto.from_pretrained(
                folder,
                local_files_only=Path(folder).is_dir(),  # else a hub's name
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # of those but a new head's: see below
                output_loading_info=True,
                **options,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"task.model is '{folder}', and no model can be loaded from it: {error}"
            ) from error
        _check_sizes(folder, about["mismatched_keys"], loaded.base_model_prefix, new_head)
        return loaded.train()  # from_pretrained leaves it without dropout
    known = [*transformers.CONFIG_MAPPING]
    if model_type not in known:
        raise ConfigError(
            f"task.model_type is '{model_type}', which transformers"
            f" lacks.{did_you_mean(str(model_type), known)}"
        )
    plain = transformers.AutoConfig.for_model(model_type)
    for name in config or {}:  # transformers itself would accept any
        if not hasattr(plain, name):
            near = did_you_mean(name, [*plain.to_dict(), *plain.attribute_map])
            raise ConfigError(
                f"task.config.{name} is not a setting of {type(plain).__name__}.{near}"
            )
    for name in ("output_router_logits", "router_aux_loss_coef"):
        if (config or {}).get(name):
            raise ConfigError(
                f"task.config.{name} is {config[name]}, and has no effect: transformers'"  # type: ignore[index]
                " load-balancing loss is one of each microbatch on each rank, which would differ"
                " with their number, and training here is by the loss of the tokens alone. Leave it"
                " out. conf=llama task.experts=8 balances experts, on any ranks alike."
            )
    try:
        return auto.from_config(
            transformers.AutoConfig.for_model(model_type, **config or {}, **options)
        )
    except ValueError as error:
        raise ConfigError(
            f"task.model_type is '{model_type}', which {auto.__name__} refuses: {error}"
        ) from error


def _check_sizes(folder: str, others: Iterable[Any], base: str, new_head: bool) -> None:
    """Refuse weights of other sizes than the model's: transformers would draw them."""
    wrong = sorted(
        (name, tuple(held), tuple(needed))
        for name, held, needed in others
        if not new_head or name.startswith(f"{base}.")
    )
    if wrong:
        name, held, needed = wrong[0]
        more = f", and {len(wrong) - 1} more do not fit" if wrong[1:] else ""
        raise ConfigError(
            f"task.model is '{folder}': its weight '{name}' has the shape {held}, and its"
            f" config.json asks for {needed}{more}. They would be random. The folder's weights and"
            " its config.json belong together: save both by save_pretrained, after"
            " resize_token_embeddings too."
        )


class TransformersTask(trainkit.Task):
    """A model of transformers, its optimizer, and the folder that it leaves.

    Args:
        model: see `load_model`.
        optimizer: makes an optimizer from parameter groups.
        lr: makes a schedule from the optimizer and the number of steps of the run; None for a
            constant rate.
        no_weight_decay: kinds of parameters without weight decay: norm, bias, embedding.
        save_pretrained: whether the fit's end writes <run_dir>/pretrained, for transformers'
            `from_pretrained`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        save_pretrained: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.lr = model, optimizer, lr
        self.no_weight_decay, self.save_pretrained = no_weight_decay, save_pretrained

    @property
    def example_input_array(self) -> Tensor:
        """Return token numbers [2, 8] for export: a batch of the data is a dict."""
        return torch.arange(16).view(2, 8) % self.model.config.vocab_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits.

        Args:
            attention_mask: [B, T], 0 at padding.
        """
        config = self.model.config
        if (
            attention_mask is not None
            and config.model_type in READS_WHOLE_MASKS
            and config._attn_implementation == "sdpa"
        ):
            attention_mask = attention_mask.bool()[:, None, None, :]
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["input_ids"], batch["attention_mask"])

    def on_fit_start(self) -> None:
        """Compare the data's sizes with the model's:
        a larger number would be an index out of range in the first step.
        """
        data, config = self.trainer.datamodule, self.model.config
        for ours, name in (("vocab_size", "vocab_size"), ("max_length", "max_position_embeddings")):
            needed, held = getattr(data, ours, None), getattr(config, name, None)
            if needed is not None and held is not None and needed > held:
                raise ConfigError(
                    f"task.config.{name} is {held}; it must be {needed} or more, the data's {ours}."
                )
        in_float64(self, self.model)
        if getattr(config, "output_router_logits", False):
            self.trainer.say(
                f"The model's config has output_router_logits=true, to which transformers' Trainer"
                f" would add {getattr(config, 'router_aux_loss_coef', 0):g} times the load-balancing"
                " loss of each microbatch, another one with each number of ranks. Here experts are"
                " trained by the loss of the tokens alone."
            )

    def on_fit_end(self) -> None:
        if not self.save_pretrained or self.trainer.options.fast_dev_run:
            return
        if self.trainer.engine.splits_weights:
            self.trainer.say(
                "pretrained       not written: each rank holds a part of the weights; python -m"
                f" trainkit export run_dir={short(self.trainer.run_dir)} ckpt_path=last"
                " format=huggingface"
            )
        elif self.trainer.is_global_zero:
            self._write(self.trainer.run_dir / "pretrained")

    def _write(self, folder: Path) -> None:
        """Write the model, or its adapters alone, with the tokenizer of the data; and which tokens
        end a text.
        """
        transformers.utils.logging.disable_progress_bar()
        layers = with_role(self.trainer.callbacks, "layers")
        (layers[0] if layers else self.model).save_pretrained(folder)
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
            source = None if layers else source_of(self, str(folder))
            if source is not None:
                write_generation(folder, source)
        self.trainer.say(f"pretrained       {short(folder)}")

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
        """Write the model's own folder;
        `python -m trainkit export format=huggingface` calls this.
        """
        transformers.utils.logging.disable_progress_bar()
        self.model.save_pretrained(folder)

    def configure_optimizers(self) -> Any:
        return with_schedule(
            self,
            self.optimizer(decay_groups(self.model, no_weight_decay=self.no_weight_decay)),
            self.lr,
        )


class HFClassifier(TransformersTask):
    """Classes of texts, under the cross-entropy.

    A folder's head has classes of names; texts with labels of these names, in any case of letters,
    get its numbers.

    Args:
        num_classes: number of logits. A folder's head for another number is replaced.
        optimizer: see TransformersTask, as for the last two and `lr`.
        model: a folder, or None; see `load_model`.
        model_type: as bert.
        config: its arguments.
    """

    batch_shape = "a dict of input_ids [B, T], attention_mask [B, T] and labels [B]"

    def __init__(
        self,
        num_classes: PositiveInt,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        model: ExistingFolder | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        save_pretrained: bool = True,
    ) -> None:
        auto = transformers.AutoModelForSequenceClassification
        loaded = load_model(auto, model, model_type, config, new_head=True, num_labels=num_classes)
        super().__init__(loaded, optimizer, lr, no_weight_decay, save_pretrained)
        # the head's number of each of the data's classes
        self.register_buffer("_numbers", torch.arange(num_classes), persistent=False)
        self._renumbers = False

    def setup(self, stage: str) -> None:
        """Name the data's padding in the config: a decoder's head reads the last token before it."""
        try:
            pad = getattr(self.trainer.datamodule, "pad_token_id", None)
        except TaskError:  # an export builds the Task without a run
            return
        # an encoder's embeddings were made with the padding of its own config
        if pad is not None and hasattr(self.model, "score"):
            self.model.config.get_text_config().pad_token_id = pad

    def on_fit_start(self) -> None:
        """Number the data's classes as the head does, and name them in a new head's config."""
        super().on_fit_start()
        self._number()

    def on_validation_start(self) -> None:
        self._number()

    def on_test_start(self) -> None:
        self._number()

    def _number(self) -> None:
        classes = getattr(self.trainer.datamodule, "classes", None)
        if not classes or classes == (names := [*self.model.config.id2label.values()]):
            return
        if names == [f"LABEL_{number}" for number in range(len(names))]:
            self.model.config.id2label = dict(enumerate(classes))
            self.model.config.label2id = {name: number for number, name in enumerate(classes)}
            return
        ours, theirs = ([name.lower() for name in given] for given in (classes, names))
        if {*ours} == {*theirs}:
            self._renumbers = ours != theirs
            self._numbers.copy_(torch.tensor([theirs.index(name) for name in ours]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _ = self._evaluated(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, accuracy = self._evaluated(batch)
        self.log("val/loss", loss)
        self.log("val/acc", accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, accuracy = self._evaluated(batch)
        self.log("test/loss", loss)
        self.log("test/acc", accuracy)

    def _evaluated(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_BK = self(batch["input_ids"], batch["attention_mask"]).float()
        labels_B = self._numbers[batch["labels"]] if self._renumbers else batch["labels"]
        right_B = logits_BK.argmax(1) == labels_B
        return functional.cross_entropy(logits_BK, labels_B), right_B.float().mean()


class HFCausalLM(TransformersTask):
    """Predicts each next token. A step's gradient is that of the mean over its tokens, on any
    number of ranks.

    `val/loss` is the mean over all tokens; `train/loss_epoch` that of the batches' means, by
    samples.

    Args:
        optimizer: see TransformersTask, as for the last two and `lr`.
        model: a folder, or None; see `load_model`.
        model_type: as gpt2, llama.
        config: its arguments.
    """

    batch_shape = "a dict of input_ids [B, T], attention_mask [B, T] and labels [B, T]"

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        model: ExistingFolder | None = None,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
        save_pretrained: bool = True,
    ) -> None:
        loaded = load_model(transformers.AutoModelForCausalLM, model, model_type, config)
        super().__init__(loaded, optimizer, lr, no_weight_decay, save_pretrained)
        self._masks_padding = True

    def setup(self, stage: str) -> None:
        """Choose whether padding gets a mask: none, if the model does not see it."""
        self._masks_padding = not ignores_padding(self.model)

    def batch_weight(self, batch: Batch) -> Tensor:
        """Return the number of tokens that the batch predicts: all but the first of each text."""
        return (batch["labels"][:, 1:] != _MASKED).sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log(
            "val/loss", self._loss(batch), prog_bar=True, batch_size=int(self.batch_weight(batch))
        )

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test/loss", self._loss(batch), batch_size=int(self.batch_weight(batch)))

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
        """Yield the text that continues a prompt, as it is sampled; see language.sampling.Ask.
        `tokenizer` is a folder of save_pretrained; None for bytes.
        """
        ask = Ask(prompt, max_new_tokens, temperature, top_k, top_p, seed)
        yield from pieces_of(self.text_source(tokenizer), ask)

    def text_source(self, tokenizer: str | None = None) -> TransformersSource:
        """Return what `generate` and `serve` answer with; `tokenizer` as of `generate`."""
        is_of_bytes = tokenizer is None and self.model.config.vocab_size == Bytes.vocab_size
        return TransformersSource(self.model, Bytes() if is_of_bytes else load_tokenizer(tokenizer))

    def _loss(self, batch: Batch) -> Tensor:
        mask_BT = batch["attention_mask"] if self._masks_padding else None
        logits_BTV = self(batch["input_ids"], mask_BT).float()
        next_N = batch["labels"][:, 1:].flatten()
        total = functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), next_N, ignore_index=_MASKED, reduction="sum"
        )
        return total / self.batch_weight(batch).clamp(min=1)
