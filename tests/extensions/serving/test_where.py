"""Where a service runs: what has no effect there, or would end another's, is refused."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.serving import serve as module
from trainkit.extensions.serving.app import ServiceOptions
from trainkit.extensions.serving.serve import Where, find_export, refuse_running


@pytest.mark.parametrize("where", [Where("local", replicas=2), Where("local", cpus=0.5)])
def test_one_process_takes_no_replicas_and_cpus(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of Ray's replicas; where Ray is installed, the advice is not to install it."""
    monkeypatch.setattr(module, "Service", lambda *_: None)
    monkeypatch.setattr(module, "_check_port", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=r"(replicas is 2|cpus is 0\.5), .* or use backend=ray"):
        module.serve(Path("x.pt2"), ServiceOptions(), where)


def test_a_cluster_that_serves_already_is_refused() -> None:
    """Its port would stay, its application at / be replaced, and all of them ended at the end."""
    refuse_running({}, {})
    with pytest.raises(ConfigError, match=r"\(applications: other\), .* Use backend=local, or"):
        refuse_running({"other": object()}, {"node": "HEALTHY"})
    with pytest.raises(ConfigError, match=r"\(applications: none\)"):
        refuse_running({}, {"node": "HEALTHY"})


@pytest.mark.parametrize(("others", "ended"), [((), "all"), (("other",), "trainkit")])
def test_applications_of_others_stay(others: tuple[str, ...], ended: str) -> None:
    """Those that came while the service ran; without any Ray Serve ends too."""
    seen: list[str] = []
    ray_serve: Any = SimpleNamespace(
        status=lambda: SimpleNamespace(applications=dict.fromkeys(("trainkit", *others))),
        shutdown=lambda: seen.append("all"),
        delete=seen.append,
    )
    module.end(ray_serve)
    assert seen == [ended]


@pytest.mark.parametrize(("address", "refused"), [("", True), ("head:6379", False)])
def test_replicas_without_room(
    address: str, refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this host they would wait forever; a cluster may grow, and a line says what it lacks."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    nodes = [{"CPU": 2.0}]
    module.check_room(nodes, Where(replicas=4, cpus=0.5))
    module.check_room(nodes, Where(replicas=9, cpus=0))
    if refused:
        with pytest.raises(ConfigError, match=r"replicas is 3, each with cpus=1, .* room for 2\."):
            module.check_room(nodes, Where(replicas=3))
    else:
        module.check_room(nodes, Where(replicas=3))
        assert "room for 2, until nodes come" in capsys.readouterr().out


def test_an_export_older_than_the_best_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that trained on is served as it was: a line has the command for the newer weights."""
    file = tmp_path / "export" / "mlp.pt2"
    manifest = tmp_path / "checkpoints" / "best" / "manifest.json"
    for path in (file, manifest):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(manifest, (0, 0))
    assert find_export(str(tmp_path), []) == file and not capsys.readouterr().out
    os.utime(file, (-10, -10))
    assert find_export(str(tmp_path), []) == file
    text = capsys.readouterr().out
    assert f"export ckpt_path=best run_dir={tmp_path} format=torch_export" in text


def test_requests_in_front_of_the_replicas_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By max_waiting: Ray lets any number wait by default, and answers others with 503."""
    given: dict[str, Any] = {}

    def deployed(ingress: Any, **options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(bind=lambda: "application")

    fake = SimpleNamespace(ingress=lambda _: lambda replica: replica, deployment=deployed)
    monkeypatch.setattr(importlib, "import_module", lambda _: fake)
    made = module.deployment(Path("x.pt2"), ServiceOptions(max_waiting=7), Where("ray", replicas=2))
    assert made == "application"
    assert (given["max_ongoing_requests"], given["max_queued_requests"]) == (7, 7)
    assert given["num_replicas"] == 2
