"""trainkit installed from a built wheel, used from an empty folder."""

from __future__ import annotations

import os
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


def test_two_checkouts_make_the_same_bytes(command: Command, tmp_path: Path) -> None:
    """Whoever builds a commit again gets the files of the release, whatever the times and rights
    of the checkout's files are.
    """
    for name in ("one", "other"):
        assert command(f"git clone -q --depth 1 file://{ROOT} {name}").code == 0
    other = tmp_path / "other"
    for path in [other, *other.rglob("*")]:
        if ".git" not in path.parts:
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (1_000_000_000, 1_000_000_000))
    for name in ("one", "other"):
        built = command(
            f"cd {name} && SOURCE_DATE_EPOCH=1700000000 {sys.executable} -m build --no-isolation"
            " -o dist ."
        )
        assert built.code == 0, built.text
    files = sorted(path.name for path in (tmp_path / "one" / "dist").iterdir())
    assert len(files) == 2
    for name in files:
        contents = [(tmp_path / at / "dist" / name).read_bytes() for at in ("one", "other")]
        assert contents[0] == contents[1], name
