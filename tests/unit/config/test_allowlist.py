"""The allow-list: the objects that a config may call, checked by name and by object."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.config.allowlist import check_name, locate
from trainkit.errors import ConfigError


@pytest.mark.parametrize(
    "target",
    [
        "trainkit.extensions.slurm.launcher.SlurmLauncher",
        "torch.optim.SGD",
        "torch.optim.lr_scheduler.StepLR",
        "torchvision.models.resnet18",
        "recipes.mlp.MLP",
    ],
)
def test_listed_objects_are_found(target: str) -> None:
    """An allowed object is imported and returned."""
    assert locate(target, "task._target_", []).__name__ == target.rsplit(".", 1)[1]


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.run",
        "builtins.exec",
        "torch.load",
        "torch.optim.sgd.torch.load",
        "trainkit.engine.horovod.engine.os.system",
        "recipes.imagefolder.os.system",
        "trainkit.extensions.horovod_build.build",
        "torch.optim._functional.sgd",
        "torchvision.models.resnet.WeightsEnum.get_state_dict",
        "torchvision.models.resnet.Weights",
        "torchvision.models.get_weight",
        "trainkit.data.loader.ShardedLoader.iterate",
        "trainkit.extensions.programs.commands.run",
        "trainkit.launch.environment.Launcher",
        "trainkit.launch.shared_folder.token_in",
    ],
)
def test_everything_else_is_refused(target: str) -> None:
    """Names off the list, and aliases of such objects inside listed modules, are refused."""
    with pytest.raises(ConfigError, match=r"configs may not call|no class or function"):
        locate(target, "task._target_", [])


def test_an_alias_in_the_users_own_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the user's may be called, but not to reach os.system under another name."""
    (tmp_path / "own_alias.py").write_text(
        "import os\nrun = os.system\ndef fine():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate("own_alias.fine", "task._target_", [])() == 3
    with pytest.raises(ConfigError, match=r"It is posix\.system"):
        locate("own_alias.run", "task._target_", [])


def test_a_folder_that_is_named_like_a_package_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch/ in the current folder does not make the installed torch the user's own."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "notes.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="configs may not call"):
        locate("torch.load", "task._target_", [])


def test_trust_opens_the_list_for_a_named_module() -> None:
    """A module that the user trusts by name may be called."""
    with pytest.raises(ConfigError, match=r"trust=\[fractions\]"):
        check_name("fractions.Fraction", "task._target_", [])
    check_name("fractions.Fraction", "task._target_", ["fractions"])


def test_a_module_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that configs may not call it: the folder may be wrong, or the name."""
    (tmp_path / "mine_here.py").touch()
    monkeypatch.chdir(tmp_path)
    there_is = (
        r"task is 'mine_her\.Task', and there is no module mine_her\. Did you mean 'mine_here'\?"
    )
    with pytest.raises(
        ConfigError, match=rf"{there_is} Run the command in the folder of mine_her\.py"
    ):
        check_name("mine_her.Task", "task", [])
