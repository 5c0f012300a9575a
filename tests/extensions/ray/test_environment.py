"""runtime_env: each part of it reaches the ranks, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.extensions.ray.test_options import options
from trainkit.errors import ConfigError

cluster = pytest.importorskip("trainkit.extensions.ray.cluster", reason="ray is not installed")


def test_a_part_that_ray_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves it out with a warning, which a driver without its log does not show; a plugin of
    the user's may know it.
    """
    text = "x.runtime_env has 'env_var', which Ray would ignore. Did you mean 'env_vars'?"
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        cluster.refuse_bad_environment("x.runtime_env", {"env_var": {}}, is_joined=False)
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", "[]")
    cluster.refuse_bad_environment("x.runtime_env", {"env_var": {}}, is_joined=False)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"working_dir": "."}, r"working_dir is '\.', and this process is connected to Ray alr"),
        ({"py_modules": ["s3://a.zip", "/b"]}, r"py_modules is '/b', .* Give it to ray\.init"),
        ({"env_vars": {"A": 1}}, r"is not as Ray takes it: .*env_vars"),
    ],
)
def test_a_joined_connection_takes_no_folders(environment: dict[str, Any], text: str) -> None:
    """Ray sends them with the connection, which is the script's own; an address is taken."""
    with pytest.raises(ConfigError, match=text):
        cluster.refuse_bad_environment("x.runtime_env", environment, is_joined=True)
    cluster.refuse_bad_environment("x.", {"working_dir": "s3://a.zip"}, is_joined=True)


def test_actors_have_the_environment_on_a_connection_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After ray.init() of the script it was without effect; on a connection of ours Ray has it."""
    given = options(runtime_env={"env_vars": {"A": "1"}})
    assert "runtime_env" not in given.actor
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    with cluster.connected(given) as joined:
        assert joined.actor["runtime_env"] == {"env_vars": {"A": "1"}}
