"""replay: runs forward and backward of one step of one rank from its capsule, in this process."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import loop
from trainkit.api.task import Task
from trainkit.checkpoint.stateful import set_random_state
from trainkit.data.feed import Microbatch, Step
from trainkit.device.accelerator import is_accelerator
from trainkit.device.transfer import Mover
from trainkit.errors import ConfigError
from trainkit.extensions.capsule.batches import unpack
from trainkit.extensions.capsule.folder import Capsule, read
from trainkit.extensions.capsule.rebuild import build_task, load_weights, opened, trainer_of
from trainkit.extensions.capsule.watch import ModuleOutput, Watch, bad_inputs
from trainkit.run.batches import backward_batch, forward_batch, leave_batch
from trainkit.run.run import Run


@dataclass(frozen=True)
class Replayed:
    """The results of a replay.

    Attributes:
        about: the capsule's manifest.
        weights: source of the weights.
        steps_older: by how many steps the weights are older than the step; None if unknown.
        recorded: each microbatch's loss in the run; None if the run did not compute it.
        losses: the losses now, of the microbatches that were run.
        bad_inputs: descriptions of non-finite batches.
        bad_weights: parameters and buffers that were not finite before the step.
        first_bad: the first module with a non-finite output.
        outputs: outputs of each module, in the order of first calls.
        bad_gradients: parameters with a non-finite gradient.
        gradients: each parameter's gradient norm, without the loss scale.
        error: the exception of training_step or backward.
        updated: whether the update was made; None if not requested.
        notes: differences from the run.
    """

    about: dict[str, Any]
    weights: str
    steps_older: int | None
    recorded: list[float | None]
    losses: list[float]
    bad_inputs: list[str]
    bad_weights: list[str]
    first_bad: ModuleOutput | None
    outputs: list[ModuleOutput]
    bad_gradients: list[str]
    gradients: dict[str, float]
    error: BaseException | None
    updated: bool | None
    notes: list[str]

    @property
    def is_equal(self) -> bool:
        """Return whether all losses equal the run's, bit for bit."""
        return len(self.losses) == len(self.recorded) and all(
            before is not None and struct.pack("d", before) == struct.pack("d", now)
            for before, now in zip(self.recorded, self.losses, strict=True)
        )


def replay(
    capsule: str | Path,
    task: Task | None = None,
    *,
    update: bool = False,
    pdb: bool = False,
    weights: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: Sequence[str] = (),
) -> Replayed:
    """Run a step again that CrashCapsule has stored; needs no data set, no loader and no network.

    Args:
        capsule: the capsule's folder.
        task: a Task like the run's initial one; None builds it from the config in the capsule.
        update: make the optimizer's update too, with this rank's gradient only.
        pdb: stop in the debugger before training_step ("s" steps into it).
        weights: a checkpoint's folder or a file of weights, instead of the capsule's.
        overrides: changes of the config: {"task": {"dropout": 0.0}, "trainer": {"detect_anomaly":
            True}}.
        trust: modules that the config may name in addition to the allowed ones.

    Raises:
        CheckpointError: the capsule is missing or damaged, or there are no weights for it.
        ConfigError: an override is not legal, or the Task updates its weights itself.
    """
    stored = read(capsule)
    changes = dict(overrides or {})
    if task is not None and changes.keys() - {"trainer"}:
        raise ConfigError(
            f"overrides has {', '.join(changes.keys() - {'trainer'})}, but the task is given."
            " Change it there."
        )
    taken = stored.step["microbatches"]
    batches = [unpack(entry["batch"]) for entry in taken]
    watch = Watch(lambda number: set_random_state(taken[number]["random"]))
    if task is None:
        task = build_task(stored, changes, trust)
    if not task.automatic_optimization:
        raise ConfigError(
            f"{type(task).__name__} has automatic_optimization = False: its training_step updates the"
            " weights, and replay runs a forward and a backward without it. The batch, the weights"
            f" and the random state are in the capsule: trainkit.extensions.capsule.folder.read"
            f"('{capsule}') returns them."
        )
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(stored, changes.get("trainer") or {}, watch, folder)
        with opened(trainer, task, stored) as run:
            source, older = load_weights(run, stored, weights, bool(trust))
            bad_weights = _not_finite(dict([*task.named_parameters(), *task.named_buffers()]))
            error = _take(run, watch, stored, batches, pdb)
            grads = {
                name: _gradient(p, run) for name, p in task.named_parameters() if p.grad is not None
            }
            updated = _update(run, _step(stored)) if update and error is None else None
            samples = [entry.get("samples") for entry in stored.about["microbatches"]]
            return Replayed(
                about=stored.about,
                weights=source,
                steps_older=older,
                recorded=[
                    None if entry["loss"] is None else float(entry["loss"]) for entry in taken
                ],
                losses=[float(loss) for loss in watch.losses],
                bad_inputs=[
                    t
                    for batch, own in zip(batches, samples, strict=True)
                    for t in bad_inputs(batch, own)
                ],
                bad_weights=bad_weights,
                first_bad=watch.first_bad,
                outputs=list(watch.outputs.values()),
                bad_gradients=_not_finite(grads),
                gradients={name: float(grad.norm()) for name, grad in grads.items()},
                error=error,
                updated=updated,
                notes=_notes(stored, run),
            )


def _take(
    run: Run, watch: Watch, stored: Capsule, batches: list[Any], pdb: bool
) -> BaseException | None:
    """Run forward and backward of the microbatches; return the exception, or None."""
    taken = stored.step["microbatches"]
    step = _step(stored)
    if pdb:
        _stop_before(run.task)
    channels_last = run.options.numerics.uses_channels_last(run.engine.device)
    move = Mover(run.engine.device, run.precision.input_dtype, channels_last)
    run.step.log.new_step()
    with watch.over(run.task):
        for i, (entry, batch) in enumerate(zip(taken, batches, strict=True), 1):
            run.state.batch_idx = entry["batch_idx"]
            on_device = move(batch)
            try:
                is_last = i == len(taken)
                _train_batch(run, Microbatch(on_device, entry["num_samples"], is_last), step)
            except Exception as error:  # the capsule may have been written for this error
                return error
    return None


def _train_batch(run: Run, microbatch: Microbatch, step: Step) -> None:
    run.step.num_samples = step.num_samples
    forwarded = forward_batch(run, microbatch)
    backward_batch(run, forwarded)
    leave_batch(run, forwarded)


def _update(run: Run, step: Step) -> bool:
    loop.finish_gradients(run, step)
    numerics = run.options.numerics
    return run.step.update(numerics.gradient_clip_val, numerics.gradient_clip_algorithm)


def _step(stored: Capsule) -> Step:
    own = sum(entry["num_samples"] for entry in stored.step["microbatches"])
    return Step(int(stored.about["num_samples"] or own), iter(()))


def _stop_before(task: Task) -> None:
    training_step = task.training_step

    def stopping(batch: Any, batch_idx: int) -> Any:
        breakpoint()
        return training_step(batch, batch_idx)

    task.training_step = stopping  # type: ignore[method-assign]


def _gradient(parameter: nn.Parameter, run: Run) -> Tensor:
    assert parameter.grad is not None
    grad = parameter.grad.detach()
    return (
        grad.to_dense() if grad.layout != torch.strided else grad
    ).double() / run.precision.scaler.get_scale()


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def _notes(stored: Capsule, run: Run) -> list[str]:
    """Describe the differences from the run."""
    about = stored.about
    settings = stored.about["settings"]
    device = run.engine.device
    was_gpu = not str(about.get("device", "cpu")).startswith("cpu")
    notes = []
    if was_gpu != is_accelerator(device):
        notes.append(
            f"the run computed on {about['device']}, this is {device.type}: kernels and random"
            " numbers differ"
        )
    if settings.get("compile") and not run.options.numerics.compile:
        notes.append(
            "the run was compiled, this is not"
            f" (trainer.compile={str(settings['compile']).lower()})"
        )
    if settings.get("sync_batchnorm") and about["world_size"] > 1:
        notes.append(
            f"batch norm used the statistics of {about['world_size']} ranks, here those of this"
            " rank's batches"
        )
    if about["world_size"] > 1:
        notes.append(f"gradients are this rank's share of the sum over {about['world_size']} ranks")
    if about["num_samples"] is None:
        notes.append(
            "the step's number of samples on all ranks is unknown (a stream): gradients are of the"
            " mean over these samples"
        )
    here = str(torch.__version__)
    if (there := (about.get("versions") or {}).get("torch")) != here:
        notes.append(f"the run had torch {there}, this is {here}")
    return notes
