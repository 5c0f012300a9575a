"""A poisoned sample of one rank of two:
only that rank saves its step, and one process replays it bit for bit.
"""

from __future__ import annotations

import json

import pytest

from tests.extensions.capsule.test_command import CONF, TASK
from tests.helpers.launching import Command

pytestmark = pytest.mark.parallel

DATA = "import torch; x = torch.randn(32, 3); x[13, 1] = float('nan'); torch.save(x, 'data.pt')"


@pytest.mark.parametrize("stop", [False, True], ids=["continues", "stops"])
@pytest.mark.parametrize(
    "launcher",
    ["horovodrun --gloo -np 2 python -m trainkit", "torchrun --nproc-per-node 2 -m trainkit"],
    ids=["horovod", "ddp"],
)
def test_the_step_of_one_rank_is_repeated(launcher: str, stop: bool, command: Command) -> None:
    """Two microbatches a rank: the sound one's loss, with its dropout, is equal bit for bit;
    the sample is named.
    """
    writes = (
        f'mkdir conf; cat > poison.py <<"E"\n{TASK}\nE\ncat > conf/poison.yaml'
        f' <<"E"\n{CONF}\nE\npython -c "{DATA}"\n'
    )
    settings = [
        "trainer.accumulate_grad_batches=2",
        f"trainer.stop_on_nonfinite={str(stop).lower()}",
    ]
    trained = command(
        f"{writes}{launcher} fit conf=poison callbacks=capsule {' '.join(settings)}; rm data.pt"
    )
    assert "Capsule: step 0 on rank 1 is stored (the loss is nan)" in trained.text, trained.text
    assert trained.text.count("Capsule:") == 1
    assert (
        "The loss of rank 0 is nan at step 1, because weights are not finite" in trained.text
    ) is not stop
    done = command(
        "ls runs/one/capsules; cat runs/one/capsules/*/manifest.json; python -m trainkit replay"
        " runs/one/capsules/*"
    )
    name, _, rest = done.out.partition("\n")
    assert name == "step=0-rank=1", done.text
    about, end = json.JSONDecoder().raw_decode(rest)
    assert (about["rank"], about["world_size"], about["num_samples"]) == (1, 2, 16)
    assert [own["samples"] for own in about["microbatches"]] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    shown = rest[end:]
    assert shown.count("equal bit for bit") == 2 and "DIFFERENT" not in shown, done.text
    assert (
        f"recorded {about['microbatches'][0]['loss']:.9g}, now"
        f" {about['microbatches'][0]['loss']:.9g}" in shown
    )
    assert "sample 13 of the data set" in shown
    assert "gradients are this rank's share of the sum over 2 ranks" in shown
