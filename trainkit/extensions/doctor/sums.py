"""A real allreduce of two ranks: whether its result is right, and its speed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.extension import Finding
from trainkit.extensions.programs.commands import first_error
from trainkit.extensions.programs.local import Launcher, run_job, start_with
from trainkit.launch.environment import without_launcher

AREA = "two ranks"
_MARK = "trainkit doctor: "
_PATIENCE_S = 120
# Each rank contributes its number + 1: only a sum over both is 3.
_SCRIPT = """
import json, os, sys, time
import torch
mib, stock = 32, sys.argv[1] == "horovodrun"
if stock:
    import horovod.torch as hvd
    hvd.init()
    rank, local = hvd.rank(), hvd.local_rank()
    on_gpu = hvd.nccl_built() and torch.cuda.device_count() >= 2
    add = lambda t: hvd.allreduce_(t, op=hvd.Sum, name=f"doctor.{t.numel()}")
else:
    import torch.distributed as dist
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, add = dist.get_rank(), dist.all_reduce
device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
def timed(numel, times):
    tensor, best = torch.empty(numel, device=device), float("inf")
    for _ in range(times):
        tensor.fill_(rank + 1.0)
        if on_gpu: torch.cuda.synchronize()
        began = time.perf_counter()
        add(tensor)
        if on_gpu: torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
        assert bool((tensor == 3).all()), tensor[:4]
    return best
answer = {"device": str(device.type), "latency_s": timed(1, 20), "seconds": timed(mib * 2**18, 8), "bytes": mib * 2**20}
if rank == 0: print("trainkit doctor: " + json.dumps(answer), flush=True)
if not stock: dist.destroy_process_group()
"""


def look(launcher: Launcher, remedy: str) -> Iterator[Finding]:
    """Start two ranks and check their allreduce; `remedy` is printed if they fail."""
    with tempfile.TemporaryDirectory(prefix="trainkit-doctor-") as folder:
        script = Path(folder) / "sums.py"
        log = Path(folder) / "output.log"
        script.write_text(_SCRIPT)
        env = without_launcher(os.environ)
        code = run_job(
            ["timeout", str(_PATIENCE_S), *start_with(launcher, 2), str(script), launcher], log, env
        )
        lines = log.read_text(errors="replace").splitlines()
    answers = [line.partition(_MARK)[2] for line in lines if _MARK in line]
    name = f"allreduce under {launcher}"
    if code != 0 or not answers:
        said = " ".join(first_error(lines) or lines[-2:]) or f"no answer within {_PATIENCE_S} s"
        yield Finding(
            AREA,
            name,
            "failed",
            "wrong",
            f"The allreduce of two ranks on this host failed: {said.strip()[:300]}",
            remedy,
        )
        return
    answer = json.loads(answers[-1])
    speed = answer["bytes"] / answer["seconds"] / 1e9
    text = (
        f"right, on {answer['device']}: {speed:.2f} GB/s at 32 MiB,"
        f" {1000 * answer['latency_s']:.2f} ms for one number"
    )
    yield Finding(AREA, name, text)
