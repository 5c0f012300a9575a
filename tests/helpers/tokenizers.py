"""Small tokenizers, trained on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = (
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to"
    " suffer\n\tcaf\u00e9 \u20ac \U0001f600\n"
)
OF_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_tokenizer(
    path: Path, special: tuple[str, ...] = ("<|endoftext|>",), vocab_size: int = 300
) -> Path:
    """Write a tokenizer of GPT-2's kind (pairs of bytes) of TEXT,
    or skip the test without its library; return its path.
    """
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.enable_truncation(4)  # as many files have; no corpus may be cut by it
    made.enable_padding()
    made.save(str(path))
    return path
