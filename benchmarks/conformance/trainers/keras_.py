"""Keras 3 on torch, as https://keras.io/api and https://keras.io/guides write it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

from benchmarks.conformance.work import FEATURES, Fit, Record, Scored, strike, train_loader

IMPORT = "import keras"


class Trained(keras.Model):
    """The model of a Fit, in Keras' layers."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.first = keras.layers.Dense(fit.width)
        norm = fit.model == "norm"
        self.middle = (
            keras.layers.BatchNormalization() if norm else keras.layers.Dropout(fit.dropout)
        )
        self.last = keras.layers.Dense(1)
        self.fit_of, self.record, self.calls = fit, record, 0

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return one number a sample, or a token."""
        if training:
            strike(self.fit_of, self.record, self.calls)
            self.calls += 1
            self.record.times.append(time.process_time())
            self.record.seen.append(inputs["i"].flatten().int().numpy().tolist())
        outputs = self.last(self.middle(self.first(inputs["x"]), training=training))
        at = (self.calls - 1) // self.fit_of.accumulate + 1
        if training and at == self.fit_of.nan_at:
            outputs = outputs * float("nan")
        return outputs


class Rates(keras.callbacks.Callback):
    """Records the rate of each update, as a user's callback."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.fit_of, self.record = fit, record

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the rate, if this is the last microbatch of an update."""
        if (batch + 1) % self.fit_of.accumulate == 0:
            self.record.rates.append(float(self.model.optimizer.learning_rate))


class Score(keras.callbacks.Callback):
    """Gives a validation score to the callbacks behind it."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit_of = fit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Set it."""
        logs["score"] = self.fit_of.scores[epoch]


def optimizer_of(fit: Fit) -> Any:
    """Return the optimizer: schedule, clipping, accumulation and EMA are its settings."""
    rate: Any = fit.lr
    if fit.schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(fit.lr, 1, 0.9)
    settings: dict[str, Any] = {"global_clipnorm": fit.clip}
    if fit.accumulate > 1:
        settings["gradient_accumulation_steps"] = fit.accumulate
    if fit.ema:
        settings |= {"use_ema": True, "ema_momentum": 0.9}
    kind = keras.optimizers.AdamW if fit.optimizer == "adamw" else keras.optimizers.SGD
    return kind(rate, **settings)


def triples(loader: Any, fit: Fit) -> Any:
    """Return a loader of what Keras takes: inputs, targets, weights of tokens."""

    def pairs(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        inputs = {"i": batch["i"], "x": batch["x"]}
        if "score" in batch:
            return inputs, batch["score"][:, None]
        if "mask" in batch:
            return inputs, batch["labels"], batch["mask"]
        return inputs, batch["labels"]

    return torch.utils.data.DataLoader(
        loader.dataset,
        fit.batch,
        sampler=loader.sampler if fit.data == "map" else None,
        num_workers=fit.workers,
        collate_fn=pairs,
    )


def fit(fit: Fit, record: Record) -> None:
    """Train."""
    keras.utils.set_random_seed(0)
    model = Trained(fit, record)
    model.compile(optimizer_of(fit), loss="mse")
    shape = (1, 7, FEATURES) if fit.model == "tokens" else (1, FEATURES)
    model({"i": torch.zeros(1), "x": torch.zeros(shape)})
    callbacks: list[Any] = [Rates(fit, record)] if fit.schedule else []
    if fit.save_every:
        every: Any = fit.save_every * fit.accumulate
        if every % (fit.rows // fit.batch) == 0:
            every = "epoch"
        callbacks.append(
            keras.callbacks.BackupAndRestore(
                str(record.checkpoints),
                save_freq=every,
                delete_checkpoint=False,
                double_checkpoint=True,
            )
        )
    if fit.scores:
        callbacks.append(Score(fit))
        best = keras.callbacks.ModelCheckpoint(
            str(record.folder / "best.weights.h5"),
            "score",
            mode="min",
            save_best_only=True,
            save_weights_only=True,
        )
        callbacks.append(best)
    if fit.patience is not None:
        callbacks.append(keras.callbacks.EarlyStopping("score", patience=fit.patience, mode="min"))
    history = model.fit(
        triples(train_loader(fit), fit),
        epochs=fit.epochs,
        callbacks=callbacks,
        verbose=0,
        **fit.options,
    )
    record.updates = int(model.optimizer.iterations)
    record.values = {name: values[-1] for name, values in history.history.items()}
    record.values["epochs"] = len(history.history.get("loss", []))
    if fit.scores:
        record.values["best"] = str(float(best.best))
    if fit.validation and not fit.scores:
        record.values["score"] = evaluate(model, fit)
    names = [(v.path.partition("/")[2], v.value.detach().clone()) for v in model.variables]
    record.weights = {name: value for name, value in names if "seed" not in name}
    if fit.ema:
        model.optimizer.finalize_variable_values(model.trainable_variables)
        record.average = {
            v.path.partition("/")[2]: v.value.detach().clone() for v in model.trainable_variables
        }


class Adversarial(keras.Model):
    """Two optimizers, as its guide on a train_step of one's own in PyTorch writes them."""

    def __init__(self, fit: Fit, record: Record) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(FEATURES)])
        critic = [keras.layers.Dense(8), keras.layers.LeakyReLU(), keras.layers.Dense(1)]
        self.critic = keras.Sequential([keras.Input((FEATURES,)), *critic])
        self.generator_optimizer = keras.optimizers.Adam(0.01)
        self.critic_optimizer = keras.optimizers.Adam(0.01)
        self.seeds = keras.random.SeedGenerator(0)
        self.fit_of, self.record, self.calls = fit, record, 0
        self.built = True

    def train_step(self, data: Any) -> dict[str, Any]:
        """Update the critic, then the generator."""
        inputs, _ = data
        strike(self.fit_of, self.record, self.calls)
        self.calls += 1
        self.record.seen.append(inputs["i"].flatten().int().numpy().tolist())
        for part, optimizer in (
            (self.critic, self.critic_optimizer),
            (self.generator, self.generator_optimizer),
        ):
            noise = keras.random.normal((len(inputs["x"]), 4), seed=self.seeds)
            scores = self.critic(self.generator(noise))
            loss = -scores.mean()
            if part is self.critic:
                loss = (1 - self.critic(inputs["x"])).relu().mean() + (1 + scores).relu().mean()
            self.zero_grad()
            loss.backward()
            weights = part.trainable_weights
            with torch.no_grad():
                optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


def gan(fit: Fit, record: Record) -> None:
    """Train a generator and a critic."""
    keras.utils.set_random_seed(0)
    model = Adversarial(fit, record)
    model.compile()
    saver = keras.callbacks.BackupAndRestore(
        str(record.checkpoints), save_freq=fit.save_every or "epoch", delete_checkpoint=False
    )
    model.fit(triples(train_loader(fit), fit), epochs=fit.epochs, callbacks=[saver], verbose=0)
    parts = {"generator": model.generator, "critic": model.critic}
    record.weights = {
        f"{name}.{number}": weight.value.detach().clone()
        for name, part in parts.items()
        for number, weight in enumerate(part.weights)
    }


def evaluate(model: Any, fit: Fit) -> float:
    """Return the mean score: a model without weights whose loss it is."""
    plain = torch.utils.data.DataLoader(Scored(fit), fit.batch)
    loader = triples(plain, Fit(batch=fit.batch))
    inputs = keras.Input((FEATURES,))
    zero = keras.Model(inputs, keras.layers.Lambda(lambda x: x[:, :1] * 0)(inputs))
    zero.compile(loss="mae")
    return float(zero.evaluate(_only_x(loader), verbose=0))


def _only_x(loader: Any) -> Any:
    for inputs, target in loader:
        yield inputs["x"], target


def load_weights(given: Fit, record: Record) -> None:
    """Load a whole model whose layer is a pickled function, as a .keras file may hold one."""
    path = record.folder / "theirs.keras"
    mark = given.options["weights"].replace("weights.pt", "weights-ran")

    def theirs(x: Any) -> Any:
        import os

        os.system(f"touch {mark}")
        return x

    inputs = keras.Input((2,))
    keras.Model(inputs, keras.layers.Lambda(theirs, output_shape=(2,))(inputs)).save(path)
    Path(mark).unlink(missing_ok=True)
    keras.models.load_model(path)(torch.zeros(1, 2))


def set_up() -> None:
    """Do what a process does once, before its runs."""
