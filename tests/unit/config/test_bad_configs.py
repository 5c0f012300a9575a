"""Mistakes in a config: the exit code, the words,
and that nothing heavy was loaded and nothing written.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.cli.run import main

MISTAKES = {
    "trainer.max_epoch=3": ["trainer.max_epoch is not a setting", "Did you mean 'max_epochs'?"],
    "optimzer.lr=3": ["optimzer is not a setting", "Did you mean 'optimizer'?"],
    "optimizer.learning_rate=3": ["optimizer.learning_rate is not a setting", "lr"],
    "data.batchsize=3": ["data.batchsize is not a setting", "Did you mean 'batch_size'?"],
    "data=digit": ["data is 'digit'", "Did you mean 'digits'?", "imagefolder"],
    "logger=[csv,promethus]": [
        "logger is 'promethus'",
        "Did you mean 'prometheus'?",
        "tensorboard",
    ],
    "trainer.max_epochs=abc": ["trainer.max_epochs is 'abc'", "a whole number, 0 or more"],
    "trainer.max_epochs=-2": ["trainer.max_epochs is -2", "0 or more"],
    "trainer.precision=fp16": ["trainer.precision is 'fp16'", "'16-mixed'", "64 or null.\n"],
    "trainer.precision=bf17": ["trainer.precision is 'bf17'", "Did you mean 'bf16'?"],
    "optimizer.params=1": ["optimizer.params is not a setting", "nesterov, weight_decay"],
    "lr.total=1": ["lr.total is not a setting. Known here: end, hold_steps."],
    "max_epochs=2": ["max_epochs is not a setting of its own. Write trainer.max_epochs=..."],
    "batch_size=2": ["batch_size is not a setting of its own. Write data.batch_size=..."],
    "--max_epochs=2": [
        "'--max_epochs=2' is not a flag",
        "key=value, without dashes: trainer.max_epochs=2",
    ],
    "--max-epochs 2": ["'--max-epochs' is not a flag", "without dashes: trainer.max_epochs=2"],
    "--learning-rate seed=1": ["without dashes: optimizer.lr=..."],
    "--config-name gpt": ["'--config-name' is not a flag", "without dashes: conf=gpt"],
    "--config-dir=conf": ["'--config-dir=conf' is not a flag", "Select one: conf=NAME"],
    "--run": ["'--run' is not a flag"],
    "conf=resnet50": ["conf is given twice, 'mlp' and 'resnet50'", "[mlp, resnet50, _self_]"],
    "-m resnet50 seed=1,2": ["'resnet50' is a config; select it with conf=resnet50"],
    "--package trainer": ["package says how a config is printed", "--cfg job --package trainer"],
    "--resolve": ["resolve says how a config is printed", "Add --cfg job"],
    "-p trainer": ["p says how a config is printed"],
    "vars.width=3": [
        "vars.width is given, and no file of this config gives it a value",
        "+vars.width=...",
    ],
    "hydra.run.dir=x": ["hydra.run.dir=x has no effect: the folder of a run, and of several"],
    "-m hydra.sweep.dir=x": ["hydra.sweep.dir=x has no effect"],
    "-m ++hydra.sweep.dir=x": ["hydra.sweep.dir=x has no effect"],
    "hydra.job.chdir=true": ["hydra.job.chdir=true is for several runs: add -m"],
    "task.label_smoothing=-1": ["task.label_smoothing is -1", "from 0 to 1"],
    "run_dir=": ["run_dir is ''; it must be the path of a folder"],
    "--fast": ["'--fast' is not a flag", "key=value, without dashes, as trainer.max_epochs=3"],
    "lr=0.1,0.2": ["lr is 0.1,0.2, and lr names a config: constant, cosine, polynomial, step, wsd"],
    "lr=0.1": [
        "lr is 0.1, and lr names a config: constant, cosine, polynomial, step, wsd",
        "optimizer.lr=...",
    ],
    "optimizer=3": ["optimizer is 3", "adamw"],
    "logger=true": ["logger is true", "tensorboard"],
    "trainer.channels_last=1": ["trainer.channels_last is 1", "true or false"],
    "data.batch_size=0": ["data.batch_size is 0", "1 or more"],
    "optimizer.lr=abc": ["optimizer.lr is 'abc'", "a number"],
    "seed=abc": ["seed is 'abc'", "a whole number"],
    "seed=9223372036854775808": ["seed is 9223372036854775808", "a whole number of 64 bits"],
    "engine.device=cuda:1": ["engine.device is 'cuda:1'", "'cuda', 'xpu' or 'mps'"],
    "trainer.accelerator=tpu": [
        "trainer.accelerator is 'tpu'",
        "'cpu', 'gpu', 'cuda', 'xpu', 'mps' or null",
    ],
    "trainer.accelerator=gpu engine.device=cpu": [
        "trainer.accelerator is 'gpu', and engine.device is cpu"
    ],
    "trainer.devices=2": ["trainer.devices", "the launcher decides", "horovodrun"],
    "trainer.strategy=ddp": ["trainer.strategy", "the launcher decides", "engine=auto"],
    "trainer.run_dir=x": ["trainer.run_dir", "run_dir is a key at the top"],
    "trainer.max_epochs=null": [
        "None of trainer.max_epochs, trainer.max_steps and trainer.max_time"
    ],
    "data=imagefolder": ["data.root is missing", "data.root=..."],
    "data=imagefolder data.rot=images": ["data.rot is not a setting", "Did you mean 'root'?"],
    "data=imagefolder data.root=/no/such/folder": [
        "data.root is '/no/such/folder'",
        "no such folder",
    ],
    f"run_dir={'a' * 300}": ["run_dir is 'aaa", "cannot be written: File name too long"],
    "run_dir=/dev/null/x": ["run_dir is '/dev/null/x'", "cannot be written|no writable folder"],
    "task._target_=os.system": ["task._target_ is 'os.system'", "configs may not call"],
    "task._target_=builtins.eval": ["task._target_ is 'builtins.eval'", "configs may not call"],
    "task._target_=trainkit.cli.run.main": ["configs may not call"],
    "task._target_=recipes.nothing.Task": ["there is no module 'nothing'"],
    "optimizer._target_=torch.optim.SDG": ["torch.optim has no 'SDG'", "Did you mean 'SGD'?"],
    "optimizer.lr=0.1,0.2": ["optimizer.lr=0.1,0.2 has several values", "-m"],
    "callbacks=none,early_stopping": [
        "callbacks=none,early_stopping has several values",
        "key=[a,b]",
    ],
    "resume=auto": ["resume is 'auto', but each start has a new folder", "run_dir=runs/mlp/mine"],
    "resume=yes run_dir=r": ["resume is 'yes'; it must be 'auto' or null"],
    "resume=auto ckpt_path=last run_dir=r": [
        "resume is 'auto' and ckpt_path is 'last': two checkpoints of this run",
        "Leave one out",
    ],
    "resume=auto ckpt_path=r/checkpoints/one run_dir=r": [
        "ckpt_path is 'r/checkpoints/one': two checkpoints of this run",
        "another run's checkpoint",
    ],
    "ckpt_path=last init_weights=w.pt run_dir=r": [
        "ckpt_path is 'last' and init_weights is 'w.pt'",
        "Leave one out",
    ],
    "strict=false": ["strict is false", "init_weights=..."],
    "init_weights=none.pt": ["init_weights is 'none.pt'", "no such file or folder"],
    "callbacks=checkpoint callbacks.checkpoint.train_time_interval=soon": [
        "callbacks.checkpoint.train_time_interval is 'soon'",
        "'HH:MM:SS'",
    ],
    "callbacks=checkpoint callbacks.checkpoint.every_n_train_steps=0": [
        "every_n_train_steps is 0",
        "1 or more",
    ],
    "engine=null": [
        "engine is null",
        "auto, ddp",
        "~engine leaves it out, if nothing in the config refers to it as ${engine}",
    ],
    "augment=[1,2]": ["augment is [1,2]", "randaugment"],
    "augment={}": ["augment is {}", "randaugment"],
    "+augment=-1": ["augment is -1", "randaugment"],
    "~callbacks=[{}]": ["~callbacks=[{}] takes back a choice", "~callbacks=NAME"],
    "hydra=1_000": ["hydra is 1_000, and hydra names a config"],
    "+=1": ["'+=1' is not a setting"],
    "a/b={": ["'a/b={' is no override that Hydra can read"],
    "~optimizer": ["optimizer"],
    "trainer.num_train_epochs=3": ["trainer.num_train_epochs: In its place: trainer.max_epochs"],
    "save_total_limit=2": ["save_total_limit: In its place: callbacks=checkpoint"],
    "nonsense": ["'nonsense' is not a setting", "key=value"],
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_named_and_ends_with_code_2(
    overrides: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each mistake ends with exit code 2, names key, value and remedy on one screen,
    and leaves no file behind.
    """
    monkeypatch.chdir(tmp_path)
    code = main("fit", ["conf=mlp", *overrides.split()])
    text = capsys.readouterr().err
    assert code == 2, text
    for words in MISTAKES[overrides]:
        assert any(word in text for word in words.split("|")), text
    assert len(text) < 1500
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "conf is missing"),
        (["resnet50"], "conf=resnet50"),
        (["conf=mpl"], "Did you mean 'mlp'?"),
        (["conf=resnet5"], "Did you mean 'resnet50'?"),
    ],
)
def test_the_config_itself_is_asked_for(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or misspelt conf= names the configs that there are."""
    assert main("fit", arguments) == 2
    text = capsys.readouterr().err
    assert words in text
    assert "resnet50" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=0.1", ["optimizer has no _target_", "its task makes it"]),
        ("optimizer=adamw", ["This config chooses no optimizer", "+optimizer=NAME"]),
    ],
)
def test_what_a_config_does_not_choose_is_not_set(
    override: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a config's task makes its own optimizer, there is none to set or to replace."""
    (tmp_path / "conf").mkdir()
    text = (
        "defaults: [_base, _self_]\ntask: {_target_:"
        " recipes.image_classifier.ImageClassifier}\ntrainer: {max_epochs: 1}\n"
    )
    (tmp_path / "conf/own.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main("fit", ["conf=own", override]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_config_error_needs_no_torch(tmp_path: Path) -> None:
    """A wrong key is found before torch is imported."""
    code = (
        "import sys\nfrom trainkit.cli.run import main\ncode = main('fit', ['conf=resnet50',"
        " 'trainer.max_epoch=3'])\nprint(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stdout.split() == ["2", "False"]


def test_only_rank_0_speaks(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under a launcher rank 0 prints a config's mistake;
    another rank that has the same one is ended before it does.
    """
    code = (
        "import sys; from trainkit.cli.run import main; sys.exit(main('fit', ['conf=mlp',"
        " 'trainer.max_epoch=3']))"
    )
    env = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2",
        "PATH": "/usr/bin:/bin",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=env | {"HOROVOD_RANK": str(rank)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    _, said = ranks[1].communicate(timeout=30)
    ranks[0].terminate()  # as a launcher does when a rank has failed
    _, other = ranks[0].communicate(timeout=30)
    assert ranks[1].returncode == 2
    assert "max_epochs" in said
    assert other == ""
