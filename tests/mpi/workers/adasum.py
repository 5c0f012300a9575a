"""One step with Adasum, in equal and in unequal shares: mpirun -np 2 python adasum.py OUT"""

from __future__ import annotations

import sys

import torch

from tests.parallel.workers.option_models import batch, net
from trainkit.engine.select import make_engine

engine = make_engine("auto", op="adasum")
found = {}
with engine:
    for name, rows in {
        "equal": (slice(0, 2), slice(2, 4)),
        "unequal": (slice(0, 1), slice(1, 4)),
    }.items():
        model = net()
        engine.prepare(model, [])
        part = batch()[rows[engine.ranks.rank]]
        engine.backward(model(part).square().mean() * len(part) / 4)
        engine.reduce_gradients()
        found[name] = [p.grad for p in model.parameters()]
    gathered = engine.comm.all_gather_object(found)
    if engine.ranks.is_main:
        torch.save(gathered, sys.argv[1])
    engine.comm.barrier()
