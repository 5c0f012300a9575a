"""recipes/tokens.py: windows of a folder of tokens,
and masks that depend on the sample and the epoch alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.gpt import Windows
from recipes.tokens import MaskedTokens, MaskedWindows, TokenFiles, own_sources
from tests.helpers.tokenizers import OF_BERT, TEXT, train_tokenizer
from trainkit.data.order import SeededDataset
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.token_writer import write_tokens

SPECIAL = {"end_of_text": 3, "begin": 2, "mask": 4}


def folder(tmp_path: Path, special: tuple[str, ...] | None = None, repeats: int = 20) -> Path:
    """Write a folder of tokens, of bytes without special tokens; return it."""
    (tmp_path / "a.txt").write_text(TEXT * repeats, encoding="utf-8")
    tokenizer = None if special is None else train_tokenizer(tmp_path / "tokenizer.json", special)
    return write_tokens(tmp_path / "a.txt", tmp_path / "tokens", tokenizer).root


def test_windows_cover_the_files(tmp_path: Path) -> None:
    """Each token of train.bin but the first is predicted; val.bin is apart;
    the folder's tokenizer is known.
    """
    data = TokenFiles(
        str(folder(tmp_path, ("<|endoftext|>",))), vocab_size=400, batch_size=4, context=16
    )
    data.setup("fit")
    whole = data.train.text[:].tolist()
    windows = [window.tolist() for window in Windows(data.train.text, 17)]
    assert [token for window in windows[:-1] for token in window[1:]] == whole[
        1 : 1 + 16 * (len(windows) - 1)
    ]
    assert windows[-1] == whole[-17:] and len(windows) == len(data.train)
    assert next(iter(data.train_dataloader())).shape == (4, 17)
    assert len(data.val.text) == (len(whole) + len(data.val.text)) // 10
    assert data.tokenizer == tmp_path / "tokens" / "tokenizer.json"


def test_workers_read_the_files(tmp_path: Path) -> None:
    """In processes of their own, also if these are spawned: the files are opened there."""
    data = TokenFiles(str(folder(tmp_path)), batch_size=4, context=16)
    data.setup("fit")
    alone = [batch.tolist() for batch in torch.utils.data.DataLoader(data.val, 4)]
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert [
        batch.tolist() for batch in torch.utils.data.DataLoader(data.val, 4, **options)
    ] == alone


def test_without_a_folder_there_is_a_text() -> None:
    """A megabyte of trainkit's own sources: an epoch does not grow with them; each file ends with
    the end of a text.
    """
    train, val = own_sources()
    assert len(val) > 10_000 and val[-1] == 0xFF and (train == 0xFF).sum() > 100
    assert 1_000_000 <= len(train) + len(val) < 1_050_000
    data = TokenFiles()
    data.setup("fit")
    assert (data.tokenizer, data.vocab_size, len(data.train[0])) == (None, 256, 1025)


@pytest.mark.parametrize(
    ("make", "options", "kind", "said"),
    [
        (
            TokenFiles,
            {"vocab_size": 256, "context": 16},
            ConfigError,
            r"data\.vocab_size is 256; it must be \d+ or more.*Set data",
        ),
        (
            TokenFiles,
            {"vocab_size": 400, "context": 2000},
            DataError,
            r"its train part has \d+ tokens, too few for a window",
        ),
        (
            TokenFiles,
            {"vocab_size": 400, "context": 300},
            DataError,
            r"its val part has \d+ tokens, too few for a window",
        ),
        (
            MaskedTokens,
            {"vocab_size": 400, "context": 16},
            ConfigError,
            "its tokenizer has no token for masks",
        ),
    ],
)
def test_data_that_does_not_fit_is_explained(
    make: Any, options: Any, kind: type, said: str, tmp_path: Path
) -> None:
    """The error names the key, the value, and what to do."""
    data = make(str(folder(tmp_path, ("<|endoftext|>",))), **options)
    with pytest.raises(kind, match=said):
        data.setup("fit")


def masked(share: float = 0.15, special: dict[str, int] = SPECIAL) -> MaskedWindows:
    """Return masked windows of a long text of tokens 10 to 99."""
    text = torch.randint(10, 100, (40_000,), generator=torch.Generator().manual_seed(0))
    text[::50] = SPECIAL["end_of_text"]
    return MaskedWindows(text, 102, special, 100, share)


def test_masks_are_drawn_by_sample_and_epoch() -> None:
    """The same in a repeated epoch, whatever was read before;
    others in another epoch, and for another seed.
    """
    seeded = SeededDataset(masked(), seed=1)
    first = seeded[(0, 7)]
    seeded.__getitems__([(0, 3), (1, 7)])
    assert all(torch.equal(a, b) for a, b in zip(first, seeded[(0, 7)], strict=True))
    others = (seeded[(1, 7)], SeededDataset(masked(), seed=2)[(0, 7)])
    assert all(not torch.equal(first[1], other[1]) for other in others)


def test_shares_are_berts() -> None:
    """15 % are to be predicted; of these 80 % are masked, 10 % random and 10 % left;
    no special token is touched.
    """
    torch.manual_seed(0)
    data = masked()
    plain = torch.cat([data.of_text[i] for i in range(len(data))]).view(len(data), -1)
    tokens, labels = (
        torch.stack(part) for part in zip(*(data[i] for i in range(len(data))), strict=True)
    )
    assert (
        (tokens[:, 0] == 2).all()
        and (tokens[:, -1] == 3).all()
        and (labels[:, [0, -1]] == -100).all()
    )
    tokens, labels = tokens[:, 1:-1], labels[:, 1:-1]
    chosen, ends = labels != -100, plain == 3
    assert torch.equal(labels[chosen], plain[chosen]) and torch.equal(
        tokens[~chosen], plain[~chosen]
    )
    assert ends.any() and not chosen[ends].any()
    assert chosen[~ends].float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert (tokens[chosen] == 4).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (tokens[chosen] == plain[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_masked_windows_cover_the_text() -> None:
    """Each token is in a window; without a token to begin with, windows have no frame."""
    data = masked(share=0.0)
    assert len(data) == 400 and torch.equal(
        torch.cat([data[i][0][1:-1] for i in range(400)]), data.of_text.text
    )
    plain = masked(share=0.0, special={"end_of_text": 3, "mask": 4})
    assert torch.equal(plain[5][0], plain.of_text.text[510:612]) and len(plain) == 393


def test_a_folder_of_berts_tokens(tmp_path: Path) -> None:
    """The special tokens come from the folder; bytes have some too."""
    data = MaskedTokens(str(folder(tmp_path, OF_BERT)), vocab_size=400, context=16)
    data.setup("fit")
    tokens, labels = data.train[0]
    assert (tokens[0], tokens[-1], tokens.shape, labels.shape) == (2, 3, (16,), (16,))
    own = MaskedTokens(context=16, mask_share=1.0)
    own.setup("fit")
    assert (own.train[0][0] == 0xFD).any()
