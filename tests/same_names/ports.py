"""Projects as they are written for Lightning, small:
with the imports and base classes of either trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import equal


@equal
def byol(kit: Framework) -> Any:
    """BYOL: a momentum encoder, updated in on_train_batch_end."""

    class Byol(kit.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.online, self.predictor = nn.Linear(2, 4), nn.Linear(4, 4)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            views = batch[0], batch[0] * 1.1
            guesses = [
                functional.normalize(self.predictor(self.online(view)), dim=-1) for view in views
            ]
            with torch.no_grad():
                goals = [functional.normalize(self.target(view), dim=-1) for view in views]
            loss = sum(
                (guess - goal).pow(2).sum(-1).mean()
                for guess, goal in zip(guesses, reversed(goals), strict=True)
            )
            return {"loss": loss}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for own, mean in zip(
                    self.online.parameters(), self.target.parameters(), strict=True
                ):
                    mean.mul_(0.9).add_(own, alpha=0.1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                [p for p in self.parameters() if p.requires_grad], lr=0.3, momentum=0.9
            )
            return [optimizer], [
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
            ]

    task = Byol()
    kit.trainer(max_epochs=4).fit(task, data())
    return weights(task)


@equal
def wgan(kit: Framework) -> Any:
    """WGAN: two optimizers by hand, the critic clamped after its step and trained more often."""

    class Wgan(kit.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.critic, self.generator = nn.Linear(2, 1), nn.Linear(1, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = batch[0]
            noise = torch.linspace(-1, 1, len(real))[:, None]
            by_critic, by_generator = self.optimizers()
            self.toggle_optimizer(by_critic)
            loss = self.critic(self.generator(noise)).mean() - self.critic(real).mean()
            by_critic.zero_grad()
            self.manual_backward(loss)
            by_critic.step()
            self.untoggle_optimizer(by_critic)
            if batch_idx % 2 == 0:
                self.toggle_optimizer(by_generator)
                by_generator.zero_grad()
                self.manual_backward(-self.critic(self.generator(noise)).mean())
                by_generator.step()
                self.untoggle_optimizer(by_generator)
            self.log("loss", loss, prog_bar=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.critic.parameters():
                    parameter.clamp_(-0.1, 0.1)

        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.critic.parameters(), 0.05), torch.optim.RMSprop(
                self.generator.parameters(), 0.05
            )

    task, trainer = Wgan(), kit.trainer(max_epochs=3)
    trainer.fit(task, data())
    return weights(task), trainer.global_step


class Experience(IterableDataset[Any]):
    """What a policy has just seen, as Lightning's examples of reinforcement learning draw it."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw())


@equal
def ppo(kit: Framework) -> Any:
    """PPO: an iterable that the policy fills, a training_step(self, batch), a clipped ratio."""

    class Ppo(kit.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.policy, self.value = nn.Linear(2, 2), nn.Linear(2, 1)
            self.rounds = 0

        def draw(self) -> Iterator[Any]:
            """Yield one epoch's experience:
            states, actions, log-probabilities at that time, returns.
            """
            self.rounds += 1
            numbers = torch.Generator().manual_seed(self.rounds)
            states = torch.randn(16, 2, generator=numbers)
            with torch.no_grad():
                logits = self.policy(states)
            actions = torch.multinomial(logits.softmax(-1), 1, generator=numbers).squeeze(1)
            chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
            returns = (states[:, 0] > 0).float() * (actions == 1).float()
            yield from zip(states, actions, chosen, returns, strict=True)

        def train_dataloader(self) -> Any:
            return DataLoader(Experience(self.draw), batch_size=4)

        def training_step(self, batch: Any) -> Tensor:
            states, actions, before, returns = batch
            now = self.policy(states).log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
            values = self.value(states).squeeze(1)
            gains, ratio = (returns - values).detach(), (now - before).exp()
            actor = -torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            self.log("returns", returns.mean(), on_step=False, on_epoch=True)
            return actor + 0.5 * (returns - values).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    task, trainer = Ppo(), kit.trainer(max_epochs=3)
    trainer.fit(task)
    return weights(task), task.rounds, round(float(trainer.callback_metrics["returns"]), 4)


@equal
def fine_tuning_with_milestones(kit: Framework) -> Any:
    """Fine-tuning of a classifier: frozen, then its last layers, then all,
    under MultiStepLR and with frozen norms.
    """

    class Milestones(kit.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(modules=pl_module.features, train_bn=True)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(
                    modules=pl_module.features[-1:], optimizer=optimizer, train_bn=True
                )
            elif epoch == 2:
                self.unfreeze_and_add_param_group(
                    modules=pl_module.features[:-1], optimizer=optimizer, train_bn=True
                )

    class Transfer(kit.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.features = nn.Sequential(
                nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)
            )
            self.head = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.head(self.features(batch[0])), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx), prog_bar=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)
            return [optimizer], [
                torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)
            ]

    task, trainer = Transfer(), kit.trainer(max_epochs=4, callbacks=[Milestones()])
    trainer.fit(task, data(), data())
    return weights(task), round(float(trainer.callback_metrics["val_loss"]), 4)


@equal
def a_variational_experiment(kit: Framework) -> Any:
    """An experiment that wraps a model:
    a dict of losses, log_dict of its items, a scheduler chosen by its parameters.
    """

    class Experiment(kit.Module):  # type: ignore[name-defined, misc]
        def __init__(self, params: dict[str, Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.params, self.curr_device = params, None
            self.model = nn.Linear(2, 4)

        def loss_of(self, inputs: Tensor) -> dict[str, Tensor]:
            mean, spread = self.model(inputs).chunk(2, -1)
            near = functional.mse_loss(mean, inputs)
            far = (-0.5 * (1 + spread - mean**2 - spread.exp()).sum(1)).mean()
            return {
                "loss": near + self.params["kld_weight"] * far,
                "near": near.detach(),
                "KLD": -far.detach(),
            }

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.curr_device = batch[0].device
            losses = self.loss_of(batch[0])
            self.log_dict({key: value.item() for key, value in losses.items()}, sync_dist=True)
            return losses["loss"]

        def validation_step(self, batch: Any, batch_idx: int, optimizer_idx: int = 0) -> None:
            losses = self.loss_of(batch[0])
            self.log_dict(
                {f"val_{key}": value.item() for key, value in losses.items()}, sync_dist=True
            )

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.model.parameters(), lr=self.params["LR"])
            return [optimizer], [
                torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=self.params["gamma"])
            ]

    task = Experiment({"kld_weight": 0.1, "LR": 0.05, "gamma": 0.9})
    trainer = kit.trainer(max_epochs=3)
    trainer.fit(task, data(), data())
    names = [name for name in trainer.callback_metrics if name.startswith("val_")]
    return weights(task), {
        name: round(float(trainer.callback_metrics[name]), 4) for name in sorted(names)
    }
