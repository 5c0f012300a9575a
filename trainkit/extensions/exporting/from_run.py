"""Exports from a run: builds the Task from the config in a checkpoint's manifest, and loads the
checkpoint's weights.

The config is input from a file: it passes all checks of a config, and its own `trust` entry is
ignored.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainkit.api.datamodule import DataModule
from trainkit.api.lightning_names import of_another_class
from trainkit.api.task import Task
from trainkit.checkpoint.format import MANIFEST, verify
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.config import schema
from trainkit.config.instantiate import data_of, instantiate
from trainkit.config.users_code import named_by_user
from trainkit.console import short
from trainkit.data.seeding import seed_process
from trainkit.errors import CheckpointError, ConfigError, TaskError, TrainkitError
from trainkit.extensions.adapters.quantized import dequantize
from trainkit.extensions.exporting.export import Exported, export
from trainkit.extensions.exporting.hub import Hub
from trainkit.extensions.exporting.hub_files import write_hub_files
from trainkit.extensions.exporting.huggingface import writer_of
from trainkit.extensions.exporting.layers import make_layers, replacing_layers
from trainkit.extensions.exporting.of_manifest import from_manifest
from trainkit.extensions.exporting.places import places_of_checkpoints
from trainkit.extensions.exporting.request import FORMATS, check_output
from trainkit.extensions.language.tokenizer_folder import own_tokenizer

_OF_WEIGHTS = ("safetensors", "huggingface", "peft")  # formats that a second Task takes
_COPY = " Of those at a URL copy one to this machine, and give its folder: ckpt_path=FOLDER run_dir=RUN."
_ROWS = 2  # samples of the example: enough to distinguish a batch size from a constant


def export_run(
    ckpt_path: str,
    run_dir: str | None,
    format: str,  # noqa: A002 - the word of the command line
    output: str | None,
    trust: Sequence[str],
    hub: Hub | None = None,
) -> None:
    """Export a checkpoint of a run, and print the file and the result of its check.

    Args:
        ckpt_path: "last", "best", or a checkpoint's folder.
        run_dir: the run; None for the newest one in runs/ that has checkpoints.
        format: see `export`.
        output: the file; None for `<run_dir>/export/<conf>` with the format's suffix.
        trust: modules that the config may name in addition to the allowed ones.
        hub: where the folder is uploaded to; None for nowhere.

    Raises:
        ConfigError: the run does not exist, or its config is not legal.
        CheckpointError: the checkpoint does not exist, is damaged, or has no config.
        TaskError: the Task cannot be exported.
        TrainkitError: the hub refuses the folder, which is written.
    """
    folder = _find(ckpt_path, run_dir)
    manifest = verify(folder)
    config = _config_of(manifest, folder, trust)
    run = (
        Path(run_dir)
        if run_dir
        else folder.parent.parent
        if folder.parent.name == "checkpoints"
        else folder.parent
    )
    task = _build(config)
    source, absent = _source_of(task, config)
    if source is None and getattr(task, "example_input_array", None) is None:
        raise absent or AssertionError
    example = None if source is None else _example(task, source)
    _load(task, folder, keeps_adapters=format == "peft")
    name = re.sub(r"[^\w.-]", "_", str(config.get("conf") or type(task).__name__)).lstrip(".")
    path = (
        run / "export" / f"{name}{FORMATS[format][0]}"
        if output is None
        else check_output(output, format)
    )
    with _folder(path.parent):
        rebuilt = _without_callbacks(config, format) if format in _OF_WEIGHTS else None
        exported = export(
            task,
            path,
            format,
            example,
            rebuilt=rebuilt,
            about=source.describe_input() if source else {},
            beside=lambda draft: write_hub_files(
                draft,
                task,
                source,
                run,
                (folder, manifest),
                is_adapter=format == "peft",
                name=None if hub is None else hub.name,
            ),
        )
    print(_named(folder, manifest))
    print(f"wrote       {short(path.absolute())}, {exported.num_bytes:,} bytes")
    print(f"checked     {_checked(task, exported, format)}", flush=True)
    if hub is not None:
        message = f"step {manifest.get('global_step')}, from trainkit"
        print(f"pushed      {hub.push(path, message)}", flush=True)


def write_for_transformers(
    ckpt_path: str, run_dir: Path, output: Path, trust: Sequence[str]
) -> tuple[Path, str]:
    """Write a checkpoint as format=huggingface, with its tokenizer; return the checkpoint's folder,
    and a line that names it.

    Args:
        ckpt_path, trust: as of `export_run`.
        run_dir: the run; its data is read only if the run has left no tokenizer.
        output: the folder to write.

    Raises:
        ConfigError, CheckpointError, TaskError: see `export_run`.
    """
    folder = _find(ckpt_path, str(run_dir))
    manifest = verify(folder)
    config = _config_of(manifest, folder, trust, with_data=own_tokenizer(run_dir) is None)
    task = _build(config)
    writer_of(task)  # before its weights are read
    data = _source_of(task, config)[0] if config["data"] is not None else None
    _load(task, folder)
    export(
        task,
        output,
        "huggingface",
        rebuilt=_without_callbacks(config, "huggingface"),
        beside=lambda draft: write_hub_files(
            draft, task, data, run_dir, (folder, manifest), is_adapter=False
        ),
    )
    return folder, _named(folder, manifest)


def load_task(ckpt_path: str, run_dir: str | None, trust: Sequence[str]) -> tuple[Task, str]:
    """Return the Task of a run with a checkpoint's weights, in eval mode, and a line that names the
    checkpoint.

    Args:
        ckpt_path, run_dir, trust: as of `export_run`. The run's data is not needed, and need not be
            there.

    Raises:
        ConfigError: the run does not exist, or its config is not legal.
        CheckpointError: the checkpoint does not exist, is damaged, or has no config.
    """
    folder = _find(ckpt_path, run_dir)
    manifest = verify(folder)
    task = _build(_config_of(manifest, folder, trust, with_data=False))
    _load(task, folder)
    return task.eval(), _named(folder, manifest)


def _without_callbacks(config: dict[str, Any], format: str) -> Task:  # noqa: A002 - see export_run
    """Return a second Task, whose layers take the weights of a folder of this format."""
    task = _build({**config, "callbacks": {}})
    if format != "peft":
        dequantize(task)
    return task


def _load(task: Task, folder: Path, keeps_adapters: bool = False) -> None:
    """Load a checkpoint's weights; adapters are then added to the weights of the plain layers."""
    load_into(task, read_weights(str(folder)), str(folder))
    if (change := task._layers_of) is not None:
        change.check_base(task)
        if not keeps_adapters:
            change.fold(task)


def _named(folder: Path, manifest: dict[str, Any]) -> str:
    return (
        f"checkpoint  {short(folder.absolute())} (epoch {manifest.get('epoch')}, step"
        f" {manifest.get('global_step')})"
    )


def _checked(task: Task, exported: Exported, kind: str) -> str:
    rebuilt = "a newly built Task"
    runner = {
        "safetensors": rebuilt,
        "huggingface": rebuilt,
        "peft": f"{rebuilt} with the adapters",
        "torch_export": "torch.export.load",
        "onnx": "onnxruntime",
    }[kind]
    sizes = " and ".join(str(size) for size in exported.batch_sizes)
    equal = (
        "equal bit for bit"
        if exported.difference == 0
        else f"largest difference {exported.difference:.2g}"
    )
    return f"{runner} against {type(task).__name__}.forward on batches of {sizes} samples: {equal}"


def _find(ckpt_path: str, run_dir: str | None) -> Path:
    """Return the folder of the requested checkpoint."""
    if ckpt_path not in ("last", "best"):
        if not (Path(ckpt_path) / MANIFEST).is_file():
            raise CheckpointError(
                f"ckpt_path is '{ckpt_path}'; it must be best, last, or a checkpoint's folder (it"
                f" holds a {MANIFEST}).{_COPY * ('://' in ckpt_path)}"
            )
        return Path(ckpt_path).resolve()
    if run_dir is not None and not Path(run_dir).is_dir():
        raise ConfigError(
            f"run_dir is '{run_dir}', which does not exist. Leave it out for the newest run in"
            " runs/."
        )
    run = _newest_run() if run_dir is None else Path(run_dir)
    places = places_of_checkpoints(run)
    for place in places:
        if Path(place, ckpt_path, MANIFEST).is_file():
            return Path(place, ckpt_path).resolve()
    there = sorted(path.parent.name for each in places for path in Path(each).glob(f"*/{MANIFEST}"))
    available = f"there are {', '.join(there)}" if there else "there are no checkpoints there"
    raise CheckpointError(
        f"ckpt_path is '{ckpt_path}', and {' and '.join(places)} has no '{ckpt_path}';"
        f" {available}.{_COPY * ('://' in ''.join(places))}"
    )


def _newest_run() -> Path:
    manifests = [
        path
        for folder in Path("runs").rglob("checkpoints")
        for path in folder.glob(f"*/{MANIFEST}")
    ]
    if not manifests:
        raise ConfigError(
            "There is no run with checkpoints in runs/. Name one: run_dir=..., or ckpt_path=FOLDER."
        )
    run = max(manifests, key=lambda path: path.stat().st_mtime).parent.parent.parent
    print(
        f"run         {run}, the newest one with checkpoints (run_dir=... selects another)",
        flush=True,
    )
    return run


def _config_of(
    manifest: dict[str, Any], folder: Path, trust: Sequence[str], with_data: bool = True
) -> dict[str, Any]:
    """Return the checked config of a manifest, reduced to the Task and its data."""
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{folder} is from a run in Python code: it has no config to build the Task from. In"
            " Python: task = MyTask.load_from_checkpoint(path), and trainkit.export(task,"
            " 'model.onnx', format='onnx', example_input=x)."
        )
    config = {
        **config,
        "trainer": {},
        "engine": None,
        "callbacks": replacing_layers(config),
        "logger": {},
        "run_dir": ".",
        "trust": [*trust],
    }
    config.setdefault("seed", 0)
    if not with_data:
        config["data"] = None
    config = from_manifest(config, bool(trust))
    schema.check(config, "export", [], named_by_user(()))
    return config


def _build(config: dict[str, Any]) -> Task:
    seed_process(config["seed"])
    task = instantiate(config["task"], "task", config["trust"])
    if not isinstance(task, Task):
        raise ConfigError(of_another_class("task has", task, "Task"))
    task.setup("fit")
    make_layers(task, config)
    return task


def _source_of(
    task: Task, config: dict[str, Any]
) -> tuple[Task | DataModule | None, Exception | None]:
    """Return the run's data, set up;
    or None and why, if it is not here: a Task with its own example needs none.
    """
    try:
        data = data_of(config)
        source = data or task
        source.prepare_data()
        if data is not None:
            data.setup("fit")
        return source, None
    except (TrainkitError, OSError) as error:
        return None, error


def _example(task: Task, source: Task | DataModule) -> Any:
    """Return None if the Task has its own example, or the inputs of its data's first samples."""
    if getattr(task, "example_input_array", None) is not None:
        return None
    return _inputs_of(
        next(
            (loader for loader in (source.val_dataloader(), source.train_dataloader()) if loader),
            None,
        ),
        task,
    )


def _inputs_of(loader: Any, task: Task) -> Tensor:
    """Return the inputs of the first samples:
    of a batch (inputs, targets), or the batch itself if it is a tensor.
    """
    if isinstance(loader, (list, tuple)) and isinstance(loader[0], (DataLoader, Dataset)):
        loader = loader[0]
    batch = (
        next(iter(DataLoader(loader, _ROWS) if isinstance(loader, Dataset) else loader), None)
        if loader
        else None
    )
    inputs = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    if not isinstance(inputs, Tensor) or inputs.dim() == 0:
        reason = (
            f"a batch is a {type(batch).__name__}"
            if batch is not None
            else "there is no validation or training data"
        )
        raise TaskError(
            f"The inputs of {type(task).__name__}.forward cannot be derived: {reason}, not a tuple"
            " (inputs, targets). Give the Task an attribute example_input_array: a tensor, or a"
            " tuple of tensors."
        )
    return inputs[:_ROWS]


@contextlib.contextmanager
def _folder(path: Path) -> Any:
    """Create the folder; remove it again if the export fails."""
    is_new = not path.is_dir()
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be created: {error.strerror}. Choose a file with output=FILE."
        ) from error
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
