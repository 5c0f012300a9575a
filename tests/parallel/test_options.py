"""Engine options under real launchers, each held against a few plain lines of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.helpers.launching import Command
from tests.parallel.starts import Starts, line_of
from tests.parallel.workers import option_models as models

HOROVOD, DDP = ["horovod 2", "horovod 3"], ["ddp 2", "ddp 3"]
STARTS = HOROVOD + DDP
ELEMENTS = 6 * 8 + 8 + 8 * 3 + 3  # of the worker's net
HALF, BRAIN = 2e-3, 1.6e-2  # of the largest element: roundings of a few ranks to 11 and to 8 bits

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """See Starts."""
    return Starts(
        lambda start: line_of(start.split()[0], size_of(start), "options.py") + " {out}",
        tmp_path_factory,
    )


def size_of(start: str) -> int:
    """The number of ranks."""
    return int(start.split()[1])


def by_hand(ranks: int) -> list[Tensor]:
    """The gradients of the mean over the rows of all ranks."""
    net = models.net()
    net(models.batch()[: ranks * (ranks + 1) // 2]).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def assert_gradients(
    gradients: list[Any], expected: list[Tensor], part: float | None = None
) -> None:
    """Gradients are the expected ones:
    to 1e-9, or to a part of the largest element, and then not to all digits.
    """
    largest = max(float(e.abs().max()) for e in expected)
    worst = max(
        float((f.double() - e).abs().max()) for f, e in zip(gradients, expected, strict=True)
    )
    assert all(f.dtype == e.dtype for f, e in zip(gradients, expected, strict=True))
    if part is None:
        assert worst <= 1e-9
    else:
        assert 0 < worst <= part * largest


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("scenario", "factor"),
    [
        ("plain", False),
        ("predivided", False),
        ("everyone", False),
        ("total", True),
        ("total_predivided", True),
    ],
)
def test_sums_are_exact(start: str, scenario: str, factor: bool, results: Any) -> None:
    """The mean over the step's samples, or (op=sum) that times the number of ranks,
    divided before and after or not.
    """
    expected = [grad * (size_of(start) if factor else 1) for grad in by_hand(size_of(start))]
    for rank in results[start][scenario]:
        assert_gradients(rank["grads"], expected)


@pytest.mark.parametrize(
    ("start", "scenario", "sums"),
    [(start, "grouped", 2) for start in HOROVOD]
    + [(start, "named_groups", 2) for start in HOROVOD]
    + [(start, "plain", 4) for start in HOROVOD]
    + [(start, "plain", 1) for start in DDP]
    + [(start, "small_buckets", 4) for start in DDP],
)
def test_groups_are_exact_and_as_many_as_asked_for(
    start: str, scenario: str, sums: int, results: Any
) -> None:
    """Four parameters take the expected number of collectives, the last with the flags;
    the gradients are the same.
    """
    for rank in results[start][scenario]:
        assert_gradients(rank["grads"], by_hand(size_of(start)))
        assert len(rank["wires"]) == sums


@pytest.mark.parametrize(
    ("start", "scenario", "dtype", "part"),
    [
        (start, scenario, torch.float16, HALF)
        for start in STARTS
        for scenario in ("half", "half_grouped")
    ]
    + [(start, "brain", torch.bfloat16, BRAIN) for start in DDP],
)
def test_compressed_gradients_take_two_bytes(
    start: str, scenario: str, dtype: Any, part: float, results: Any
) -> None:
    """All that the framework gets to sum is of the small dtype, two bytes an element;
    results are float64 again.
    """
    for rank in results[start][scenario]:
        assert {kind for kind, _ in rank["wires"]} == {dtype}
        # and a flag for each parameter
        assert sum(size for _, size in rank["wires"]) == 2 * (ELEMENTS + 4)
        assert_gradients(rank["grads"], by_hand(size_of(start)), part)


@pytest.mark.parametrize("start", STARTS)
def test_gradients_of_two_bytes_are_not_narrowed_again(start: str, results: Any) -> None:
    """bfloat16 stays bfloat16 on ddp;
    on Horovod, which cannot sum it, fp16 halves the float32 that would travel.
    """
    for rank in results[start]["half_of_brain"]:
        assert {kind for kind, _ in rank["wires"]} == {
            torch.bfloat16 if start in DDP else torch.float16
        }
        assert sum(size for _, size in rank["wires"]) == 2 * (ELEMENTS + 4)
        gradients = [grad.double() for grad in rank["grads"]]
        assert {grad.dtype for grad in rank["grads"]} == {torch.bfloat16}
        # the forward is of bfloat16 too
        assert_gradients(gradients, by_hand(size_of(start)), 3 * BRAIN)


@pytest.mark.parametrize("start", STARTS)
def test_a_predivide_factor_saves_what_float16_cannot_hold(start: str, results: Any) -> None:
    """Gradients of 1e-11 vanish and those of 1e6 become infinite,
    unless a factor takes them into float16's range.
    """
    for name, scale in (("tiny_half", 1e-10), ("huge_half", 1e7)):
        expected = [grad * scale for grad in by_hand(size_of(start))]
        for rank in results[start][name]:
            lost = torch.cat([grad.reshape(-1) for grad in rank["plain"]])
            assert not lost.any() if scale < 1 else lost.isinf().any()
            assert_gradients(rank["scaled"], expected, HALF)


def words_by_hand(
    ranks: int, kind: type[torch.optim.Optimizer], factor: float = 1.0
) -> tuple[list[Any], list[Tensor]]:
    """The worker's two steps on words: the first step's gradients, and the weights after both."""
    model, rows = models.Words(), models.WORDS
    tables = [model.table.weight, model.bags.weight, model.unused.weight, model.raw]
    optimizers = [kind(tables, lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]  # type: ignore[call-arg]
    total = ranks * (ranks + 1) // 2
    for rank in range(ranks):
        first = rank * (rank + 1) // 2
        loss = model(rows[first : first + rank + 1], bags=rank == ranks - 1)
        (loss * (rank + 1) / total * factor).backward()
    grads = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    ((model(rows[:2], bags=False) + model(rows[2:4], bags=False)) * 0.5 * factor).backward()
    for optimizer in optimizers:
        optimizer.step()
    return grads, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("scenario", "kind", "sparse"),
    [
        ("sparse", torch.optim.SGD, [False, True, True, None, False, False]),
        ("sparse_total", torch.optim.SGD, [False, True, True, None, False, False]),
        ("sparse_adam", torch.optim.SparseAdam, [True, True, True, None, False, False]),
        ("densified", torch.optim.SGD, [False, False, False, None, False, False]),
    ],
)
def test_sparse_gradients_are_exact(
    start: str, scenario: str, kind: Any, sparse: list[Any], results: Any
) -> None:
    """Embeddings used by some ranks or by none, ranks without a sample, accumulation: all as in one
    process.

    Sparse according to `sparse`: raw, table, bags, unused (None: not used), head's weight and bias.
    """
    factor = size_of(start) if scenario == "sparse_total" else 1.0
    grads, weights = words_by_hand(size_of(start), kind, factor)
    for rank in results[start][scenario]:
        assert [None if grad is None else grad[0] for grad in rank["grads"]] == sparse
        for own, expected in zip(rank["grads"], grads, strict=True):
            if expected is not None:
                torch.testing.assert_close(own[1], expected, rtol=0, atol=1e-9)
        for own, expected in zip(rank["weights"], weights, strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", STARTS)
def test_values_of_rows_are_compressed_too(start: str, results: Any) -> None:
    """Sparse gradients are sent as whole numbers (the rows) and float16 (their values)."""
    grads, _ = words_by_hand(size_of(start), torch.optim.SGD)
    for rank in results[start]["sparse_half"]:
        kinds = {kind for kind, _ in rank["wires"]}
        assert kinds == {torch.int64, torch.float16}  # the flags travel with the head's
        values = [grad[1] for grad in rank["grads"] if grad is not None]
        assert_gradients(values, [grad for grad in grads if grad is not None], HALF)


@pytest.mark.parametrize("start", STARTS)
def test_rows_of_bfloat16_travel(start: str, results: Any) -> None:
    """They keep to two bytes: Horovod cannot sum bfloat16, but it carries its bits."""
    ranks = size_of(start)
    counts = torch.bincount(models.WORDS[: ranks * (ranks + 1) // 2].reshape(-1), minlength=12)
    for rank in results[start]["sparse_brain"]:
        assert rank["sparse"]
        assert {kind for kind, _ in rank["wires"]} == {
            torch.int64,
            torch.int16 if start in HOROVOD else torch.bfloat16,
        } | {
            torch.float32  # the flags
        }
        assert torch.equal(rank["grad"], counts.bfloat16().unsqueeze(1).expand(12, 4))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batchnorm_over_ranks_is_that_of_the_whole_batch(
    start: str, momentum: float | None, results: Any
) -> None:
    """Outputs, gradients of inputs and weights, and statistics are those of plain BatchNorm over
    all ranks' rows.

    The ranks' parts differ in size, the mean is far from 0, and a branch is used on rank 0 alone.
    """
    ranks = size_of(start)
    total = ranks * (ranks + 1) // 2
    plain = models.Norms(momentum)
    outputs = []
    for i in range(2):
        inputs = (models.pictures()[:total] + i).requires_grad_()
        output = plain(inputs, torch.arange(total) < 1)
        (output.square().mean() / 2).backward()
        outputs += [output.detach(), inputs.grad]
    plain.eval()
    alone = plain.second(plain.first(plain.conv(models.pictures()))[..., 0, 0]).detach()
    for number, rank in enumerate(results[start]["norms"]):
        held = rank[str(momentum)]
        first = number * (number + 1) // 2
        assert held["same"]
        for own, expected in zip(held["outputs"], outputs, strict=True):
            torch.testing.assert_close(own, expected[first : first + number + 1], rtol=0, atol=1e-9)
        for own, parameter in zip(held["grads"], plain.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=0, atol=1e-9)
        assert held["buffers"].keys() == dict(plain.named_buffers()).keys()
        for name, expected in plain.named_buffers():
            torch.testing.assert_close(held["buffers"][name], expected, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(
        results[start]["norms"][0][str(momentum)]["alone"], alone, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batchnorm_over_ranks_keeps_the_dtype_of_its_input(
    start: str, dtype: torch.dtype, results: Any
) -> None:
    """Under autocast inputs are of 16 bits:
    statistics are of 32, the output and the input's gradient of 16 again.
    """
    ranks = size_of(start)
    total = ranks * (ranks + 1) // 2
    drawn = (
        torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(17))
        .to(dtype)[:total]
        .float()
        .requires_grad_()
    )
    output = functional.batch_norm(drawn, None, None, training=True)
    output.sin().sum().backward()
    for number, rank in enumerate(results[start]["half_norms"]):
        first = number * (number + 1) // 2
        for own, expected in zip(rank[str(dtype)], (output.detach(), drawn.grad), strict=True):
            assert own.dtype == dtype
            torch.testing.assert_close(
                own.float(), expected[first : first + number + 1], rtol=BRAIN, atol=BRAIN
            )


@pytest.mark.parametrize("start", STARTS)
def test_a_process_set_trains_and_the_others_wait(start: str, results: Any) -> None:
    """The set's ranks count from 0, share sums, objects and the weights of their first;
    the others have no part.
    """
    chosen = [1] if size_of(start) == 2 else [0, 2]
    everyone = results[start]["first"]
    assert [number for number, rank in enumerate(everyone) if rank["takes_part"]] == chosen
    # until each of the set had done its work
    assert all(rank["waited"] == len(chosen) for rank in everyone)
    expected = by_hand(len(chosen))
    for place, number in enumerate(chosen):
        rank = everyone[number]
        assert (rank["rank"], rank["world_size"], rank["local"]) == (
            place,
            len(chosen),
            (place, len(chosen)),
        )
        assert rank["sum"] == sum(10.0 + i for i in range(len(chosen)))
        assert rank["mean"] == rank["sum"] / len(chosen)  # of a synchronised batch norm
        assert rank["objects"] == ([f"of {i}" for i in range(len(chosen))], 0)
        assert rank["on_main"] == everyone[chosen[0]]["pid"]
        assert_gradients(rank["grads"], expected)
        assert_gradients(results[start]["set_again"][number]["grads"], expected)


@pytest.mark.parametrize("start", HOROVOD)
def test_horovods_settings_are_there_before_it_starts_and_stay(start: str, results: Any) -> None:
    """They are set in the environment,
    and a later engine of the process that wants others is refused.
    """
    for first, again in zip(results[start]["first"], results[start]["set_again"], strict=True):
        assert first["environment"]["HOROVOD_FUSION_THRESHOLD"] == str(8 * 2**20)
        assert first["environment"]["HOROVOD_CACHE_CAPACITY"] == "64"
        assert first["environment"]["HOROVOD_CYCLE_TIME"] == "0.5"
        assert again["process_set"].startswith(
            "EngineError: engine.process_set is [0], but Horovod runs"
        )
        assert again["fusion_threshold_mb"].startswith(
            "EngineError: engine.fusion_threshold_mb is 9, but Horovod runs"
        )
        assert "HOROVOD_FUSION_THRESHOLD=8388608) and reads" in again["fusion_threshold_mb"]
        assert "HOROVOD_AUTOTUNE=not set" in again["autotune"]


@pytest.mark.parametrize("start", STARTS)
def test_adasum_without_mpi_says_how_to_get_it(start: str, results: Any) -> None:
    """Horovod on Gloo, and ddp, refuse it at the start."""
    words = (
        "Build it with MPI: `python -m trainkit horovod install --mpi`"
        if start in HOROVOD
        else "which is Horovod's"
    )
    for rank in results[start]["adasum"]:
        assert "engine.op is 'adasum'" in rank["error"]
        assert words in rank["error"]


def test_options_reach_horovod_from_the_command_line(command: Command) -> None:
    """Autotuning writes its log; options overridden by the environment are reported once."""
    options = (
        "engine.autotune=true engine.autotune_log_file=tuned.csv engine.cycle_time_ms=3"
        " engine.compression=fp16"
    )
    line = (
        "horovodrun -np 2 python -m trainkit fit conf=mlp trainer.max_epochs=1 run_dir=here"
        f" {options} && head -1 tuned.csv"
    )
    done = command(line, timeout_s=300, HOROVOD_CYCLE_TIME="2")
    assert done.code == 0, done.text
    assert (
        done.text.count(
            "engine.cycle_time_ms is 3, but HOROVOD_CYCLE_TIME=2 is set in the environment, and"
            " wins."
        )
        == 1
    )
    assert "score" in done.out
