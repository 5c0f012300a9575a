"""Conversations for recipes/sft.py: documents in tokens, packed into rows; and a tokenizer of bytes
for those without one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from recipes.hf_data import TokensInMemory
from trainkit.arguments import ExistingFile, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.chat_template import Encoded, encode_all, use_template
from trainkit.extensions.language.conversations import Conversation, read_conversations
from trainkit.extensions.language.packing import Document, Layout, lay_out, pack

# ChatML, as many models have it
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sums() -> list[Conversation]:
    """Return 600 conversations of one or two sums and their results: the data of a recipe without a
    file.
    """
    draw = random.Random(0)
    result = []
    for number in range(600):
        messages = []
        for _ in range(1 + number % 2):
            a, b = draw.randrange(10), draw.randrange(10)
            messages += [
                {"role": "user", "content": f"{a} + {b} = ?"},
                {"role": "assistant", "content": f"{a + b}"},
            ]
        result.append(Conversation(messages, None, f"generated, row {number + 1}"))
    return result


class Conversations(TokensInMemory):
    """Conversations as documents of tokens, by the tokenizer's chat template.

    A sample is a pack of documents, which share a row of `max_length` tokens; without packing, one
    document. Which documents share a row depends on their lengths alone, not on ranks, and
    attention does not cross from one into another: packing changes how fast a step is, and which
    documents are in one step, but no document's gradient.

    Args:
        file: of training: a .jsonl or .parquet of messages, or a folder of datasets' save_to_disk;
            None for generated sums.
        val_file: of validation; None takes each tenth conversation of `file`.
        tokenizer: a folder or a hub's name of a tokenizer of transformers; None for bytes.
        chat_template: a file of one, in place of the tokenizer's own.
        loss: predict the assistant's answers alone, or all tokens.
        batch_size: the microbatch of one rank, in rows.
        max_length: tokens of a document and of a row at most.
        too_long: a document with more tokens loses its end, or is left out, or is an error.
        packing: whether short documents share a row.
        layout: of a batch: packed or padded, with the same gradients; auto takes packed if the
            model keeps documents apart.
        num_workers: loader processes; the tokens are in memory, so none is fastest.
    """

    batch_shape = "a dict of input_ids [B, T] and labels [B, T], of conversations"

    def __init__(
        self,
        file: str | None = None,
        val_file: str | None = None,
        tokenizer: str | None = None,
        chat_template: ExistingFile | None = None,
        loss: Literal["answers", "all"] = "answers",
        batch_size: PositiveInt = 8,
        max_length: PositiveInt = 256,
        too_long: Literal["cut", "leave_out", "refuse"] = "cut",
        packing: bool = True,
        layout: Literal["auto", "packed", "padded"] = "auto",
        num_workers: NonNegativeInt = 0,
    ) -> None:
        self.file, self.val_file, self.loss = file, val_file, loss
        self.batch_size, self.max_length, self.too_long = batch_size, max_length, too_long
        self.packing, self.layout, self.num_workers = packing, layout, num_workers
        self.used_layout: Layout = "padded" if layout == "padded" else "packed"
        self.tokenizer = byte_tokenizer() if tokenizer is None else load_tokenizer(tokenizer)
        use_template(self.tokenizer, chat_template, str(tokenizer))
        if loss == "answers" and not self.tokenizer.is_fast:
            raise ConfigError(
                f"data.tokenizer is '{tokenizer}', which cannot say where its tokens stand in the"
                " text (it has no tokenizer.json), so answers cannot be located. Set"
                " data.loss=all."
            )

    @property
    def vocab_size(self) -> int:
        """Return the number of different tokens."""
        return len(self.tokenizer)

    def setup(self, stage: str) -> None:
        rows = sums() if self.file is None else read_conversations(self.file)
        held_out = rows[::10] if self.val_file is None else read_conversations(self.val_file)
        if self.val_file is None:
            rows = [row for i, row in enumerate(rows) if i % 10]
        self.train = self._packs(rows, self.file or "generated sums")
        self.val = self._packs(held_out, self.val_file or "held out")

    def _packs(self, conversations: list[Conversation], name: str) -> Packs:
        documents = encode_all(
            conversations, self.tokenizer, self.loss, self.max_length, self.too_long
        )
        if len(documents) == 0:
            raise DataError(
                f"{name} has {len(conversations)} conversations, and none can be trained on:"
                f" {documents.num_too_long} are longer than data.max_length={self.max_length}, and"
                f" {documents.num_silent} have no token to predict within it. Raise"
                " data.max_length, add data, or set data.loss=all."
            )
        packs = Packs(documents, self.max_length if self.packing else None)
        run = getattr(self, "_trainer", None)
        if run is not None:
            run.say(f"conversations    {name}: {packs.describe(len(conversations))}")
        return packs

    def collate(self, samples: list[list[Document]]) -> dict[str, Tensor]:
        """Return a batch in the layout that the model takes; see `lay_out`."""
        pad = self.tokenizer.pad_token_id
        return lay_out(
            samples, self.used_layout, self.tokenizer.eos_token_id if pad is None else pad
        )


class Packs(Dataset[Any]):
    """Lists of documents that share a row.

    Args:
        documents: all.
        size: tokens of a row at most; None for one document in each.
    """

    def __init__(self, documents: Encoded, size: int | None) -> None:
        self.documents, self.size = documents, size
        lengths = documents.lengths()
        self.rows = [[i] for i in range(len(lengths))] if size is None else pack(lengths, size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Document]:
        return [self.documents.document(number) for number in self.rows[index]]

    def describe(self, num_read: int) -> str:
        """Return what was made of the conversations that were read, in a line."""
        held = self.documents
        size, trained = len(held.tokens), int(held.trained.sum())
        parts = [f"{num_read:,}, {size:,} tokens, {trained:,} of them to predict"]
        if self.size is not None:
            full = size / (len(self.rows) * self.size)
            parts.append(f"packed into {len(self.rows):,} rows, {full:.0%} full")
        counts = (
            (held.num_cut, "cut at data.max_length"),
            (held.num_too_long, "left out as too long"),
            (held.num_silent, "left out without a token to predict"),
        )
        parts += [f"{count:,} {what}" for count, what in counts if count]
        return "; ".join(parts)


def byte_tokenizer() -> Any:
    """Return a tokenizer of bytes with the tokens and the template of ChatML."""
    try:
        import tokenizers  # noqa: PLC0415 - optional, with transformers
        import transformers  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "This data needs transformers: pip install 'trainkit[transformers]'"
        ) from error
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    numbers = {token: number for number, token in enumerate([*special, *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=numbers, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=special[0],
        eos_token=special[2],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder, or of a hub's name.

    Raises:
        ConfigError: there is none, or it has no token to pad with.
    """
    try:
        import transformers  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer needs transformers: pip install 'trainkit[transformers]'"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=Path(name).is_dir()
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer is '{name}', and no tokenizer can be loaded from it: {error}"
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"data.tokenizer is '{name}', which has neither a token to pad with nor one that ends a"
            " text. Set one in its tokenizer_config.json: pad_token."
        )
    return tokenizer
