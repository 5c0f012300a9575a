"""A GAN as Lightning's examples write it:
two optimizers in turns, and pictures at each epoch's end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.threads import ThreadEngine, World
from trainkit.loggers import CSVLogger, TensorBoardLogger


class Gan(trainkit.Task):
    """Draws 4 x 4 pictures of one grey."""

    def __init__(
        self, latent_dim: int = 4, lr: float = 0.02, b1: float = 0.5, b2: float = 0.999
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()
        )
        self.validation_z = torch.randn(6, self.hparams.latent_dim)

    def forward(self, z: Tensor) -> Tensor:
        """Return pictures."""
        return self.generator(z).reshape(-1, 1, 4, 4)

    def adversarial_loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a judgement."""
        return nn.functional.binary_cross_entropy(y_hat, y)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train the generator, then the discriminator."""
        (imgs,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z).flatten(1)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs.flatten(1)), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach().flatten(1)), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self) -> None:
        """Log pictures of the same noise,
        by the library's own object and by the call for all loggers.
        """
        sample_imgs = self(self.validation_z.type_as(self.generator[0].weight)).detach()
        self.logger.experiment.add_image("generated_images", sample_imgs[0], self.current_epoch)
        self.log_image("samples", sample_imgs[0])

    def configure_optimizers(self) -> Any:
        """Return both optimizers, and no schedule."""
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gan_trains_and_shows_its_pictures(ranks: int, tmp_path: Path) -> None:
    """The pictures approach the data's grey; TensorBoard and the files have them."""

    def work(engine: ThreadEngine) -> float:
        torch.manual_seed(3)
        data = DataLoader(TensorDataset(torch.full((64, 1, 4, 4), 0.8)), batch_size=16 // ranks)
        task = Gan()
        trainer = trainkit.Trainer(
            engine=engine,
            max_epochs=12,
            run_dir=str(tmp_path),
            logger=[TensorBoardLogger(), CSVLogger()],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            log_every_n_steps=4,
        )
        trainer.fit(task, data)
        with torch.no_grad():
            drawn = task(torch.linspace(-1, 1, 128).reshape(32, 4))
        return float((drawn - 0.8).abs().mean())

    found = World(ranks).run(work)
    assert len(set(found)) == 1
    assert found[0] < 0.27  # it begins at 0.3, the sigmoid's middle
    assert len(list((tmp_path / "media").glob("samples-step=*.png"))) == 12
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["images"]) == {"generated_images", "samples"}


def test_a_logger_of_plain_files_has_no_experiment(tmp_path: Path) -> None:
    """It is refused with what to do."""
    trainer = trainkit.Trainer(
        max_epochs=1, run_dir=str(tmp_path), logger=CSVLogger(), enable_progress_bar=False
    )
    with pytest.raises(
        trainkit.TrainkitError,
        match=r"CSVLogger\.experiment: this logger writes plain files.*Trainer\(logger=TensorB",
    ):
        trainer.fit(Gan(), DataLoader(TensorDataset(torch.rand(8, 1, 4, 4)), batch_size=4))
