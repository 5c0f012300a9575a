"""launcher=kubernetes at the command line: what it cannot run, and every command of its page."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli.run import main
from trainkit.config.compose import run as compose
from trainkit.extensions.kubernetes.schemas import known

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
OWN = [
    "conf=mlp",
    "launcher=kubernetes",
    "launcher.image=trainkit:1",
    "launcher.volumes={runs: /runs}",
    "run_dir=/runs/mine",
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no kubectl


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=horovod"], "engine is horovod, and launcher.kind=Job starts torchrun."),
        (
            ["engine=fsdp", "launcher.kind=MPIJob"],
            "engine is fsdp, and launcher.kind=MPIJob starts ranks of Horovod.",
        ),
        (
            ["engine=single", "launcher.nodes=2"],
            "engine is single, and launcher=kubernetes asks for several ranks",
        ),
        (
            ["callbacks=elastic"],
            "callbacks.elastic is set, and launcher is kubernetes: its jobs keep their ranks",
        ),
        (
            ["trainer.enable_checkpointing=false"],
            "a job of launcher=kubernetes may start several times",
        ),
        (
            ["ckpt_path=/runs/other/checkpoints/last"],
            (
                "ckpt_path is '/runs/other/checkpoints/last', and each start of a job of"
                " launcher=kubernetes resumes from its own run's last checkpoint. To begin at this"
                " one, while there is none of the run's own, give resume=auto beside it"
            ),
        ),
        (["ckpt_path=last", "resume=auto"], "two checkpoints of this run"),
        (["launcher.nodes=none"], "launcher.nodes"),
        (["launcher.node=2"], "launcher.node"),
        ([], "There is no kubectl on this machine."),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one message, before anything is created."""
    assert main("fit", [*OWN, *words]) == 2
    text = capsys.readouterr().err
    assert text.count("Error: ") == 1 and message in text and len(text) < 1200, text
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob", "MPIJob", "RayJob"])
def test_a_run_may_begin_at_another_ones_checkpoint(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each start has both words: a later one resumes from the run's own."""
    words = ["ckpt_path=/runs/other/checkpoints/last", "resume=auto", f"launcher.kind={kind}"]
    assert main("fit", [*OWN, *words, "launcher.dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert text.count("ckpt_path=/runs/other/checkpoints/last") == text.count("resume=auto") == 1


def test_the_runs_folder_is_one_of_the_pods(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On this machine it need not be a folder, nor one that the user may write."""
    (tmp_path / "runs").touch()
    own = [word.replace("/runs", f"{tmp_path}/runs") for word in OWN]
    assert main("fit", [*own, "launcher.dry_run=true"]) == 0
    assert f"{tmp_path}/runs/mine" in capsys.readouterr().out
    assert main("fit", ["conf=mlp", f"run_dir={tmp_path}/runs/mine"]) == 2
    assert "is no writable folder" in capsys.readouterr().err


def test_the_pages_commands_print_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    """With dry_run where the page has it not; those of `jobs` are in test_cluster.py."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    every = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line for line in every if "trainkit jobs" not in line]
    assert len(lines) == 2
    for line in lines:
        python, dash_m, trainkit, command, *words = shlex.split(line)
        assert (python, dash_m, trainkit) == ("python", "-m", "trainkit")
        assert main(command, [*words, "launcher.dry_run=true"]) == 0
        kinds = [one["kind"] for one in yaml.safe_load_all(capsys.readouterr().out)]
        assert kinds == ["Service", "Job"]


@pytest.mark.parametrize(
    "words",
    [
        ["launcher.kind=Job", "launcher.nodes=2"],
        ["launcher.kind=Job", "launcher.nodes=1"],
        ["launcher.kind=JobSet", "++launcher.nodes=2"],
        ["launcher.kind=TrainJob", "+launcher.env={A: b}", "~launcher.gpu_resource"],
    ],
)
def test_ranks_take_no_notice_of_their_configs_launcher(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A config may name launcher=kubernetes itself: in the pods it trains."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [mlp, _self_, {override /launcher: kubernetes}]\n"
        f"launcher: {{image: trainkit:1, dry_run: true, volumes: {{runs: {tmp_path}}}}}\n"
    )
    assert main("fit", ["conf=mine", f"run_dir={tmp_path}/mine", *words]) == 0
    *_, pods = known([*yaml.safe_load_all(capsys.readouterr().out)])
    (container,) = pods["spec"].get("template", pods)["spec"]["containers"]
    for entry in container["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])
    if container["command"][0] == "torchrun":
        rank = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        for name, value in rank.items():
            monkeypatch.setenv(name, value)
    at = container["command"].index("fit")
    jobs: list[Any] = []
    compose("fit", container["command"][at + 1 :], True, jobs.append)
    assert [job.config["run_dir"] for job in jobs] == [f"{tmp_path}/mine"]
    assert not any("launcher" in word for word in container["command"])


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is missing")
def test_a_rayjobs_driver_starts_ranks_on_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a config that names launcher=kubernetes itself, with a section for it."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [mlp, _self_, {override /launcher: kubernetes}]\n"
        "launcher=kubernetes:\n"
        f"  {{kind: RayJob, image: trainkit:1, dry_run: true, volumes: {{runs: {tmp_path}}}}}\n"
    )
    words = [f"run_dir={tmp_path}/mine", "++launcher.nodes=[2,8]"]
    assert main("fit", ["conf=mine", *words]) == 0
    entrypoint = yaml.safe_load(capsys.readouterr().out)["spec"]["entrypoint"]
    jobs: list[Any] = []
    compose("fit", shlex.split(entrypoint)[4:], True, jobs.append)
    assert [job.config["launcher"]["num_workers"] for job in jobs] == [[2, 8]]
