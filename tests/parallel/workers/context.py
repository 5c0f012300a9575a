"""What ranks that share the tokens of samples train, draw and refuse, beside one process.

    torchrun --nproc-per-node 2 context.py OUT fsdp '{"context":2}' -
    python context.py OUT single '{}' FOLDER_OF_THE_OUT_ABOVE

With a folder each scenario that has a checkpoint there resumes from it. Rank 0 saves {scenario:
[rank 0's result, ...]}.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import trainkit
from recipes.gpt import GPT
from recipes.language_model import LanguageModel
from recipes.llama import Llama
from recipes.sft import ChatModel
from tests.parallel.workers.trainers import exact_trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.engine.select import make_engine
from trainkit.errors import TrainkitError
from trainkit.extensions.context.sequence import part, sum_of_parts
from trainkit.extensions.language.packing import IGNORED, Document, lay_out

OUT, NAME, OPTIONS, FROM = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
# a step has 8 samples: 4 microbatches of 2 in one process; the last one of an epoch has 5
SAMPLES, STEP, TOKENS, VOCABULARY = 21, 8, 16, 32
BEFORE, AFTER = 4, 6


class Rows(Dataset[Any]):
    """Numbered windows of one token more than the model reads."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        numbers = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (self.tokens + 1,), generator=numbers)


class Texts(trainkit.DataModule):
    """They, in batches of 2."""

    def __init__(self, tokens: int = TOKENS, **said: Any) -> None:
        self.rows = Rows(tokens)
        for name, value in said.items():
            setattr(self, name, value)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return them in another order each epoch."""
        return DataLoader(self.rows, 2, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return them in order."""
        return DataLoader(self.rows, 6)

    predict_dataloader = val_dataloader


def gpt(dropout: float = 0.0, **settings: Any) -> LanguageModel:
    """Return a GPT."""
    torch.manual_seed(3 + ENGINE.ranks.rank)  # the weights that count are rank 0's
    model = GPT(TOKENS, 16, 2, 4, dropout, VOCABULARY)
    return LanguageModel(model, **{"optimizer": partial(torch.optim.SGD, lr=0.3), **settings})


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


def trainer(name: str, **settings: Any) -> trainkit.Trainer:
    """Return a trainer of a scenario's folder."""
    settings = {"global_batch_size": STEP, **settings}
    return exact_trainer((NAME, OPTIONS), OUT.parent / name, **settings)


def train(name: str, make: Callable[[], trainkit.Task], data: Any, **settings: Any) -> Any:
    """Train a scenario to its checkpoint, or on from it; one process does both."""
    if FROM != "-":
        copy(Path(FROM) / name, OUT.parent / name)
        return fit(name, make, data, AFTER, "last", **settings)
    first = fit(name, make, data, BEFORE, None, **settings)
    if NAME == "single":
        copy(OUT.parent / name, OUT.parent / f"{name}_after")
        first["after"] = fit(f"{name}_after", make, data, AFTER, "last", **settings)
    return first


def copy(source: Path, to: Path) -> None:
    """Copy a run's folder, for all ranks."""
    if ENGINE.ranks.is_main:
        shutil.copytree(source, to, symlinks=True)
    ENGINE.comm.barrier()


def fit(
    name: str,
    make: Callable[[], trainkit.Task],
    data: Any,
    steps: int,
    start: Any,
    **settings: Any,
) -> Any:
    """Train, and return what this rank has then."""
    torch.manual_seed(3 + ENGINE.ranks.rank)  # the weights that count are rank 0's
    task = make()
    saves = ModelCheckpoint(every_n_train_steps=BEFORE, save_last=True)
    run = trainer(name, max_steps=steps, callbacks=[saves], **settings)
    run.fit(task, datamodule=data, ckpt_path=start)
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in task.parameters()
    )
    return {
        "state": {key: whole(value) for key, value in task.state_dict().items()},
        "values": values,
        "validated": run.validate(task, datamodule=data, verbose=False),
        "held": held,
    }


def sgd() -> Any:
    """Plain SGD shows a wrong scale of the gradient, which Adam would hide."""
    return train("sgd", gpt, Texts())


def adamw() -> Any:
    """With clipping, activation checkpointing, z-loss, and logits of some tokens at a time."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    make = partial(gpt, optimizer=optimizer, z_loss=1e-2, loss_chunk=5)
    return train("adamw", make, Texts(), gradient_clip_val=0.05, activation_checkpointing=True)


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    """Documents of a row apart, in rows that are filled up; fewer heads of keys than of queries."""
    config = {name: value for name, value in _SMALL.items() if name != "vocab_size"}
    config["initializer_range"] = 0.2
    optimizer = partial(torch.optim.SGD, lr=0.3)
    make = partial(Llama, optimizer, vocab_size=VOCABULARY, context=64, config=config, z_loss=1e-2)
    return train("llama", make, Texts(tokens=14, special_tokens={"end_of_text": 3}))


class Packs(Dataset[Any]):
    """Numbered packs of one to three documents, of which the first tokens are not predicted."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[Document]:
        numbers = torch.Generator().manual_seed(index)
        pack = []
        for place in range(1 + index % 3):
            ids = torch.randint(VOCABULARY, (3 + (index + 2 * place) % 6,), generator=numbers)
            labels = ids.clone()
            labels[: 1 + index % 2] = IGNORED
            pack.append(Document(ids, labels))
        return pack


class Conversations(Texts):
    """They, in batches of 2."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        collate = partial(lay_out, layout=self.layout, pad=0)
        data: Any = Packs()
        return DataLoader(data, 2, shuffle=shuffle, collate_fn=collate)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return them in another order each epoch."""
        return self._loader(True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return them in order."""
        return self._loader(False)


def sft(layout: str, loss_chunk: int | None) -> Any:
    """Rows of documents, of unequal lengths, and tokens that no text predicts."""
    make = partial(
        ChatModel,
        partial(torch.optim.SGD, lr=0.3),
        model_type="llama",
        config={**_SMALL, "initializer_range": 0.2},
        save_pretrained=False,
        loss_chunk=loss_chunk,
    )
    return train(layout, make, Conversations(layout))


def resumed() -> Any:
    """Train with dropout in one go, and from the middle of an epoch."""
    keeps = {"callbacks": [ModelCheckpoint(every_n_train_steps=1, save_last=True)], "max_steps": 5}
    one, parts = gpt(0.3), [gpt(0.3), gpt(0.3)]
    trainer("whole", max_steps=5).fit(one, datamodule=Texts())
    trainer("parts", **{**keeps, "max_steps": 4}).fit(parts[0], datamodule=Texts())
    trainer("parts", **keeps).fit(parts[1], datamodule=Texts(), ckpt_path="last")
    return {
        "whole": {name: whole(value) for name, value in one.state_dict().items()},
        "resumed": {name: whole(value) for name, value in parts[1].state_dict().items()},
    }


class Drawing(LanguageModel):
    """Draws numbers before and after it takes its part."""

    def __init__(self) -> None:
        made = gpt()
        super().__init__(made.model, made.optimizer)
        self.drawn: list[tuple[float, float]] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Note them, and the samples."""
        self.seen.append(batch.tolist())
        first = float(torch.rand(()))
        part(batch[:, 1:])
        self.drawn.append((first, float(torch.rand(()))))
        return super().training_step(batch, batch_idx)


def drawn() -> Any:
    """Return what a step draws, and what a prediction, which takes no part, answers."""
    task, run = Drawing(), trainer("drawn", max_steps=2)
    run.fit(task, datamodule=Texts())
    predicted = run.predict(task, datamodule=Texts())
    assert predicted is not None
    answers = torch.cat(predicted).tolist()
    return {"drawn": task.drawn, "seen": task.seen, "predicted": answers}


class Whole(LanguageModel):
    """Takes no part."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the whole sequence."""
        logits = self(batch[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits, batch[:, 1:].flatten())


class Apart(Whole):
    """Has no attention."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of the head alone."""
        logits = self.model.head(self.model.tokens(part(batch[:, :-1])))
        loss = functional.cross_entropy(logits.flatten(0, 1), part(batch[:, 1:]).flatten())
        return sum_of_parts(loss) / 2


class Unsummed(Whole):
    """Has a loss of its own tokens."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return their mean."""
        logits = self(part(batch[:, :-1])).flatten(0, 1)
        return functional.cross_entropy(logits, part(batch[:, 1:]).flatten())


class Mixed(Whole):
    """Gives a layer the whole sequence after the cut."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return its loss."""
        part(batch[:, 1:])
        return super().training_step(batch, batch_idx)


class Late(Whole):
    """Cuts labels before they are shifted."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return its loss."""
        part(batch[:, :-1])
        part(batch, fill=-100)
        return super().training_step(batch, batch_idx)


def refused() -> Any:
    """Return what is raised, by the name of a case."""
    raised = {}
    for kind in (Whole, Apart, Unsummed, Mixed, Late):
        made = gpt()
        raised[kind.__name__] = _raised(kind(made.model, made.optimizer), Texts())
    raised["odd"] = _raised(gpt(), Texts(tokens=TOKENS - 2))
    return raised


def _raised(task: LanguageModel, data: Texts) -> str:
    try:
        trainer("refused", max_steps=1).fit(task, datamodule=data)
    except TrainkitError as error:
        return str(error)
    return ""


RESUMED: dict[str, Callable[[], Any]] = {"sgd": sgd, "adamw": adamw}
OTHERS = {"llama": llama, "drawn": drawn}
OF_CHATS = {"packed": partial(sft, "packed", 5), "padded": partial(sft, "padded", None)}

if __name__ == "__main__":
    results = {}
    ENGINE = make_engine(NAME, **OPTIONS)  # type: ignore[arg-type]
    chosen = RESUMED
    with ENGINE:
        if FROM == "-":
            chosen = chosen | OTHERS | ({} if "tensor" in OPTIONS else OF_CHATS)
            chosen |= {} if NAME == "single" else {"resumed": resumed}
            chosen |= {"refused": refused} if ENGINE.ranks.world_size == 2 else {}
        for scenario, run in chosen.items():
            results[scenario] = ENGINE.comm.all_gather_object(run())
        if ENGINE.ranks.is_main:
            torch.save(results, OUT)
        ENGINE.comm.barrier()
