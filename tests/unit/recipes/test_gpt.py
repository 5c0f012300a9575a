"""The GPT: causal, within its context, and fed with the whole text."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainkit
from recipes.gpt import GPT, LanguageModel, TextBytes, Windows
from tests.helpers.toy import quiet
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.language.sampling import Ask, begin, continue_all


def small(context: int = 16) -> GPT:
    """Return a model of a few thousand weights."""
    torch.manual_seed(0)
    return GPT(context=context, width=32, depth=2, heads=4)


def text(length: int) -> torch.Tensor:
    """Return bytes, always the same; [length], int64."""
    return torch.randint(256, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("place", [1, 7, 15])
def test_a_later_byte_changes_no_earlier_answer(place: int) -> None:
    """Logits before a byte that is changed stay as they were, bit for bit;
    those from it on do not.
    """
    model, bytes_BT = small(), text(16)[None]
    changed_BT = bytes_BT.clone()
    changed_BT[0, place] = (bytes_BT[0, place] + 1) % 256
    before_TV, after_TV = model(bytes_BT)[0], model(changed_BT)[0]
    assert torch.equal(before_TV[:place], after_TV[:place])
    assert (before_TV[place:] != after_TV[place:]).any(1).all()


def test_an_untrained_model_knows_nothing() -> None:
    """Its first loss is near that of a uniform prediction, ln 256,
    so training starts without a jump.
    """
    bytes_BT = text(17 * 8).view(8, 17)
    loss = functional.cross_entropy(
        small()(bytes_BT[:, :-1]).flatten(0, 1), bytes_BT[:, 1:].flatten()
    )
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_a_text_beyond_the_context_is_refused() -> None:
    """The model has places for `context` bytes; a longer text raises."""
    assert small()(text(16)[None]).shape == (1, 16, 256)
    with pytest.raises(
        ConfigError,
        match=r"^task\.model\.context is 16; it must be 17 or more, for a text of 17 bytes\.$",
    ):
        small()(text(17)[None])


def test_heads_that_do_not_divide_are_refused() -> None:
    """The heads share the width evenly."""
    with pytest.raises(
        ConfigError,
        match=r"^task\.model\.heads is 3; it must divide task\.model\.width=32\. Change one\.$",
    ):
        GPT(width=32, heads=3)


@pytest.mark.parametrize("files", [0, 1])
def test_too_little_text_is_refused(files: int, tmp_path: Path) -> None:
    """The error for a folder without enough text names the number of files and bytes found."""
    for i in range(files):
        (tmp_path / f"{i}.txt").write_text("x" * 100)
    data = TextBytes(str(tmp_path), context=16)
    with pytest.raises(
        DataError,
        match=(
            rf"data\.root is {tmp_path}: the {files} files that .* have {100 * files} bytes,"
            r" too few"
        ),
    ):
        data.setup("fit")


@pytest.mark.parametrize("length", [17, 18, 32, 33, 34, 100])
def test_windows_cover_the_text(length: int) -> None:
    """Each byte but the first is predicted in some window,
    none of them more often than the last window needs.
    """
    places = torch.arange(length)
    windows = [window.tolist() for window in Windows(places, 17)]
    assert all(len(window) == 17 for window in windows)
    predicted = [place for window in windows for place in window[1:]]
    assert sorted(set(predicted)) == list(range(1, length))
    assert len(windows) == math.ceil((length - 1) / 16)


def test_validation_text_is_held_out(tmp_path: Path) -> None:
    """The last tenth of the bytes is for validation, and no window of training reaches into it."""
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    (tmp_path / "b.txt").write_bytes(bytes(range(200, 255)))
    data = TextBytes(str(tmp_path), "*.txt", context=4)
    data.setup("fit")
    train, val = (torch.cat(list(windows)) for windows in (data.train, data.val))
    assert train.max() < val.min()
    assert (train.min(), val.max(), len(data.val.text)) == (0, 254, 26)


def test_predictions_follow_each_window(tmp_path: Path) -> None:
    """predict returns the likeliest byte after each window of the validation text."""
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    task = LanguageModel(small(4), partial(torch.optim.AdamW, lr=1e-3))
    data = TextBytes(str(tmp_path), "*.txt", context=4)
    predicted = torch.cat(quiet(tmp_path).predict(task, datamodule=data) or [])
    expected = [task.model(window[None, -4:])[0, -1].argmax().item() for window in data.val]
    assert predicted.tolist() == expected


def test_a_file_is_read_alone(tmp_path: Path) -> None:
    """`data.file` names one text; with a folder too it would be unclear which is meant."""
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    (tmp_path / "b.txt").write_text("other")
    data = TextBytes(file=str(tmp_path / "a.txt"), context=4)
    data.setup("fit")
    assert (data.train.text.tolist(), len(data.val.text)) == ([*range(180)], 20)
    with pytest.raises(
        ConfigError, match=r"data\.file is 'a\.txt', and data\.root or data\.pattern is set too"
    ):
        TextBytes(str(tmp_path), file="a.txt")
    with pytest.raises(
        DataError, match=r"data\.file is .*b\.txt: it has 5 bytes, too few for windows of 4"
    ):
        TextBytes(file=str(tmp_path / "b.txt"), context=4).setup("fit")


def test_a_folder_is_read_for_its_texts(tmp_path: Path) -> None:
    """Without a pattern a folder's text files are read, and not its programs."""
    (tmp_path / "a.txt").write_text("text " * 30)
    (tmp_path / "b.py").write_text("code " * 30)
    data = TextBytes(str(tmp_path), context=4)
    data.setup("fit")
    assert len(data.train.text) + len(data.val.text) == 150


def test_text_is_generated_from_a_seed() -> None:
    """The same seed draws the same text; temperature 0 takes the likeliest byte;
    bytes of a letter come together.
    """
    task = LanguageModel(small(8), partial(torch.optim.AdamW, lr=1e-3)).eval()

    def made(**options: Any) -> str:
        return "".join(task.generate("A long prompt", max_new_tokens=20, **options))

    assert made(seed=1) == made(seed=1) != made(seed=2)
    assert made(temperature=0.0) == made(top_k=1, seed=5)
    last = torch.tensor([list(b"g prompt")])
    task.model.head = torch.nn.Linear(32, 256)
    with torch.no_grad():
        task.model.head.weight.zero_()
        task.model.head.bias.zero_()[0xC3] = 9.0  # the first byte of a letter of two
    assert task(last).shape == (1, 8, 256)
    assert "".join(task.generate("x", max_new_tokens=3, temperature=0.0)).endswith(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_texts_are_continued_together_as_alone() -> None:
    """Also where a text has outgrown the model's context, and the others have not."""
    task = LanguageModel(small(8), partial(torch.optim.AdamW, lr=1e-3)).eval()
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(3)
    source = task.text_source()
    asks = [Ask(text, 6, temperature=0) for text in ("ab", "A long prompt", "xyz1")]
    together = [begin(source, ask) for ask in asks]
    for _ in continue_all(source, together):
        pass
    for one, ask in zip(together, asks, strict=True):
        alone = begin(source, ask)
        for _ in continue_all(source, [alone]):
            pass
        assert one.ids == alone.ids
    assert len({tuple(one.ids[-6:]) for one in together}) == 3


def exported(folder: Path, dropout: float = 0.0) -> LanguageModel:
    """Return a Task with large random weights, so that each of them matters; it is in the folder."""
    model = GPT(context=16, width=32, depth=2, heads=4, dropout=dropout)
    task = LanguageModel(model, partial(torch.optim.AdamW, lr=1e-3)).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in task.parameters():
            nn.init.normal_(parameter, std=0.3)
    trainkit.export(task, folder, format="huggingface")
    return task


def test_an_export_is_opened_by_transformers(tmp_path: Path) -> None:
    """`from_pretrained` of the exported folder gives equal logits, by GPT-2 with this model's GELU;
    with GPT-2's own they are others.
    """
    transformers = pytest.importorskip("transformers")
    ours, bytes_BT = exported(tmp_path / "ours", dropout=0.1).double(), text(48).view(3, 16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").double().eval()
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    with torch.no_grad():
        expected = ours(bytes_BT)
        torch.testing.assert_close(theirs(input_ids=bytes_BT).logits, expected, rtol=0, atol=1e-10)
        for block in theirs.transformer.h:
            block.mlp.act = nn.GELU("tanh")
        assert (theirs(input_ids=bytes_BT).logits - expected).abs().max() > 1e-4
    config = theirs.config
    assert (config.resid_pdrop, config.attn_pdrop, config.embd_pdrop) == (0.1, 0.1, 0.0)


def test_a_fit_from_the_form_says_which_gelu_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init_weights` of a folder of GPT2LMHeadModel starts from its weights, and a line says that
    GPT-2's own would compute something else here.
    """
    first = exported(tmp_path / "ours")
    task = LanguageModel(small(), partial(torch.optim.SGD, lr=0.0))
    (tmp_path / "a.txt").write_bytes(bytes(range(200)) * 2)
    trainer = trainkit.Trainer(
        max_steps=1,
        limit_val_batches=0,
        run_dir=tmp_path / "run",
        enable_checkpointing=False,
        logger=False,
    )
    data = TextBytes(str(tmp_path), context=16)
    trainer.fit(task, datamodule=data, init_weights=str(tmp_path / "ours"))
    assert "GPT-2's own have gelu_new, as conf=gpt_124m" in " ".join(
        capsys.readouterr().out.split()
    )
    for ours, theirs in zip(task.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours, theirs)
