"""All commands and all code of docs/ray.md run, but for what NOT_RUN names:
made small, on the tests' cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.helpers.launching import BIN, Command, run_command
from tests.ray.conftest import ROOT
from tests.ray.test_data import write_digits

PAGE = (ROOT / "docs" / "ray.md").read_text()
NOT_RUN = {
    "pip install 'trainkit[ray]'": "it installs from an index",
    "export RAY_ADDRESS=auto": (
        "`auto` finds one cluster of this host; the tests' is one of several, and is named"
    ),
}
QUICK = " trainer.max_steps=2 trainer.limit_val_batches=1 data.batch_size=2"
PRELUDES = {
    "RayExecutor": (
        "import horovod.torch as hvd\ndef train(value):\n    hvd.init()\n    return hvd.rank(),"
        " value\n"
    ),
    "TorchTrainer": (
        """
from tests.helpers.toy import Line as MyTask, loader
from trainkit import DataModule
class MyData(DataModule):
    def train_dataloader(self):
        return loader(23)
    def val_dataloader(self):
        return loader(7)
"""
    ),
    "RayData": (
        """
import torch
import trainkit
from torch.nn import functional

class Classifier(trainkit.Task):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3 * 8 * 8, 10)
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0].float()), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def decode(row):
    return row

task = Classifier()
trainer = trainkit.Trainer(max_epochs=1, enable_progress_bar=False)
"""
    ),
    "tune.Tuner": "",
}
AFTER = {
    "RayExecutor": "assert results == [(0, 0.1), (1, 0.1)], results",
    "TorchTrainer": "assert result.metrics['epoch'] == 5 and result.checkpoint",
    "RayData": "assert trainer.global_step > 0",
    "tune.Tuner": (
        "values = [result.metrics['val/acc'] for result in results]\n"
        "assert len(values) == 2\n"
        "assert results.get_best_result().metrics['val/acc'] == max(values) > 0"
    ),
}


def commands() -> list[str]:
    """Return the page's commands, a command of several lines as one, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [
        line.split("  #")[0].strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [re.sub(r" +", " ", line) for line in lines if line]


def code() -> dict[str, str]:
    """Return the page's Python, by what it shows; the client of `serve` apart."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    return {
        next((name for name in PRELUDES if f"{name}(" in block), "client"): block
        for block in blocks
    }


def shrunk(line: str, cluster: Any, folder: Path) -> str:
    """Return a command for this cluster: without GPUs, with less work."""
    line = line.replace("num_workers=4", "num_workers=2").replace("{CPU: 2, GPU: 1}", "{CPU: 1}")
    line = line.replace("/shared/", f"{folder}/shared/")
    line = line.replace("http://head:8265", f"http://{cluster.head_node.address_info['webui_url']}")
    line = line.replace("/data/", "data/").replace("num_samples=12", "num_samples=2")
    if " fit " in line:
        line += QUICK if "resnet50" in line else " trainer.max_epochs=1"
    return line + " trainer.max_epochs=1 run_dir=search" * (" tune " in line)


SERVED = [line for line in commands() if " serve " in line]
RUN = [line for line in commands() if line not in SERVED and line not in NOT_RUN]


def test_the_page_has_its_commands() -> None:
    """The tests below see them, and none that is left out is gone from the page."""
    assert len(RUN) == 6 and len(SERVED) == 2 and set(NOT_RUN) <= set(commands())
    assert set(code()) == {*PRELUDES, "client"}


@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_page_runs(line: str, cluster: Any, tmp_path: Path) -> None:
    """It ends with 0, on two ranks of Horovod's where it asks for several,
    on a cluster of its own if none is named.
    """
    if "data=ray" in line:
        write_digits(tmp_path / "data")
    own = {} if "conf=mlp launcher=ray" not in line else {"RAY_ADDRESS": ""}
    done = run_command(shrunk(line, cluster, tmp_path), tmp_path, 240, OMP_NUM_THREADS="1", **own)
    assert done.code == 0, f"{line}\n{done.text[-3000:]}"
    assert ("engine         horovod, 2 ranks" in done.text) == (
        "num_workers=" in line or "-np 2" in line
    ), done.text


@pytest.mark.parametrize("name", PRELUDES)
def test_the_code_of_the_page_runs(
    name: str, cluster: Any, command: Command, tmp_path: Path
) -> None:
    """As a script, with what it leaves to the reader; its result is asked for."""
    block = (
        code()[name]
        .replace("num_workers=4", "num_workers=2")
        .replace('{"CPU": 2, "GPU": 1}', '{"CPU": 1}')
    )
    block = block.replace('"/shared/', f'"{tmp_path}/').replace('"/data/', f'"{tmp_path}/data/')
    block = block.replace("num_samples=8", "num_samples=2")
    if name == "RayData":
        write_digits(tmp_path / "data")
    (tmp_path / "mine.py").write_text(f"{PRELUDES[name]}\n{block}\n{AFTER[name]}\n")
    done = command(
        "python mine.py", HOME=str(tmp_path), RAY_TRAIN_V2_ENABLED="1", OMP_NUM_THREADS="1"
    )
    assert done.code == 0, done.text[-3000:]


def test_the_manifest_of_kuberay_has_a_command_that_composes(command: Command) -> None:
    """It cannot run here; its YAML is whole, and the command of its job is accepted,
    but for its start.
    """
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    entrypoint = yaml.safe_load(text)["spec"]["entrypoint"]
    assert shlex.split(entrypoint)[:4] == ["python", "-m", "trainkit", "fit"]
    done = command(f"{entrypoint} --cfg job")
    assert done.code == 0 and yaml.safe_load(done.out)["launcher"]["num_workers"] == [
        2,
        8,
    ], done.text


def test_the_page_serves_a_run_and_an_export(cluster: Any, tmp_path: Path) -> None:
    """The client of the page is answered for a JPEG and for a sample, on Ray and in one process."""
    fit = (
        "python -m trainkit fit conf=resnet18 trainer.max_steps=2 trainer.limit_val_batches=1"
        " run_dir=runs/resnet50/mine"
    )
    assert run_command(fit, tmp_path).code == 0
    Image.new("RGB", (40, 30), "red").save(tmp_path / "cat.jpg")
    for line in SERVED:
        _serve_and_ask(line, tmp_path)
        export = next((tmp_path / "runs/resnet50/mine/export").glob("*.pt2"))
        for path, name in (
            (export, "model.pt2"),
            (export.with_suffix(".predict.json"), "model.predict.json"),
        ):
            shutil.copy(path, tmp_path / name)


def _serve_and_ask(line: str, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(line.replace(" port=8000", "")) + [f"port={port}"]
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        end = time.monotonic() + 150
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.3)
        client = code()["client"].replace(":8000", f":{port}")
        (folder / "client.py").write_text(
            f"import torch\nsample = torch.zeros(3, 32, 32)\n{client}"
        )
        done = run_command("python client.py", folder, 60)
        assert done.code == 0 and done.out.count("{'predictions': [{'output': [") == 2, done.text
        assert done.out.count("'class': ") == 2, done.text
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
