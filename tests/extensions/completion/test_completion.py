"""Tab completion: what bash offers, by its own completion function, at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.cli.commands import all_commands, find_usage
from trainkit.cli.usage import USAGES
from trainkit.extensions.completion.command import answers, main

SHELL = """
eval "$({python} -m trainkit completion bash)" || exit 1
COMP_LINE="$1" COMP_POINT=${{#1}}
COMPREPLY=()
_trainkit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(line: str, folder: Path) -> list[str]:
    """Return what bash offers at the end of a line."""
    command = ["bash", "-c", SHELL.format(python=sys.executable), "bash", line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainkit sc", ["scaling"]),
        ("python -m trainkit fit conf=res", ["resnet18", "resnet50", "resnet50_a3"]),
        (
            "horovodrun -np 2 python -m trainkit fit conf=mlp optimizer=ad",
            ["adafactor", "adamw", "ademamix"],
        ),
        ("trainkit test run_dir=runs/m", ["runs/mine"]),
        ("python train.py conf=res", []),
    ],
)
def test_bash_offers(line: str, expected: list[str], tmp_path: Path) -> None:
    """Whether trainkit is started by its script, by Python, or by a launcher;
    other programs keep their files.
    """
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    assert offered(line, tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainkit fit conf", ["conf="]),
        ("trainkit fit optimizer.weight", ["optimizer.weight_decay="]),
        ("trainkit fit trainer.max_t", ["trainer.max_time="]),
        ("trainkit fit trainer.precision=bf16", ["bf16-mixed", "bf16-true"]),
        ("trainkit fit trainer.sync_batchnorm=", ["false", "true"]),
        ("trainkit fit callbacks=[ema,tim", ["[ema,timeline", "[ema,timer"]),
        ("trainkit predict table=p", ["parquet"]),
        ("trainkit data ", ["check", "pack", "tokens"]),
        ("trainkit data check stage=", ["fit", "predict", "test"]),
        ("trainkit horovod ", ["check", "install", "wheel"]),
        ("trainkit show ru", ["runs/"]),
        ("trainkit doctor --no", ["--no-allreduce"]),
        ("trainkit nonsense ", []),
        ("trainkit fit nonsense=", []),
        ("trainkit fit 'conf=ml", ["mlp"]),
    ],
)
def test_a_line_has_answers(line: str, expected: list[str], tmp_path: Path) -> None:
    """Options, groups, settings and their values, by the part that bash replaces:
    after the last "=".
    """
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert answers(line, tmp_path) == expected


def test_configs_of_ones_own_are_offered(tmp_path: Path) -> None:
    """Those of conf/ in the current folder, beside the shipped ones."""
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "mlpmine.yaml").touch()
    (tmp_path / "conf" / "optimizer" / "lion.yaml").write_text("beta: 1\n")
    assert answers("trainkit fit conf=mlp", tmp_path) == ["mlp", "mlpmine"]
    assert answers("trainkit fit optimizer=l", tmp_path) == ["lamb", "lars", "lion"]
    assert answers("trainkit fit optimizer.bet", tmp_path)[0] == "optimizer.beta="


def test_an_answer_needs_nothing_heavy(tmp_path: Path) -> None:
    """Neither torch nor Hydra nor rich: the shell waits for a tenth of a second."""
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "trainkit",
        "completion",
        "--line",
        "trainkit fit trainer.max_e",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout == "trainer.max_epochs=\n"
    assert "trainkit.cli.usage" in loaded and not loaded & {
        "torch",
        "hydra",
        "omegaconf",
        "yaml",
        "rich",
        "numpy",
        "plotly",
    }


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With what there is."""
    assert main("completion", ["fish"]) == 2
    assert "the shell is fish; it must be bash" in capsys.readouterr().err


def test_each_command_has_a_usage() -> None:
    """A new command has help and completion, or is argparse's own."""
    own = {name for name in all_commands() if find_usage(name) is None}
    assert own == {"horovod", "deepspeed", "launch"} and set(USAGES) <= set(all_commands())
