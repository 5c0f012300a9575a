"""AllreduceCosts: measures the cost of a reduction over ranks by its size;
for `trainkit scaling`.
"""

from __future__ import annotations

import json
import time

import torch

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveInt, checked
from trainkit.extensions.timeline.traces.horovod_file import read_operations
from trainkit.extensions.timeline.traces.pieces import read_events

FILE = "sum-costs.json"  # in the run's folder: [[bytes, seconds], ...]
_KIB = (1, 16, 256, 1024, 4096, 16384, 65536)


@checked
class AllreduceCosts(Callback):
    """Reduces tensors of several sizes after training; rank 0 writes the time of each.

    On Horovod the time is that of the collective itself, without its thread's cycle; otherwise that
    of the call.

    Args:
        repeats: reductions per size.
    """

    config_key = "callbacks.sum_costs"

    def __init__(self, repeats: PositiveInt = 7) -> None:
        self.repeats = repeats

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Measure."""
        engine = trainer.engine
        if engine.ranks.world_size == 1:
            return
        path = trainer.run_dir / f"sum-costs-{engine.ranks.rank}.json"
        engine.heartbeat.start_timeline(path)
        costs: list[tuple[int, float]] = []
        for kib in _KIB:
            tensor = torch.ones(kib * 256, device=engine.device)
            for i in range(self.repeats + 1):
                engine.comm.barrier()
                began = time.perf_counter()
                engine.comm.all_reduce(tensor)
                if engine.device.type == "cuda":
                    torch.cuda.synchronize()
                if i:  # the first is negotiated; the others use Horovod's response cache
                    costs.append((kib * 1024, time.perf_counter() - began))
        engine.heartbeat.stop_timeline()
        if engine.ranks.is_main:
            if path.is_file():
                operations = [
                    o
                    for o in read_operations(read_events(path))
                    if o.kind == "ALLREDUCE" and o.wire_s > 0
                ]
                costs = [(o.num_bytes, o.wire_s) for o in operations] or costs
            (trainer.run_dir / FILE).write_text(json.dumps(costs))
