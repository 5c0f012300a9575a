"""`on_bad_sample=skip`: a sample that cannot be loaded is left out, reported,
and the step's weights stay exact.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SequentialSampler,
    Subset,
)

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.data import sample_names
from trainkit.data.sample_names import class_names_of, file_of
from trainkit.errors import ConfigError, DataError, summary
from trainkit.safety.tracebacks import text_of


class Broken(Dataset[Any]):
    """Rows of which some raise; each has a file's name."""

    def __init__(self, num_samples: int, *bad: int) -> None:
        self.rows, self.bad = rows(num_samples), bad
        self.files = [f"part/{index}.jpg" for index in range(num_samples)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"image file is truncated ({index})")
        return self.rows[index]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_with_the_remedy(
    num_workers: int, tmp_path: Path
) -> None:
    """Index, file and error, in one sentence from a loader's worker too, and what to do."""
    data = DataLoader(Broken(8, 5), batch_size=4, num_workers=num_workers)
    with pytest.raises(DataError) as raised:
        fit(tmp_path, data)
    text = str(raised.value)
    assert text.startswith("Sample 5 (part/5.jpg) cannot be loaded: OSError: image file is trunc")
    assert "data check" in text and "on_bad_sample=skip" in text
    assert len(text.splitlines()) == 1


class Faulty(Broken):
    """Rows of which some raise an error of the user's code."""

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise KeyError("area")
        return self.rows[index]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_part", [False, True])
def test_an_error_of_the_users_code_names_its_sample(
    is_part: bool, num_workers: int, tmp_path: Path
) -> None:
    """Class, index, file and epoch come after the error, once; its type stays, and its line."""
    whole = Faulty(12, 5)
    data = Subset(whole, range(4, 12)) if is_part else whole
    with pytest.raises(KeyError) as raised:
        fit(tmp_path, DataLoader(data, batch_size=4, num_workers=num_workers))
    text = text_of(raised.value)
    assert text.count("Sample 5 of Faulty (part/5.jpg) raised this") == 1
    assert "of epoch 0" in text and "data check" in text
    assert text.count('raise KeyError("area")') == 1 == text.count("KeyError: 'area'\n")
    assert summary(raised.value).startswith("KeyError: 'area'")


def test_batches_read_at_once_name_the_sample_too(tmp_path: Path) -> None:
    """Of a data set that reads a batch at once the samples are read one by one after an error."""

    class AtOnce(Faulty):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    with pytest.raises(KeyError) as raised:
        fit(tmp_path, DataLoader(AtOnce(8, 6), batch_size=4))
    assert "Sample 6 of AtOnce" in text_of(raised.value)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no number: 'x'"), "ValueError: no number: 'x'\nSample 2 of Faulty"),
        (KeyError("area"), "KeyError: 'area'\nSample 2 of Faulty"),
        (IndexError(), "IndexError: \nSample 2 of Faulty"),
    ],
)
def test_python_310_shows_the_sample_in_the_message(
    error: Exception, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without notes the sample is a line of the message, after the user's own."""
    monkeypatch.setattr(sample_names, "sys", SimpleNamespace(version_info=(3, 10)))
    sample_names.note_sample(error, Faulty(4), 2, epoch=0)
    assert text_of(error).startswith(shown)


class Counting(Line):
    """Logs the mean of the inputs over an epoch, which shows whether each sample counted once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/x", batch[0].double().mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class ByTokens(Line):
    """Weighs its batches itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "num_samples": len(batch[0])}


def fit(
    folder: Path, data: Any, ranks: int = 1, task: type[Line] = Counting, **settings: Any
) -> Any:
    """Fit an epoch on threads; return rank 0's weights, logged values and samples seen."""

    def one(engine: Any) -> Any:
        model, trainer = task(), quiet(folder, engine=engine, seed=3, **settings)
        trainer.fit(model, data)
        return weights(model), dict(trainer.callback_metrics), trainer.state.samples_seen

    results = World(ranks).run(one)
    assert all(torch.equal(result[0], results[0][0]) for result in results)
    return results[0]


@pytest.mark.parametrize("task", [Counting, ByTokens])
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_a_step_weighs_the_samples_that_it_has(
    ranks: int, accumulate: int, task: type[Line], tmp_path: Path
) -> None:
    """One step of all samples, some bad:
    the weights, the epoch's mean and the counter are those of the good ones alone.
    """
    # of a rank's microbatch nothing is left
    good = Subset(rows(16), [i for i in range(16) if i not in (1, 4, 5, 6, 7)])
    size = 16 // ranks // accumulate
    settings = {"accumulate_grad_batches": accumulate, "lr_scaling": "none"}
    trained = fit(
        tmp_path / "a",
        loader(Broken(16, 1, 4, 5, 6, 7), size),
        ranks,
        task,
        on_bad_sample="skip",
        **settings,
    )
    known = fit(tmp_path / "b", loader(good, 11), task=task, lr_scaling="none")
    torch.testing.assert_close(trained[0], known[0])
    assert trained[1] == pytest.approx(known[1])
    assert trained[2] == known[2] == 11


def test_loader_workers_skip_too(tmp_path: Path) -> None:
    """With worker processes the result is the same."""
    plain = fit(tmp_path / "a", loader(Broken(13, 2, 9)), on_bad_sample="skip")
    workers = fit(tmp_path / "b", loader(Broken(13, 2, 9), num_workers=2), on_bad_sample="skip")
    assert torch.equal(plain[0], workers[0]) and plain[2] == workers[2] == 11


def test_a_batch_sampler_of_the_users_own_skips_too(tmp_path: Path) -> None:
    """Batches of unknown sizes are split without their bad samples;
    one without a good sample leaves its step empty.
    """

    class Batches(BatchSampler):
        pass

    data = Broken(12, 1, 4, 5, 6, 7)
    trained = fit(
        tmp_path,
        DataLoader(data, batch_sampler=Batches(SequentialSampler(data), 4, False)),
        on_bad_sample="skip",
    )
    assert trained[2] == 7


def test_each_bad_sample_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints index, file, error and the count, over all ranks and epochs."""
    fit(tmp_path, loader(Broken(12, 3, 8), 3), 2, on_bad_sample="skip", max_epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Skipped")]
    assert [line.split(":")[0] for line in lines] == [
        f"Skipped bad sample {n} of at most 100 (train_dataloaders)" for n in (1, 2)
    ]
    assert "index 3, part/3.jpg: OSError: image file is truncated (3)" in lines[0]


def test_more_than_the_limit_ends_all_ranks(tmp_path: Path) -> None:
    """The error names the limit, the last sample and what to do."""
    with pytest.raises(
        DataError,
        match=r"on_bad_sample_limit is 1, and 2 samples .*index 8, part/8.jpg.*data check",
    ):
        fit(tmp_path, loader(Broken(12, 3, 8), 3), 2, on_bad_sample="skip", on_bad_sample_limit=1)


def test_without_the_setting_a_bad_sample_raises(tmp_path: Path) -> None:
    """The default; the data set's own error is the cause."""
    with pytest.raises(DataError, match="truncated") as raised:
        fit(tmp_path, loader(Broken(12, 3)))
    assert isinstance(raised.value.__cause__, OSError)


def test_validation_counts_the_samples_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value of the validation is the mean over the good samples of all ranks."""

    def evaluate(data: Any, ranks: int, **settings: Any) -> dict[str, float]:
        return World(ranks).run(
            lambda engine: quiet(tmp_path, engine=engine, **settings).validate(Line(), data)
        )[0]

    found = evaluate(loader(Broken(11, 0, 1, 2, 3, 9)), 2, on_bad_sample="skip")
    assert found == pytest.approx(evaluate(loader(Subset(rows(11), [4, 5, 6, 7, 8, 10])), 1))
    assert capsys.readouterr().out.count("Skipped") == 5


def test_a_stream_is_refused(tmp_path: Path) -> None:
    """After an error a generator cannot be read on: the message says where to catch it."""
    with pytest.raises(ConfigError, match="is a stream .*Catch the error"):
        quiet(tmp_path, on_bad_sample="skip").fit(Line(), (batch for batch in loader(8)))


def test_a_limit_without_skipping_is_refused(tmp_path: Path) -> None:
    """A setting without effect is an error."""
    with pytest.raises(ConfigError, match="on_bad_sample_limit is 5, but on_bad_sample is 'raise'"):
        quiet(tmp_path, on_bad_sample_limit=5)


def test_a_step_without_a_good_sample_changes_nothing_but_the_count(tmp_path: Path) -> None:
    """Plain SGD keeps its weights, and the next step is the next one of the epoch."""
    trained = fit(tmp_path, loader(Broken(8, 0, 1, 2, 3)), on_bad_sample="skip")
    known = fit(tmp_path / "b", loader(Subset(rows(8), [4, 5, 6, 7])))
    torch.testing.assert_close(trained[0], known[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_without_a_good_sample_is_an_error(ranks: int, tmp_path: Path) -> None:
    """A fault of the data set's own is not trained on in silence,
    if it has fewer samples than the limit.
    """
    with pytest.raises(
        DataError,
        match="none of its samples could be loaded; the last: index 7, part/7.jpg: OSError",
    ):
        fit(tmp_path, loader(Broken(8, *range(8))), ranks, on_bad_sample="skip")


def test_a_file_is_found_through_parts_of_data_sets() -> None:
    """Subset and ConcatDataset lead to the file of the data set below them."""
    whole = ConcatDataset([Broken(3), Subset(Broken(5), [4, 2])])
    assert [file_of(whole, index) for index in (2, 3, 4)] == [
        "part/2.jpg",
        "part/4.jpg",
        "part/2.jpg",
    ]
    assert file_of(rows(2), 0) == ""
    assert class_names_of(whole) is None
