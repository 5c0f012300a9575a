"""launcher=ray at the command line:
what is refused, in words, before Ray or anything else is started.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import run
from trainkit.config.roles import roles_of
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.jobs.overrides import override
from trainkit.extensions.ray import connection
from trainkit.extensions.ray.backend import WorkerProgram, cause_of, fault_of
from trainkit.extensions.ray.cluster import connected
from trainkit.extensions.ray.launcher import RayLauncher
from trainkit.extensions.ray.options import RayOptions


def refused(
    capsys: pytest.CaptureFixture[str], *words: str, command: str = "fit", code: int = 2
) -> str:
    """Run a command that is refused; return its one error."""
    assert main(command, ["conf=mlp", "launcher=ray", *words]) == code
    text = capsys.readouterr().err
    assert text.count("Error: ") == 1 and "Traceback" not in text and len(text) < 1000
    return text


@pytest.mark.parametrize("kind", [Exception, KeyError])
def test_a_ray_that_starts_too_late_is_one_error(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to do, and no traceback of Ray's; another error is not taken for it."""

    def init(**given: Any) -> None:
        raise kind("The current node timed out during startup.\nmore")

    late = SimpleNamespace(
        is_initialized=lambda: False, init=init, exceptions=SimpleNamespace(RayError=OSError)
    )
    monkeypatch.setattr(connection, "load_ray", lambda *_: late)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    expected = EngineError if kind is Exception else KeyError
    with pytest.raises(expected, match=r"timed out during startup"):
        connection.connect_ray("A search")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["launcher.num_workers=[8,2]"],
            "launcher.num_workers is [8, 2]; it must be a number of ranks",
        ),
        (
            ["launcher.num_workers=0"],
            "launcher.num_workers is 0; it must be a number of ranks, 1 or more",
        ),
        (
            ["launcher.num_workers=two"],
            "launcher.num_workers is 'two'; it must be a whole number or a list",
        ),
        (
            ["launcher.num_worker=2"],
            "launcher.num_worker is not a setting. Did you mean 'num_workers'?",
        ),
        (
            ["launcher.resources_per_worker={CPU: 0}"],
            "launcher.resources_per_worker is {'CPU': 0}; it must be a mapping",
        ),
        (
            ["engine=deepspeed"],
            "engine is deepspeed, which launcher=ray does not start. Use engine=horovod",
        ),
        (["engine=single"], "engine is single, which launcher=ray does not start"),
        (
            ["engine.compresion=fp16"],
            "engine.compresion is not a setting. Did you mean 'compression'?",
        ),
    ],
)
def test_illegal_settings_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], text: str
) -> None:
    """Key, value, what is legal; no folder of a run is left."""
    assert text in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_options_of_horovods_engine_are_legal(tmp_path: Path) -> None:
    """engine=auto is checked as the engine of the ranks, not of the driver."""
    jobs: list[Any] = []
    run(
        "fit",
        ["conf=mlp", "launcher=ray", "engine.compression=fp16", f"run_dir={tmp_path}"],
        True,
        jobs.append,
    )
    assert jobs[0].config["launcher"]["num_workers"] == 2


def test_several_jobs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """-m with launcher=ray."""
    assert main("fit", ["-m", "conf=mlp", "launcher=ray", "optimizer.lr=0.1,0.2"]) != 0
    assert (
        "-m runs several jobs in this process, and launcher=ray starts one"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_only_fit_has_a_launcher(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The others run in one process."""
    assert f"launcher is ray, which is for fit; {command} runs in this process" in refused(
        capsys, command=command
    )


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("horovodrun", {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_two_launchers_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str]
) -> None:
    """launcher=ray under horovodrun or torchrun; a rank that it started itself passes."""
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(
        ConfigError, match=f"launcher is ray, and this process was started by {name}: two launchers"
    ):
        run("fit", ["conf=mlp", "launcher=ray"], True, lambda job: None)
    monkeypatch.setenv("TRAINKIT_LAUNCHER", "ray")
    run("fit", ["conf=mlp", "launcher=ray"], True, lambda job: None)


def test_ray_may_be_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "ray" else found(name, *rest),
    )
    assert "ray is not installed. Install it: pip install 'trainkit[ray]'" in refused(capsys)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (
            "ray://head:10001",
            "an address of Ray Client: the driver would be outside of the cluster, where ranks",
        ),
        ("http://head:8265", "the address of the dashboard, to which jobs are submitted"),
    ],
)
def test_addresses_of_another_kind_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str, text: str
) -> None:
    """With the command that works."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    error = refused(capsys)
    assert text in error and "ray job submit --working-dir . -- python -m trainkit fit" in error


def test_an_address_without_a_cluster_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 1 answers nothing."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(
            ConfigError, match=r"RAY_ADDRESS is '127.0.0.1:1', and no Ray cluster answers"
        ),
        connected(RayOptions(1, 1, {})),
    ):
        pass


WORK = WorkerProgram(["python"], {}, run_dir="runs/x")
GOOD = {
    "trainkit": True,
    "horovod": "0.28.1+trainkit.0",
    "python": "3.11.1",
    "folder": "/ray",
    "token": True,
}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            {"error": "No module named encodings"},
            "Python does not start on node1 with the workers' environment: No module",
        ),
        (
            GOOD | {"trainkit": False},
            "on node1 (Python 3.11.1, /ray) has no trainkit. Name it in launcher.runtime_env",
        ),
        (
            GOOD | {"horovod": ""},
            "on node1 has no Horovod. Run `python -m trainkit horovod install`",
        ),
        (GOOD | {"horovod": "0.28.1"}, "on node1 has Horovod 0.28.1, which trainkit did not build"),
        (
            GOOD | {"token": False},
            "run_dir is 'runs/x', and node1 does not see it (its folder is /ray): it is not shared",
        ),
    ],
)
def test_what_a_node_lacks_is_named(found: dict[str, Any], text: str) -> None:
    """By what its keeper found there."""
    assert text in fault_of(found, "node1", WORK)
    assert fault_of(GOOD, "node1", WORK) == ""


def test_ranks_of_torch_need_no_horovod() -> None:
    """engine=ddp: its groups form through the driver's store."""
    without = GOOD | {"horovod": ""}
    assert fault_of(without, "node1", replace(WORK, needs_horovod=False)) == ""


PIP = """Failed to set up runtime environment.
Could not create the actor because its associated runtime env failed to be created.
[Node 192.0.2.2] Traceback (most recent call last):
ray._private.runtime_env.utils.SubprocessCalledProcessError: Run cmd[9] failed with the following details.
Command '['/tmp/ray/virtualenv/bin/python', '-m', 'pip', 'install', '-r', 'x.txt']' returned non-zero exit status 1.
Last 50 lines of stdout:
    ERROR: Could not find a version that satisfies the requirement torchh==2.11 (from versions: none)
    ERROR: No matching distribution found for torchh==2.11
    [notice] To update, run: pip install --upgrade pip
"""
CONDA = """[Node 192.0.2.2] Traceback (most recent call last):
FileNotFoundError: [Errno 2] No such file or directory: 'conda'

During handling of the above exception, another exception occurred:

ValueError: Could not find Conda executable at conda.
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            PIP,
            (
                "ERROR: Could not find a version that satisfies the requirement torchh==2.11 (from"
                " versions: none)"
            ),
        ),
        (CONDA, "ValueError: Could not find Conda executable at conda."),
        ("", "RuntimeError('')"),
    ],
)
def test_an_environment_that_cannot_be_made_has_its_first_cause(text: str, cause: str) -> None:
    """Of pip's output the first error, not what follows from it;
    of an exception of Ray's own the last line.
    """
    assert cause_of(RuntimeError(text)) == cause


def test_elastic_is_added_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks' command is the typed one, with the callback,
    and with the run's folder of the driver, quoted for Hydra.
    """
    commands: list[Any] = []

    def record(launcher: RayLauncher, command: Any, run_dir: Any, **kind: Any) -> int:
        assert launcher.options.least == 2
        commands.append((command, run_dir))
        return 3

    monkeypatch.setattr(RayLauncher, "run", record)
    folder = f"{tmp_path}/it's=here"
    assert main("fit", ["conf=mlp", "launcher=ray", override("run_dir", folder)]) == 3
    words, run_dir = commands.pop()
    assert words[:4] == ["python", "-m", "trainkit", "fit"] and run_dir == folder
    assert "callbacks.elastic._target_=trainkit.callbacks.Elastic" in words
    jobs: list[Any] = []
    run("fit", [word for word in words[4:] if word != "launcher=ray"], True, jobs.append)
    assert jobs[0].config["run_dir"] == folder and "elastic" in roles_of(jobs[0].config)
    assert main("fit", ["conf=mlp", "launcher=ray", "callbacks=elastic"]) == 3
    assert not any("callbacks.elastic._target_" in word for word in commands.pop()[0])
    main("fit", ["conf=mlp", "launcher=ray", "callbacks.checkpoint.dirpath=memory://x"])
    assert commands.pop()[1] is None, "checkpoints are in a store: the folder need not be shared"
