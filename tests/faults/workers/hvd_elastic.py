"""A script with Horovod's own elastic API: 20 data-parallel steps; rank 1 dies at step 10, once in
the folder given.

Each process that reaches the end prints its number of ranks, the steps, and whether the weights of
all ranks are equal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

STEPS = 20
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
killed = Path(sys.argv[1]) / "killed"


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train to the last step, from the state's step."""
    while state.step < STEPS:
        if state.step == 10 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step % 5 == 0:
            state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
weights = hvd.allgather(model.weight.detach())
print(
    f"ranks {hvd.size()}, steps {state.step}, equal {bool((weights == weights[0]).all())}",
    flush=True,
)
