"""Runs a few steps under every engine option in one start of a launcher, and saves the gradients
that came out.

    horovodrun -np 2 python options.py OUT
    torchrun --nproc-per-node 2 options.py OUT

Each scenario makes an engine of its own, and plays the loop's part by hand: each rank takes its
rows of a global batch (the ranks' parts differ in size), weighs its loss by its share, and asks for
the sums. Those of all ranks are gathered and rank 0 saves {scenario: [rank 0's, rank 1's, ...]}.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.workers.option_models import WORDS, Norms, Words, batch, net, pictures
from trainkit.engine.base import Engine
from trainkit.engine.ddp import reduce as ddp_reduce
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError
from trainkit.extensions.sync_batchnorm.layer import synchronise

OUT = sys.argv[1]
HOROVOD = "HOROVOD_RANK" in os.environ
if HOROVOD:
    from trainkit.engine.horovod import reduce as horovod_reduce
# Horovod reads its own settings and its process sets when it starts: the process's first engine has
# them all.
SET = [1] if int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", "1"))) == 2 else [0, 2]
FIRST = (
    {"process_set": SET, "fusion_threshold_mb": 8, "cache_capacity": 64, "cycle_time_ms": 0.5}
    if HOROVOD
    else {}
)


def part(engine: Engine) -> tuple[slice, float]:
    """This rank's rows of a global batch (rank r has r + 1 of them), and its share."""
    first = engine.ranks.rank * (engine.ranks.rank + 1) // 2
    total = engine.ranks.world_size * (engine.ranks.world_size + 1) // 2
    return slice(first, first + engine.ranks.rank + 1), (engine.ranks.rank + 1) / total


def backward(engine: Engine, model: nn.Module, scale: float = 1.0) -> list[Tensor | None]:
    """One step's gradients, times `scale`."""
    rows, share = part(engine)
    engine.backward(model(batch()[rows]).square().mean() * share * scale)
    engine.reduce_gradients()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@contextlib.contextmanager
def wires() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Record dtype and bytes of each tensor that is passed to the framework's sum."""
    seen: list[tuple[torch.dtype, int]] = []
    if HOROVOD:
        home = horovod_reduce.hvd
        names = ("allreduce_async_", "grouped_allreduce_async_", "allgather_async")
    else:
        home, names = ddp_reduce.dist, ("all_reduce", "all_gather")
    real = {name: getattr(home, name) for name in names}

    def noting(function: Any) -> Any:
        def call(given: Any, *args: Any, **options: Any) -> Any:
            tensors = given if isinstance(given, list) else [given]
            if not isinstance(given, list) or HOROVOD:
                seen.append((tensors[0].dtype, sum(t.numel() * t.element_size() for t in tensors)))
            else:  # all_gather(outputs, input)
                seen.append((args[0].dtype, args[0].numel() * args[0].element_size()))
            return function(given, *args, **options)

        return call

    for name, function in real.items():
        setattr(home, name, noting(function))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(home, name, function)


def gradients(scale: float = 1.0, **options: Any) -> dict[str, Any]:
    """Gradients under options, and the tensors sent."""
    engine = make_engine("auto", **options)
    model = net()
    with engine, wires() as seen:
        engine.prepare(model, [])
        return {"grads": backward(engine, model, scale), "wires": seen}


def first() -> dict[str, Any]:
    """A process set, and Horovod's own settings: the ranks of the set train, the others wait."""
    engine = make_engine("auto", **FIRST or {"process_set": SET})
    results: dict[str, Any] = {}
    with engine:
        results["environment"] = {
            name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")
        }
        results["takes_part"] = engine.ranks.takes_part
        if engine.ranks.takes_part:
            model = net()
            with torch.no_grad():
                # only the set's first rank holds the weights that count
                model[0].weight += engine.ranks.rank
            engine.prepare(model, [])
            results |= {
                "rank": engine.ranks.rank,
                "world_size": engine.ranks.world_size,
                "local": (engine.ranks.local_rank, engine.ranks.local_size),
            }
            results["grads"] = backward(engine, model)
            results["sum"] = engine.comm.all_reduce(torch.tensor(10.0 + engine.ranks.rank)).item()
            results["objects"] = (
                engine.comm.all_gather_object(f"of {engine.ranks.rank}"),
                engine.comm.broadcast_object(engine.ranks.rank),
            )
            norm = synchronise(nn.BatchNorm1d(1, momentum=1.0), engine.comm)
            norm(torch.full((2, 1), 10.0 + engine.ranks.rank))
            results["mean"] = norm.running_mean.item()
            results["on_main"] = engine.comm.run_on_main(os.getpid)
            engine.comm.barrier()
            results["pid"] = os.getpid()
            Path(f"{OUT}.{engine.ranks.rank}").touch()
    results["waited"] = len(list(Path(OUT).parent.glob(f"{Path(OUT).name}.*")))
    return results


def set_again() -> dict[str, Any]:
    """The same process set serves another engine of the process;
    Horovod refuses another set and other settings.
    """
    results: dict[str, Any] = {}
    engine = make_engine("auto", process_set=SET)
    with engine:
        if engine.ranks.takes_part:
            model = net()
            engine.prepare(model, [])
            results["grads"] = backward(engine, model)
    if HOROVOD:
        for option in ({"process_set": [0]}, {"fusion_threshold_mb": 9}, {"autotune": True}):
            try:
                make_engine("auto", **option).__enter__()
            except TrainkitError as error:
                results[next(iter(option))] = f"{type(error).__name__}: {error}"
    return results


def everyone() -> dict[str, Any]:
    """A process set of all ranks is none."""
    size = int(os.environ.get("HOROVOD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return gradients(process_set=list(range(size)))


def plain() -> dict[str, Any]:
    """No option."""
    return gradients()


def half() -> dict[str, Any]:
    """float16 on the wire."""
    return gradients(compression="fp16")


def brain() -> dict[str, Any]:
    """bfloat16 on the wire."""
    return gradients(compression="bf16") if not HOROVOD else {}


def half_grouped() -> dict[str, Any]:
    """float16 in groups, or in small buckets."""
    return gradients(
        compression="fp16", **({"num_groups": 2} if HOROVOD else {"bucket_cap_mb": 1e-4})
    )


def half_of_brain() -> dict[str, Any]:
    """Gradients in bfloat16 take two bytes already:
    Horovod sends float32 for them, or float16 if asked to.
    """
    engine = make_engine("auto", compression="fp16")
    model = net().to(torch.bfloat16)
    with engine, wires() as seen:
        engine.prepare(model, [])
        rows, share = part(engine)
        engine.backward(model(batch()[rows].bfloat16()).square().mean() * share)
        engine.reduce_gradients()
        return {"grads": [p.grad for p in model.parameters()], "wires": seen}


def total() -> dict[str, Any]:
    """The sum of the ranks' gradients."""
    return gradients(op="sum")


def predivided() -> dict[str, Any]:
    """Divided before the sum and multiplied after it, in float64."""
    return gradients(gradient_predivide_factor=7.0)


def total_predivided() -> dict[str, Any]:
    """Both."""
    return gradients(op="sum", gradient_predivide_factor=7.0)


def tiny_half() -> dict[str, Any]:
    """Gradients below float16's smallest number, with and without a factor below 1."""
    plain, lifted = (
        gradients(1e-10, compression="fp16", gradient_predivide_factor=f) for f in (1.0, 2.0**-30)
    )
    return {"plain": plain["grads"], "scaled": lifted["grads"]}


def huge_half() -> dict[str, Any]:
    """Gradients above float16's largest number, with and without a factor above 1."""
    plain, lowered = (
        gradients(1e7, compression="fp16", gradient_predivide_factor=f) for f in (1.0, 2.0**20)
    )
    return {"plain": plain["grads"], "scaled": lowered["grads"]}


def grouped() -> dict[str, Any]:
    """Two groups by number."""
    return gradients(num_groups=2) if HOROVOD else {}


def named_groups() -> dict[str, Any]:
    """One group by the names of a module and of a parameter; the rest is sent one by one."""
    if not HOROVOD:
        return {}
    return gradients(groups=[["2", "0.bias"]])


def small_buckets() -> dict[str, Any]:
    """A bucket for each parameter."""
    return gradients(bucket_cap_mb=1e-6) if not HOROVOD else {}


def words(sparse_optimizer: bool = False, **options: Any) -> dict[str, Any]:
    """Two steps: `bags` is used on the last rank only;
    in the second, rank 0 has no sample, the others accumulate two.
    """
    engine = make_engine("auto", **options)
    model = Words()
    tables = [model.table.weight, model.bags.weight, model.unused.weight]
    dense = [model.head.weight, model.head.bias]
    kind = torch.optim.SparseAdam if sparse_optimizer else torch.optim.SGD
    optimizers = [kind([*tables, model.raw], lr=0.1), torch.optim.SGD(dense, lr=0.1)]
    with engine, wires() as seen:
        engine.prepare(model, optimizers)
        rows, share = part(engine)
        last = engine.ranks.rank == engine.ranks.world_size - 1
        engine.backward(model(WORDS[rows], bags=last) * share)
        engine.reduce_gradients()
        grads = [
            None if p.grad is None else (p.grad.is_sparse, p.grad.to_dense())
            for p in model.parameters()
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if engine.ranks.rank > 0:
            with engine.no_sync():
                engine.backward(model(WORDS[:2], bags=False) * 0.5 / (engine.ranks.world_size - 1))
            engine.backward(model(WORDS[2:4], bags=False) * 0.5 / (engine.ranks.world_size - 1))
        engine.reduce_gradients()
        for optimizer in optimizers:
            optimizer.step()
        return {"grads": grads, "weights": [p.detach() for p in model.parameters()], "wires": seen}


def sparse() -> dict[str, Any]:
    """Rows travel."""
    return words()


def sparse_adam() -> dict[str, Any]:
    """SparseAdam gets sparse gradients, of the parameter without a module too."""
    return words(sparse_optimizer=True)


def densified() -> dict[str, Any]:
    """Dense gradients of sparse embeddings."""
    return words(sparse_as_dense=True)


def sparse_half() -> dict[str, Any]:
    """Values of rows in float16, the sum of the ranks."""
    return words(compression="fp16", gradient_predivide_factor=0.25)


def sparse_total() -> dict[str, Any]:
    """The sum of the ranks, by rows."""
    return words(op="sum", gradient_predivide_factor=4.0)


def sparse_brain() -> dict[str, Any]:
    """Rows of an embedding in bfloat16."""
    engine = make_engine("auto")
    table = nn.Embedding(12, 4, sparse=True).to(torch.bfloat16)
    with engine, wires() as seen:
        engine.prepare(table, [])
        rows, _ = part(engine)
        engine.backward(table(WORDS[rows]).sum())
        engine.reduce_gradients()
        assert table.weight.grad is not None
        return {
            "grad": table.weight.grad.to_dense(),
            "sparse": table.weight.grad.is_sparse,
            "wires": seen,
        }


def norms() -> dict[str, Any]:
    """Two microbatches of the ranks' parts, with and without momentum;
    on ddp a bucket a parameter.
    """
    results: dict[str, Any] = {}
    for momentum in (0.1, None):
        engine = make_engine("auto", **({} if HOROVOD else {"bucket_cap_mb": 1e-6}))
        with engine:
            model = Norms(momentum)
            keys = list(model.state_dict())
            same = synchronise(model, engine.comm) is model and list(model.state_dict()) == keys
            engine.prepare(model, [])
            rows, share = part(engine)
            branch = torch.full((engine.ranks.rank + 1,), engine.ranks.rank == 0)
            outputs = []
            for i in range(2):
                inputs = (pictures()[rows] + i).requires_grad_()
                output = model(inputs, branch)
                with engine.no_sync() if i == 0 else contextlib.nullcontext():
                    engine.backward(output.square().mean() * share / 2)
                outputs += [output.detach(), inputs.grad]
            engine.reduce_gradients()
            model.eval()
            # Rank 0 alone: there is no other rank to sum with.
            alone = (
                model.second(model.first(model.conv(pictures()))[..., 0, 0]).detach()
                if engine.ranks.is_main
                else None
            )
            results[str(momentum)] = {
                "same": same,
                "outputs": outputs,
                "grads": [p.grad for p in model.parameters()],
                "buffers": dict(model.named_buffers()),
                "alone": alone,
            }
    return results


def half_norms() -> dict[str, Any]:
    """A layer in float32 that gets float16 and bfloat16, as under autocast."""
    engine = make_engine("auto")
    with engine:
        rows, _ = part(engine)
        results = {}
        for dtype in (torch.float16, torch.bfloat16):
            layer = nn.BatchNorm2d(2)
            synchronise(layer, engine.comm)
            inputs = (
                torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(17))
                .to(dtype)[rows]
                .requires_grad_()
            )
            output = layer(inputs)
            output.float().sin().sum().backward()
            results[str(dtype)] = [output.detach(), inputs.grad]
        return results


def adasum() -> dict[str, Any]:
    """The engine's answer about Adasum."""
    try:
        make_engine("auto", op="adasum").__enter__()
    except TrainkitError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


SCENARIOS = [
    first,
    set_again,
    everyone,
    plain,
    half,
    brain,
    half_grouped,
    half_of_brain,
    total,
    predivided,
]
SCENARIOS += [
    total_predivided,
    tiny_half,
    huge_half,
    grouped,
    named_groups,
    small_buckets,
    sparse,
    sparse_adam,
    densified,
]
SCENARIOS += [sparse_half, sparse_total, sparse_brain, norms, half_norms, adasum]

if __name__ == "__main__":
    results = {scenario.__name__: scenario() for scenario in SCENARIOS}
    engine = make_engine("auto")
    with engine:
        gathered = engine.comm.all_gather_object(results)
        if engine.ranks.is_main:
            torch.save({name: [rank[name] for rank in gathered] for name in results}, OUT)
        engine.comm.barrier()
