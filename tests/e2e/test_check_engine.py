"""`python -m trainkit check-engine` accuses none of the recipes, on any engine, and names a bug in a
user's own script.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command, command

__all__ = ["command"]

pytestmark = pytest.mark.parallel

SMALL = "data.context=32 task.model.width=32 task.model.depth=2 task.model.heads=2"
RECIPES = {
    "mlp": "",
    "resnet18": "data.batch_size=8",
    "gpt": SMALL,
    "bert": f"data.batch_size=2 trainer.global_batch_size=8 {SMALL}",
    "llama": (
        "data.context=32 data.batch_size=4"
        " task.config={num_hidden_layers:2,hidden_size:32,intermediate_size:64}"
    ),
    "sft": "data.max_length=64 task.save_pretrained=false",
    "dpo": "data.batch_size=2 task.save_pretrained=false",
}
ENGINES = {
    "ddp": "engine=ddp",
    "horovod": "engine=horovod",
    "fsdp": "engine=fsdp",
    "tensor": "engine=fsdp engine.tensor=2",
    "pipeline": "engine=fsdp engine.pipeline=2",
    "context": "engine=fsdp engine.context=2",
}
# the recipes whose models have a plan of layers to split; and lists of blocks; and take their part
CHOSEN = {
    "tensor": ("gpt", "bert", "llama"),
    "pipeline": ("gpt", "llama", "sft", "resnet18"),
    "context": ("gpt", "llama", "sft"),
}
CASES = [
    pytest.param(recipe, engine, id=f"{recipe}-{engine}")
    for recipe in RECIPES
    for engine in ENGINES
    if recipe in CHOSEN.get(engine, RECIPES)
]
HALF = """
import torch
import trainkit
from torch.utils.data import DataLoader, TensorDataset

class Mine(trainkit.Task):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.model[0].weight.grad /= self.trainer.world_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = TensorDataset(torch.randn(64, 3))
trainkit.Trainer(max_epochs=1).fit(Mine(), DataLoader(data, 4))
"""


@pytest.mark.parametrize(("recipe", "engine"), CASES)
def test_a_recipe_is_equal(recipe: str, engine: str, command: Command) -> None:
    """At two ranks: outputs, gradients and weights of two steps are those of one process."""
    microbatches = "trainer.accumulate_grad_batches=2" if engine == "pipeline" else ""
    line = f"conf={recipe} {ENGINES[engine]} {microbatches} {RECIPES[recipe]} steps=2"
    done = command(f"python -m trainkit check-engine {line}", timeout_s=500)
    assert done.code == 0, done.text
    assert re.search(rf"EQUAL: conf={recipe} with {ENGINES[engine]} on 2 ranks trains", done.out)
    assert "step 2 weights" in done.out
    if engine != "context":  # there an output whose rows are tokens is left out
        assert not re.search("skipped", done.out), done.out


def test_batch_norm_over_ranks_is_that_of_one_batch(command: Command) -> None:
    """One process takes the ranks' samples as one; its running statistics are compared too."""
    line = "conf=resnet18 engine=ddp data.batch_size=8 trainer.sync_batchnorm=true steps=1"
    done = command(f"python -m trainkit check-engine {line}", timeout_s=500)
    assert done.code == 0, done.text
    assert re.search(r"step 1 batch statistics *│ 60 buffers *│.*│ equal", done.out), done.out


def test_a_bug_of_a_script_is_named(command: Command, tmp_path: Path) -> None:
    """With exit code 1, the likely cause, and all of it as JSON; the records are not removed."""
    (tmp_path / "mine.py").write_text(HALF)
    line = "python -m trainkit check-engine engine=ddp steps=1 --json mine.py"
    done = command(line, TMPDIR=str(tmp_path))
    assert done.code == 1, done.text
    facts = json.loads(done.out)
    first = facts["first_difference"]
    assert (first["stage"], first["name"]) == ("step 1 gradients", "model.0.weight")
    assert "0.5 times that of one process on every rank, 1 / the number" in first["causes"][0]
    assert (facts["equal"], facts["engine"], facts["ranks"]) == (False, "engine=ddp", 2)
    (folder,) = tmp_path.glob("trainkit-check-engine-*")
    assert facts["folder"] == str(folder)


def test_a_run_that_fails_is_not_checked(command: Command, tmp_path: Path) -> None:
    """With exit code 2, and the run's first error."""
    (tmp_path / "mine.py").write_text(HALF.replace("self.trainer.world_size", "self.lost"))
    done = command("python -m trainkit check-engine engine=ddp mine.py", TMPDIR=str(tmp_path))
    assert done.code == 2, done.text
    assert "1/4 one process" in done.out
    assert "has no attribute 'lost'" in done.err
