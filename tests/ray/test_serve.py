"""A run's model behind HTTP, on Ray Serve and in one process:
a resnet18 answers as its Task does, also for a JPEG.
"""

from __future__ import annotations

import io
import json
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.helpers.launching import Command, run_command
from tests.helpers.serving import ask, service
from trainkit.extensions.exporting.description import read_description
from trainkit.extensions.exporting.from_run import load_task
from trainkit.extensions.serving.model import ServedModel


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A resnet18 after two steps."""
    folder = tmp_path_factory.mktemp("resnet18")
    settings = (
        "trainer.max_steps=2 trainer.limit_val_batches=2 data.batch_size=8 logger=none run_dir=run"
    )
    done = run_command(f"python -m trainkit fit conf=resnet18 {settings}", folder)
    assert done.code == 0, done.text
    return folder / "run"


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_answers_are_the_tasks(backend: str, run_dir: Path, cluster: str) -> None:
    """16 requests at a time, a JPEG, and bad input:
    all answered, by Ray Serve as by one process.
    """
    task, _ = load_task("last", str(run_dir), [])
    shape = (3, 32, 32)
    inputs = torch.randn(16, *shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = task(inputs)
    with (
        service(run_dir, f"backend={backend}", "batch_wait_ms=100") as address,
        ThreadPoolExecutor(16) as pool,
    ):
        bodies = [json.dumps({"inputs": x.tolist()}).encode() for x in inputs]
        answers = list(pool.map(lambda body: ask(f"{address}/predict", body), bodies))
        assert [status for status, _ in answers] == [200] * 16, answers
        outputs = torch.tensor([answer["predictions"][0]["output"] for _, answer in answers])
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)

        picture = io.BytesIO()
        Image.effect_noise((80, 60), 90).convert("RGB").save(picture, "JPEG")
        status, answer = ask(f"{address}/predict", picture.getvalue(), "image/jpeg")
        (export,) = (run_dir / "export").glob("*.pt2")
        (sample,) = ServedModel(export).sample_of_picture(picture.getvalue())
        with torch.no_grad():
            scores = task(sample[None])[0].softmax(0)
        found = answer["predictions"][0]
        classes = read_description(export).classes
        assert (
            status == 200
            and classes is not None
            and found["class"] == classes[int(scores.argmax())]
        )
        assert found["probability"] == pytest.approx(float(scores.max()), abs=1e-4)

        assert ask(f"{address}/predict", b"{}")[0] == 400
        assert ask(f"{address}/predict", b"x", "text/plain")[0] == 415
        assert ask(f"{address}/predict", b"x", "image/jpeg")[0] == 400
        text = urllib.request.urlopen(f"{address}/metrics").read().decode()
        batches = int(text.split("trainkit_batch_samples_count ")[1].split()[0])
        assert batches < 17, text


def test_what_cannot_be_served_is_refused(run_dir: Path, command: Command) -> None:
    """A folder that is no run, a missing one,
    a taken port and unknown settings end with exit code 2 and a sentence.
    """
    (run_dir.parent / "empty").mkdir(exist_ok=True)
    cases = {
        f"{run_dir.parent}/empty": "is no run",
        "/no/such/run": "does not exist",
        f"{run_dir} prot=1": "'prot' is no setting of serve. Did you mean 'port'?",
        f"{run_dir} backend=fast": "backend is 'fast'; it must be one of auto, ray, local",
        f"{run_dir} port=99999": "it must be 65535 or less",
    }
    for words, message in cases.items():
        done = command(f"python -m trainkit serve {words}")
        assert done.code == 2 and message in done.err, done.text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command(
            f"python -m trainkit serve {run_dir} backend=local port={taken.getsockname()[1]}"
        )
    assert done.code == 2 and "cannot be used" in done.err, done.text


def test_requests_beyond_those_that_may_wait_are_refused(run_dir: Path, cluster: str) -> None:
    """503 by Ray, in front of a replica that has as many as it may; these are answered."""
    body = json.dumps({"inputs": torch.zeros(3, 32, 32).tolist()}).encode()

    def status(address: str) -> int:
        request = urllib.request.Request(
            f"{address}/predict", body, {"content-type": "application/json"}
        )
        try:
            return int(urllib.request.urlopen(request, timeout=60).status)
        except urllib.error.HTTPError as error:
            return error.code

    words = ("backend=ray", "max_waiting=2", "batch_wait_ms=3000")
    with service(run_dir, *words) as address, ThreadPoolExecutor(12) as pool:
        seen = list(pool.map(status, [address] * 12))
    assert {*seen} == {200, 503} and seen.count(200) >= 2, seen
