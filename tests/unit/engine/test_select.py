"""Which engine a run gets."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.engine.select import auto_engine, make_engine
from trainkit.engine.single import SingleEngine
from trainkit.errors import ConfigError, EngineError


def under(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of a launcher that started two processes."""
    variables = {
        "torchrun": {
            "TORCHELASTIC_RUN_ID": "x",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
        },
        "horovodrun": {
            "HOROVOD_RANK": "1",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
        },
        "srun": {
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": "1",
        },
        "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        "mpirun of MPICH": {
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "2",
        },
        "none": {},
    }
    for name, value in variables[launcher].items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("none", "single"),
        ("torchrun", "ddp"),
        ("srun", "ddp"),
        ("horovodrun", "horovod"),
        ("mpirun", "horovod"),
        ("mpirun of MPICH", "horovod"),
    ],
)
def test_auto_takes_the_launchers_engine(
    launcher: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """engine=auto is the engine of the launcher that started the process;
    nothing starts before it is entered.
    """
    if name == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    under(launcher, monkeypatch)
    engine = make_engine("auto")
    assert engine.name == name
    assert (engine.ranks.rank, engine.ranks.world_size) == (
        (0, 1) if launcher == "none" else (1, 2)
    )
    assert engine.ranks.is_main == (launcher == "none")


@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun", "mpirun of MPICH"])
def test_single_under_a_launcher_is_refused(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes that each train alone are refused."""
    under(launcher, monkeypatch)
    with (
        pytest.raises(
            EngineError, match=rf"engine=single, but {launcher.split()[0]} started 2 processes"
        ),
        SingleEngine(),
    ):
        pass


def test_ddp_without_a_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddp needs torchrun's variables, and names those that are missing."""
    monkeypatch.setenv("RANK", "0")
    words = r"not set: WORLD_SIZE, MASTER_ADDR, MASTER_PORT\).*torchrun --nproc"
    with pytest.raises(EngineError, match=words), make_engine("ddp"):
        pass


def test_another_launcher_is_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """ddp under mpirun, which does not set torchrun's variables, is refused;
    under srun it needs those of the other tasks.
    """
    under("srun", monkeypatch)
    words = (
        r"srun started this process, but its variables do not describe the other ranks"
        r" \(KeyError\('SLURM_NODEID'\)\)"
    )
    with pytest.raises(EngineError, match=words), make_engine("ddp"):
        pass
    under("mpirun", monkeypatch)
    with (
        pytest.raises(
            EngineError, match=r"engine=ddp, but mpirun started 2 processes without torchrun's"
        ),
        make_engine("ddp"),
    ):
        pass


@pytest.mark.parametrize(
    "option", [{"num_groups": 2}, {"cycle_time_ms": 1.0}, {"bucket_cap_mb": 1.0}]
)
def test_options_of_another_engine_are_refused(option: dict[str, Any]) -> None:
    """An option that the launcher's engine does not have would have no effect."""
    with pytest.raises(
        ConfigError,
        match=rf"engine\.{next(iter(option))} is .* engine is 'single', where it has no effect",
    ):
        auto_engine(**option)


def test_an_option_of_the_launchers_engine_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto passes an option to the engine that has it."""
    under("torchrun", monkeypatch)
    assert auto_engine(bucket_cap_mb=2.0)._bucket_bytes == 2 * 2**20  # type: ignore[attr-defined]


def test_bad_options_are_refused_by_name() -> None:
    """Engines check their arguments like every constructor."""
    with pytest.raises(
        ConfigError, match=r"engine\.bucket_cap_mb is 0; it must be a number above 0"
    ):
        make_engine("ddp", bucket_cap_mb=0)
    with pytest.raises(
        ConfigError, match=r"engine is 'nccl'; it must be one of auto, single, horovod, ddp"
    ):
        make_engine("nccl")  # type: ignore[arg-type]


def test_without_horovod_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Horovod is not installed, the message names the command that builds it."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "horovod" else real(name, *a)
    )
    with pytest.raises(
        ConfigError,
        match=r"engine=horovod, but Horovod is not installed\. Run `python -m trainkit horovod",
    ):
        make_engine("horovod")


def test_without_deepspeed_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By its name, and as the engine of a config, before torch is loaded."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "deepspeed" else found(name, *more),
    )
    with pytest.raises(
        ConfigError,
        match="DeepSpeed is not installed. Install it: DS_BUILD_OPS=0 pip install deepspeed",
    ):
        make_engine("deepspeed")
    assert main("fit", ["conf=mlp", "engine=deepspeed"]) != 0
    assert "engine=deepspeed, but DeepSpeed is not installed" in capfd.readouterr().err
