"""`optimizer=adamw:` in a config holds for that choice alone, at its place among the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import ComposedJob

OWN = """
defaults: [_base, {task: mlp}, {data: digits}, {optimizer: adamw}, {lr: step}, _self_]
trainer: {max_epochs: 1}
optimizer=adamw: {lr: 0.004, weight_decay: 0.1}
optimizer=lars: {lr: 3.0}
trainer if optimizer=adamw: {lr_scaling: sqrt}
lr=step: {gamma: "${vars.gamma}"}
vars: {gamma: 0.3}
data: {image_size: 8}
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the conf/ of a current folder, with own.yaml."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def configs(*arguments: str, command: str = "fit") -> list[dict[str, Any]]:
    """Return the configs of the jobs of a command."""
    jobs: list[ComposedJob] = []
    assert main(command, arguments, jobs.append) == 0
    return [job.config for job in jobs]


def rates(*arguments: str) -> list[float]:
    """Return the optimizer's rate in each job of a command."""
    return [config["optimizer"]["lr"] for config in configs(*arguments)]


def test_a_section_holds_for_its_choice(conf: Path) -> None:
    """Named by the config or typed, and with interpolations; others have their group's numbers."""
    (config,) = configs("conf=own")
    assert (config["optimizer"]["lr"], config["optimizer"]["weight_decay"]) == (0.004, 0.1)
    assert config["lr"]["gamma"] == 0.3
    assert not any("=" in key for key in config)
    assert rates("conf=own", "optimizer=adamw") == [0.004]
    assert rates("conf=own", "optimizer=lars") == [3.0]
    assert rates("conf=own", "optimizer=sgd") == [0.1]
    assert rates("conf=own", "optimizer=[lars]") == rates("conf=own", "optimizer=['lars']") == [3.0]
    names = {"_target_", "_partial_", "end", "hold_steps"}
    assert configs("conf=own", "lr=cosine")[0]["lr"].keys() == names


def test_a_choice_that_is_taken_back_has_no_section(conf: Path) -> None:
    """`~lr` leaves the schedule out, with the numbers that the config has for it."""
    for word in ("~lr", "~lr=step"):
        (config,) = configs("conf=own", word, "task.lr=null")
        assert config.get("lr") is None


def test_another_key_may_follow_a_choice(conf: Path) -> None:
    """The rule by which AdamW's rate follows the batch is not SGD's."""
    scaling = [
        configs("conf=own", *typed)[0]["trainer"]["lr_scaling"] for typed in ([], ["optimizer=sgd"])
    ]
    assert scaling == ["sqrt", "linear"]
    assert configs("conf=own", "trainer.lr_scaling=none")[0]["trainer"]["lr_scaling"] == "none"


def test_what_is_typed_wins(conf: Path) -> None:
    """A rate of the command line is the rate, for any choice."""
    assert rates("conf=own", "optimizer.lr=0.3") == [0.3]
    assert rates("conf=own", "optimizer=lars", "optimizer.lr=0.3") == [0.3]


def test_a_config_that_begins_with_another_comes_after_it(conf: Path) -> None:
    """Its sections and its plain keys win over the first one's sections; its choice counts."""
    (conf / "second.yaml").write_text("defaults: [own, _self_]\noptimizer=adamw: {lr: 0.5}\n")
    (conf / "plain.yaml").write_text("defaults: [own, _self_]\noptimizer: {lr: 0.7}\n")
    (conf / "other.yaml").write_text("defaults: [own, _self_, {override /optimizer: lars}]\n")
    assert rates("conf=second") == [0.5]
    assert rates("conf=second", "optimizer=lars") == [3.0]
    assert rates("conf=plain") == rates("conf=plain", "optimizer=lars") == [0.7]
    assert rates("conf=other") == [3.0]


def test_an_experiment_may_have_sections(conf: Path) -> None:
    """Also for a choice that it makes itself."""
    (conf / "experiment").mkdir()
    head = "# @package _global_\ndefaults: [{override /optimizer: sgd}]\n"
    (conf / "experiment" / "one.yaml").write_text(f"{head}optimizer=sgd: {{lr: 0.6}}\n")
    assert rates("conf=own", "experiment=one") == [0.6]
    assert rates("conf=own", "experiment=one", "optimizer=lars") == [3.0]


def test_a_choice_of_another_groups_file_counts(conf: Path) -> None:
    """Sections follow what Hydra chooses, wherever the line stands, and however it is typed."""
    (conf / "augment").mkdir()
    head = "# @package _global_\ndefaults: [{override /optimizer: lars}]\n"
    (conf / "augment" / "mine.yaml").write_text(head)
    assert rates("conf=own", "+augment=mine") == [3.0]
    assert rates("conf=own", "optimizer='lars'") == [3.0]


def test_each_run_of_a_sweep_has_the_numbers_of_its_choice(conf: Path) -> None:
    """Hydra composes these runs itself."""
    assert rates("-m", "conf=own", "optimizer=sgd,adamw,lars") == [0.1, 0.004, 3.0]


def test_the_printed_config_has_them(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--cfg job shows what would run."""
    assert main("fit", ["conf=own", "optimizer=lars", "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "lr: 3.0" in printed
    assert "optimizer=" not in printed


def test_a_run_is_resumed_with_its_numbers(conf: Path, tmp_path: Path) -> None:
    """Its files hold values alone, whatever becomes of the config."""
    jobs: list[ComposedJob] = []
    assert main("fit", ["conf=own", "run_dir=r"], jobs.append) == 0
    for name, text in jobs[0].files.items():
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).write_text(text)
    (conf / "own.yaml").write_text(OWN.replace("0.004", "0.9"))
    assert rates("run_dir=r", "resume=auto") == [0.004]
    assert rates("run_dir=r", "resume=auto", "optimizer=sgd") == [0.1]


MISTAKES = {
    "optimizer=adamv: {lr: 1}": ["settings of 'optimizer=adamv'", "Did you mean 'adamw'?"],
    "optimzer=adamw: {lr: 1}": ["it must be GROUP=NAME", "Did you mean 'optimizer'?"],
    "trainer if optimzer=adamw: {lr_scaling: none}": [
        "or KEY if GROUP=NAME",
        "Did you mean 'optimizer'?",
    ],
    "trainer if optimizer=adamw: 3": [
        "'trainer if optimizer=adamw' is 3; it must be a mapping of trainer's settings"
    ],
    "optimizer=: {lr: 1}": ["the key 'optimizer='", "it must be GROUP=NAME"],
    "optimizer=adamw: 0.1": ["'optimizer=adamw' is 0.1; it must be a mapping"],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_named(text: str, conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A section that could never hold is an error with the file, and what there is."""
    base = "defaults: [_base, {task: mlp}, {data: digits}, {optimizer: sgd}, {lr: step}, _self_]\n"
    (conf / "own.yaml").write_text(f"{base}{text}\n")
    assert main("fit", ["conf=own"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in MISTAKES[text]), said
    assert "Traceback" not in said
