"""`python -m trainkit launch`: its options, and what it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.elastic import launch
from trainkit.launch.environment import read_launcher


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of jobs, in place of jobs."""
    jobs: list[Any] = []

    def run(settings: Any) -> int:
        jobs.append(settings)
        return 7

    monkeypatch.setattr(launch, "run", run)
    return jobs


def test_options_have_the_meaning_of_horovodruns(started: list[Any], tmp_path: Path) -> None:
    """Numbers of ranks, hosts, pauses and the command after --."""
    (tmp_path / "hosts").write_text("a slots=4\n# a comment\nb slots=2\n")
    line = (
        f"-np 4 --min-np 2 --max-np 6 --hostfile {tmp_path}/hosts --reset-limit 3"
        " --elastic-timeout 9 --blacklist-cooldown-range 2 5 -- python train.py --lr 1"
    )
    assert launch.main("launch", line.split()) == 7
    (settings,) = started
    rules = settings.rules
    assert (rules.np, rules.min_np, rules.max_np, rules.reset_limit) == (4, 2, 6, 3)
    assert (rules.timeout_s, rules.pause_s) == (9.0, (2.0, 5.0))
    assert settings.hosts == {"a": 4, "b": 2}
    assert settings.command == ("python", "train.py", "--lr", "1")
    assert not settings.passes_on


def test_its_ranks_are_of_torch_distributed(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """engine=auto is ddp, also in the environment of another launcher."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    launch.main("launch", ["-np", "2", "python", "train.py"])
    environ = dict(started[0].environ) | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    launcher = read_launcher(environ)
    assert (launcher.name, launcher.rank, launcher.world_size) == ("launch", 1, 2)
    assert launcher.engine == "ddp"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-np 2", "There is no command"),
        ("-np 0 python x.py", "-np is 0; it must be 1 or more"),
        ("-np 2 --min-np 3 python x.py", "--min-np is 3; it must be from 1 to -np"),
        ("-np 2 --hostfile nowhere python x.py", "--hostfile nowhere cannot be read"),
        ("-np 2 fit conf=mlp", "'fit' is not a program.* -- python -m trainkit fit ..."),
        ("-np 2 -- train.py", "'train.py' is not a program.* -- python train.py ..."),
    ],
)
def test_what_is_wrong_is_named(started: list[Any], line: str, message: str) -> None:
    """With the option, its value and what is legal; nothing is started."""
    with pytest.raises(ConfigError, match=message):
        launch.main("launch", line.split())
    assert not started


def test_a_hostfile_of_another_form_is_refused(started: list[Any], tmp_path: Path) -> None:
    """Its line is shown."""
    (tmp_path / "hosts").write_text("a 4\n")
    with pytest.raises(ConfigError, match="has the line 'a 4'; it must be 'HOST slots=N'"):
        launch.main("launch", ["-np", "1", "--hostfile", str(tmp_path / "hosts"), "true"])
