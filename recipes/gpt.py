"""A small GPT on the bytes of text files: a pre-norm decoder (Radford et al. 2019), 256 tokens, no tokenizer."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import trainkit
from recipes.schedule import with_schedule
from trainkit.arguments import ExistingFile, ExistingFolder, Fraction, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.optim import decay_groups

_BYTES = 256


class Block(nn.Module):
    """Causal attention and a wide layer, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, dropout_p=dropout)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.wide(self.norm2(x_BTD))


class GPT(nn.Module):
    """Bytes [B, T] in, logits of the next byte [B, T, 256] out.

    Args:
        context: the longest input, in bytes.
        width: features of each byte.
        depth: number of blocks.
        heads: of attention; they divide `width`.
        dropout: share of activations dropped while training.
    """

    def __init__(
        self,
        context: PositiveInt = 128,
        width: PositiveInt = 128,
        depth: PositiveInt = 4,
        heads: PositiveInt = 4,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"task.model.heads is {heads}; it must divide task.model.width={width}. Change one.")
        self.context = context
        self.tokens, self.places = nn.Embedding(_BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _BYTES, bias=False)
        for table in (self.tokens, self.places):  # 0.02, as in GPT-2, learns slower: 2.36 after 220 steps instead of 2.26
            nn.init.normal_(table.weight, std=0.05)
        for layer in self.blocks.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        for block in self.blocks:  # scaled down by the number of blocks (Radford et al. 2019, section 2.3)
            for layer in (block.out, block.wide[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.tokens.weight  # tied (Press & Wolf 2017)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        T = bytes_BT.shape[1]
        if self.context < T:
            raise ConfigError(f"task.model.context is {self.context}; it must be {T} or more, for a text of {T} bytes.")
        x_BTD = self.tokens(bytes_BT) + self.places.weight[:T]
        return self.head(self.norm(self.blocks(x_BTD)))


class LanguageModel(trainkit.Task):
    """Predicts each next byte, under the cross-entropy. All windows have one length, so each byte weighs the same.

    Args:
        model: bytes [B, T] to logits [B, T, 256], T up to `model.context`.
        optimizer: makes an optimizer from parameter groups.
        lr: makes a schedule from the optimizer and the number of steps of the run; None for a constant rate.
        no_weight_decay: kinds of parameters without weight decay: norm, bias, embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        lr: Callable[..., Any] | None = None,
        no_weight_decay: list[Literal["norm", "bias", "embedding"]] = ("norm", "bias"),
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.lr, self.no_weight_decay = model, optimizer, lr, no_weight_decay

    @property
    def tokens_per_sample(self) -> float | None:
        """Return the bytes that a window predicts, for the rate in the progress bar."""
        return getattr(self.model, "context", None)

    @property
    def example_input_array(self) -> Tensor:
        """Return bytes [2, T] for export: a batch of the data is one byte longer, and holds the targets too."""
        return torch.arange(2 * self.model.context).view(2, -1) % _BYTES

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return self.model(bytes_BT)

    def _loss(self, text_BT: Tensor) -> Tensor:
        logits_BTV = self(text_BT[:, :-1])
        return functional.cross_entropy(logits_BTV.flatten(0, 1), text_BT[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.log("val/loss", loss)
        self.log("val/bits_per_byte", loss / math.log(2), prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/bits_per_byte", self._loss(batch) / math.log(2))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the likeliest next byte after each window, [B]."""
        return self(batch[:, -self.model.context :])[:, -1].argmax(-1)

    @torch.no_grad()
    def generate(
        self, prompt: str, max_new_tokens: int = 256, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Iterator[str]:
        """Yield the text that continues a prompt, as it is sampled; `python -m trainkit generate` prints it.

        Args:
            prompt: bytes before its last `model.context` have no effect.
            max_new_tokens: bytes to sample.
            temperature: divides the logits; 0 takes the likeliest byte each time.
            top_k: sample among this many likeliest bytes (Fan et al. 2018, section 5.4); None for all.
            seed: of the draws.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may be several bytes
        bytes_T = torch.tensor(list(prompt.encode() or b"\n"), device=self.device)
        for _ in range(max_new_tokens):
            bytes_T = bytes_T[-self.model.context :]
            logits_V = self(bytes_T[None])[0, -1]
            if temperature == 0:
                chosen = logits_V.argmax()[None]
            else:
                best_K, places_K = logits_V.topk(min(top_k or _BYTES, _BYTES))
                chosen = places_K[torch.multinomial((best_K / temperature).softmax(-1), 1, generator=generator)]
            bytes_T = torch.cat([bytes_T, chosen])
            yield decoder.decode(bytes([int(chosen)]))
        yield decoder.decode(b"", final=True)

    def configure_optimizers(self) -> Any:
        return with_schedule(self, self.optimizer(decay_groups(self.model, no_weight_decay=self.no_weight_decay)), self.lr)


class Windows(Dataset):
    """Windows of `length` bytes, int64; each begins with the last byte of the one before, the last ends with the text."""

    def __init__(self, text: Tensor, length: int) -> None:
        last = len(text) - length
        self.text, self.length, self.starts = text, length, [*range(0, last, length - 1), last]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.length].long()


class TextBytes(trainkit.DataModule):
    """The bytes of a file, or of all text files of a folder; the last tenth of them for validation.

    Args:
        root: a folder; without it and a file, trainkit's own sources are read, so nothing is downloaded.
        pattern: of the files below root. Default: **/*.txt, and **/*.py of trainkit's own sources.
        batch_size: the microbatch of one rank, in windows.
        context: bytes that the model sees of a window.
        num_workers: loader processes; the text is in memory, so none is fastest.
        file: a text file, in place of a folder.
    """

    def __init__(
        self,
        root: ExistingFolder | None = None,
        pattern: str | None = None,
        batch_size: PositiveInt = 16,
        context: PositiveInt = 128,
        num_workers: NonNegativeInt = 0,
        file: ExistingFile | None = None,
    ) -> None:
        if file is not None and (root, pattern) != (None, None):
            raise ConfigError(f"data.file is '{file}', and data.root or data.pattern is set too. Give a file, or a folder.")
        self.file = None if file is None else Path(file)
        self.root = Path(trainkit.__file__).parent if root is None else Path(root)
        self.pattern = pattern or ("**/*.py" if root is None else "**/*.txt")
        self.batch_size, self.context, self.num_workers = batch_size, context, num_workers

    def setup(self, stage: str) -> None:
        files = [self.file] if self.file else sorted(path for path in self.root.glob(self.pattern) if path.is_file())
        text = bytearray(b"\n".join(path.read_bytes() for path in files))
        if len(text) < 20 * (self.context + 1):
            where, hint = f"data.file is {self.file}: it has", "Give a longer text"
            if self.file is None:
                where = f"data.root is {self.root}: the {len(files)} files that match data.pattern={self.pattern} have"
                hint = "Give a folder with more text, or another pattern"
            least = 20 * (self.context + 1)
            raise DataError(
                f"{where} {len(text)} bytes, too few for windows of {self.context} ({least}). {hint}, or a smaller "
                "data.context."
            )
        whole = torch.frombuffer(text, dtype=torch.uint8)
        split = len(whole) * 9 // 10
        self.train, self.val = Windows(whole[:split], self.context + 1), Windows(whole[split:], self.context + 1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
