"""The commands that a user types, each under its real launcher."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

import trainkit
from tests.helpers.launching import Command

LAUNCHERS = {
    "plain": "python -m trainkit",
    "horovodrun": "horovodrun -np 2 python -m trainkit",
    "torchrun": "torchrun --nproc-per-node 2 -m trainkit",
}


def read_rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics.csv."""
    return list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))


ENGINES = {"plain": "single, 1 rank", "horovodrun": "horovod, 2 ranks", "torchrun": "ddp, 2 ranks"}


@pytest.mark.parallel
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_fit_leaves_one_run_folder_with_everything(
    launcher: str, command: Command, tmp_path: Path
) -> None:
    """Under each launcher a fit trains to above 90 %, prints its lines once,
    and writes its files into one folder.
    """
    done = command(f"{LAUNCHERS[launcher]} fit conf=mlp trainer.lr_scaling=none")
    assert done.code == 0, done.text
    assert done.text.count(ENGINES[launcher]) == 1
    assert done.text.count("epoch 5/5") == 1
    (run,) = (tmp_path / "runs" / "mlp").iterdir()
    files = {
        ".hydra",
        ".lock",
        "config.yaml",
        "metrics.csv",
        "checkpoints",
        "tensorboard",
        "state.json",
        "progress.json",
    }
    assert {p.name for p in run.iterdir()} == files
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 5
    rows = read_rows(run)
    assert max(float(row["val/acc"]) for row in rows if row["val/acc"]) > 0.9
    assert (run / "checkpoints" / "best").resolve().parent == run / "checkpoints"


@pytest.mark.parallel
def test_a_checkpoint_is_validated_tested_and_predicted_with(
    command: Command, tmp_path: Path
) -> None:
    """validate and test print the values of the run's end at any number of ranks;
    predict writes every sample once.
    """
    assert (
        command(
            "python -m trainkit fit conf=mlp run_dir=here trainer.max_epochs=1 task.model.width=48"
        ).code
        == 0
    )
    rows = read_rows(tmp_path / "here")
    accuracy = next(f"{float(row['val/acc']):.6g}" for row in rows if row["val/acc"])
    validated = command("horovodrun -np 2 python -m trainkit validate ckpt_path=last run_dir=here")
    assert validated.code == 0, validated.text
    assert f" {accuracy} " in validated.out
    tested = command("python -m trainkit test conf=mlp run_dir=here data.batch_size=16")
    assert "test/acc" in tested.out
    assert "data.batch_size: 32 -> 16" in tested.out
    assert "->" not in validated.out
    assert f" {accuracy} " in tested.out
    predicted = command(
        "torchrun --nproc-per-node 2 -m trainkit predict ckpt_path=here/checkpoints/last"
    )
    assert "12 batches of predictions are in here/predictions" in predicted.out, predicted.text
    assert (
        sum(len(batch) for batch in trainkit.read_predictions(tmp_path / "here" / "predictions"))
        == 360
    )


def test_a_run_resumes_from_its_last_checkpoint(command: Command, tmp_path: Path) -> None:
    """fit with ckpt_path=last resumes at the next epoch and appends to the same metrics.csv."""
    assert command("python -m trainkit fit conf=mlp run_dir=here trainer.max_epochs=1").code == 0
    done = command(
        "python -m trainkit fit conf=mlp run_dir=here trainer.max_epochs=2 ckpt_path=last"
    )
    assert "resumed" in done.out
    assert "epoch 1/2" not in done.out
    assert "epoch 2/2" in done.out, done.text
    epochs = [int(row["epoch"]) for row in read_rows(tmp_path / "here")]
    assert epochs == sorted(epochs)
    assert set(epochs) == {0, 1}


def test_a_missing_checkpoint_names_the_newest_run(command: Command) -> None:
    """ckpt_path=last in a new folder names the newest run that has a checkpoint."""
    assert command("python -m trainkit fit conf=mlp trainer.fast_dev_run=true").code == 0
    assert (
        command("python -m trainkit fit conf=mlp trainer.max_epochs=1 run_dir=runs/mlp/first").code
        == 0
    )
    done = command("python -m trainkit validate conf=mlp ckpt_path=last")
    assert done.code == 2
    assert "runs/mlp/first" in done.err, done.err


@pytest.mark.parallel
def test_multirun_runs_once_for_each_value(command: Command, tmp_path: Path) -> None:
    """-m trains a run for each value, also under a launcher, each in its own folder."""
    done = command(
        "horovodrun -np 2 python -m trainkit fit -m conf=mlp optimizer.lr=0.02,0.05"
        " trainer.max_epochs=1"
    )
    assert done.code == 0, done.text
    (sweep,) = (tmp_path / "runs" / "mlp").iterdir()
    rates = [
        yaml.safe_load((sweep / str(i) / "config.yaml").read_text())["optimizer"]["lr"]
        for i in (0, 1)
    ]
    assert rates == [0.02, 0.05]
    assert {p.name for p in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parallel
def test_cfg_prints_the_config_once(command: Command, tmp_path: Path) -> None:
    """--cfg job prints from rank 0 only, and nothing is written."""
    done = command("horovodrun -np 2 python -m trainkit fit conf=resnet50 --cfg job")
    assert done.code == 0
    assert done.out.count("image_classifier.ImageClassifier") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_lists_commands_configs_and_groups(command: Command) -> None:
    """--help lists commands, configs and groups."""
    assert "horovod" in command("python -m trainkit --help").out
    text = command("python -m trainkit fit --help").out
    assert (
        "bert, dpo, gpt, gpt_124m, hf_causal_lm, hf_classifier, llama, mlp, recommender, resnet18"
        in text
    )
    assert (
        "digits, imagefolder, labelled_texts, masked_tokens, pairs, ratings, ray, synthetic, text,"
        " texts, token_mixture, tokens" in text
    )


def test_weights_and_biases_works_offline(command: Command, tmp_path: Path) -> None:
    """logger=[csv,wandb] with WANDB_MODE=offline leaves a W&B run in the run's folder."""
    done = command(
        "python -m trainkit fit conf=mlp 'logger=[csv,wandb]' trainer.max_epochs=1 run_dir=here"
    )
    assert done.code == 0, done.text
    assert list((tmp_path / "here" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    "overrides",
    ["conf=resnet18 data=synthetic data.image_size=32 data.num_samples=8 data.batch_size=4"],
)
def test_a_recipe_runs_on_noise(overrides: str, command: Command) -> None:
    """data=synthetic feeds any image recipe."""
    done = command(f"python -m trainkit fit {overrides} trainer.max_steps=2")
    assert done.code == 0, done.text
    assert "2 steps in all" in done.out


def test_only_files_that_are_there_are_named_at_the_end(command: Command, tmp_path: Path) -> None:
    """The end of a fit names the file of each logger in use, and no other."""
    quick = "trainer.max_steps=2 trainer.limit_val_batches=0"
    chosen = command(f"python -m trainkit fit conf=mlp logger=jsonl run_dir=a {quick}")
    assert (
        "a/metrics.jsonl" in chosen.out
        and "metrics.csv" not in chosen.out
        and "tensorboard" not in chosen.out
    )
    usual = command(f"python -m trainkit fit conf=mlp run_dir=b {quick}")
    assert "b/metrics.csv" in usual.out and "tensorboard --logdir b" in usual.out
