"""metrics.csv: a row for each log step, a column for each name."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CSVLogger


class Fixed(Line):
    """Logs predictable numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the step; late in training another name too."""
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("train/step", float(self.global_step))
        if self.global_step >= 3:
            self.log('late, and "odd"', 1.5)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the epoch."""
        self.log("val/epoch", float(self.current_epoch))


def train(folder: Path, ckpt_path: str | None = None, **settings: Any) -> list[dict[str, str]]:
    """Train epochs of two steps and return the rows of the table."""
    known: dict[str, Any] = {
        "logger": CSVLogger(),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    quiet(folder, **(known | settings)).fit(Fixed(), loader(8), loader(4), ckpt_path=ckpt_path)
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_holds_what_was_logged(tmp_path: Path) -> None:
    """Each report is a row with its epoch and step; a later name adds a column."""
    rows = train(tmp_path, max_epochs=2)
    assert list(rows[0]) == ["epoch", "step", "train/step", "lr", "val/epoch", 'late, and "odd"']
    assert [tuple(row.values()) for row in rows] == [
        ("0", "1", "0.0", "0.1", "", ""),
        ("0", "2", "1.0", "0.1", "", ""),
        ("0", "2", "", "", "0.0", ""),
        ("1", "3", "2.0", "0.1", "", ""),
        ("1", "4", "3.0", "0.1", "", "1.5"),
        ("1", "4", "", "", "1.0", ""),
    ]


def test_settings_may_come_with_first_values(tmp_path: Path) -> None:
    """log_hyperparams(params, metrics), as Lightning's examples have it."""

    class Named(Fixed):
        def on_train_start(self) -> None:
            assert self.logger is not None
            self.logger.log_hyperparams({"width": 3}, {"hp/metric": 0.5})

    quiet(tmp_path, logger=CSVLogger()).fit(Named(), loader(8))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["step"], first["hp/metric"]) == ("0", "0.5")
    assert "width: 3" in (tmp_path / "hparams.yaml").read_text()


def test_rows_are_on_disk_during_the_run(tmp_path: Path) -> None:
    """A killed run leaves its logged rows, under a complete header;
    rows are not held until the run's end.
    """
    logger = CSVLogger()

    class Killed(Fixed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                assert logger.settle()
                lines = (self.trainer.run_dir / "metrics.csv").read_text().splitlines()
                assert len(lines) == 5
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quiet(tmp_path, max_epochs=2, logger=logger, log_every_n_steps=1).fit(
            Killed(), loader(8), loader(4)
        )
    files = [path.name for path in tmp_path.iterdir() if "progress" not in path.name]
    assert sorted(files) == [".lock", "metrics.csv"]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    """Going on from the last checkpoint gives the table of the run that never stopped."""
    train(tmp_path / "parts", max_epochs=2, enable_checkpointing=True)
    parts = train(tmp_path / "parts", max_epochs=3, ckpt_path="last")
    assert parts == train(tmp_path / "whole", max_epochs=3)


def test_what_is_trained_again_is_written_again(tmp_path: Path) -> None:
    """Resuming from an older checkpoint drops the rows after it."""
    keep_all = ModelCheckpoint(save_top_k=-1)
    train(tmp_path, max_epochs=3, callbacks=keep_all)
    rows = train(tmp_path, max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / "epoch=0-step=2"))
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]


def test_a_new_run_in_an_old_folder_begins_again(tmp_path: Path) -> None:
    """A run from the start does not mix its rows with those of an earlier run."""
    train(tmp_path, max_epochs=2)
    assert [row["step"] for row in train(tmp_path, max_epochs=1)] == ["1", "2", "2"]


@pytest.mark.parametrize("rest", ["7,", "abc", "1,2,3,4,5,6,7,8,9", "\x00\x00"])
def test_a_torn_last_line_is_left_out(tmp_path: Path, rest: str) -> None:
    """A line torn by a crash does not keep a run from resuming."""
    train(tmp_path, max_epochs=1, enable_checkpointing=True)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(rest)
    rows = train(tmp_path, max_epochs=2, ckpt_path="last")
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]


def test_a_failed_write_is_reported_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file cannot be made: the run ends well, without it."""
    (tmp_path / ".metrics.csv.draft").mkdir()
    quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=1, max_epochs=2).fit(
        Fixed(), loader(8), loader(4)
    )
    printed = capsys.readouterr().out
    assert printed.count("CSVLogger failed while opening: IsADirectoryError") == 1
    assert not (tmp_path / "metrics.csv").exists()


def test_a_disk_that_is_full_from_some_step_on_costs_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows before it stay."""
    logger = CSVLogger()

    class Fills(Fixed):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                assert logger.settle()
                full = Path("/dev/full").open("a")  # noqa: SIM115 - the logger closes it
                logger._file.close()  # type: ignore[union-attr]
                logger._file, logger._writer = full, csv.DictWriter(full, logger._columns)

    quiet(tmp_path, logger=logger, log_every_n_steps=1, max_epochs=3).fit(
        Fills(), loader(8), loader(4)
    )
    printed = capsys.readouterr().out
    assert printed.count("CSVLogger failed while writing step ") == 1
    assert "OSError: [Errno 28] No space left on device" in printed
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "2"]


def test_an_older_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    """An earlier trainkit's state of the table ("rows") is no error:
    rows up to the checkpoint's step stay.
    """

    class Older(CSVLogger):
        def state_dict(self) -> dict[str, Any]:
            return {"rows": 3}

    Older.__name__ = "CSVLogger"
    train(tmp_path, max_epochs=1, enable_checkpointing=True, logger=Older())
    rows = train(tmp_path, max_epochs=2, ckpt_path="last")
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]


def test_rows_of_the_step_of_a_checkpoint_that_came_after_it_are_left_out(tmp_path: Path) -> None:
    """A checkpoint within an epoch precedes that step's validation, whose row is written again."""
    keep_all = ModelCheckpoint(save_top_k=-1, every_n_train_steps=1, every_n_epochs=None)
    whole = train(tmp_path, max_epochs=2, callbacks=keep_all)
    rows = train(tmp_path, max_epochs=2, ckpt_path=str(tmp_path / "checkpoints" / "epoch=0-step=2"))
    assert rows == whole
    assert [row["step"] for row in rows] == ["1", "2", "2", "3", "4", "4"]


def test_a_second_fit_counts_from_zero(tmp_path: Path) -> None:
    """A checkpoint's state of the table belongs to this fit,
    also if the logger has served another.
    """
    logger = CSVLogger()
    for folder, epochs, step in (("a", 2, 4), ("b", 1, 2)):
        train(tmp_path / folder, max_epochs=epochs, logger=logger)
        assert logger.state_dict() == {"step": step, "rows_of_step": 2}


def test_its_folder_is_known_in_the_hooks_of_a_test(tmp_path: Path) -> None:
    """Of a run that another process has trained, whose files stay as they are."""
    train(tmp_path, max_epochs=1)
    seen = []

    class Asks(Fixed):
        def on_test_start(self) -> None:
            seen.append((self.logger.log_dir, self.logger.version))  # type: ignore[union-attr]

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test/epoch", 1.0)

    quiet(tmp_path, logger=CSVLogger()).test(Asks(), loader(4))
    assert seen == [(str(tmp_path), tmp_path.name)]
