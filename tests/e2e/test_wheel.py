"""trainkit installed from a built wheel, used from an empty folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.launching import Command

ROOT = Path(__file__).parents[2]
# The checkout stands on the path of the test's environment (an editable install): without it, only
# the wheel is left.
RUN = (
    "import runpy, sys; sys.path = ['', {site!r}, *(p for p in sys.path[1:] if p not in ({root!r},"
    " {site!r}))]; "
)
RUN += (
    "sys.argv = ['trainkit', {arguments}]; runpy.run_module('trainkit', run_name='__main__',"
    " alter_sys=True)"
)


def test_a_wheel_finds_its_recipes_and_configs(command: Command, tmp_path: Path) -> None:
    """The configs and recipes of an installed wheel train in an empty folder,
    without the checkout.
    """
    built = command(
        f"{sys.executable} -m pip wheel --no-deps --no-build-isolation -q -w dist {ROOT}"
    )
    assert built.code == 0, built.text
    site = tmp_path / "site"
    assert (
        command(f"{sys.executable} -m pip install -q --no-deps --target {site} dist/*.whl").code
        == 0
    )
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} <= {
        "trainkit",
        "bin",
    }
    assert (site / "trainkit" / "extensions" / "horovod_build" / "horovod.cmake").is_file()
    work = tmp_path / "work"
    work.mkdir()
    arguments = "'fit', 'conf=mlp', 'trainer.max_epochs=1'"
    code = RUN.format(site=str(site), root=str(ROOT), arguments=arguments)
    done = command(f'cd work && python -c "{code}"')
    assert done.code == 0, done.text
    assert "epoch 1/1" in done.out
    where = command(
        "cd work && python -c"
        f' "{RUN.split("runpy.run")[0].format(site=str(site), root=str(ROOT), arguments="1")}import'
        ' trainkit; print(trainkit.__file__)"'
    )
    assert where.out.startswith(str(site)), where.text
