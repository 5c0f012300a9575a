"""DataModule: provides the loaders, apart from the Task."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.api.hyperparameters import Configured
from trainkit.device.transfer import to_device

StageName = Literal["fit", "validate", "test", "predict"]


class DataHooks:
    """The loaders of a DataModule, and of a Task that is used without one.

    Attributes:
        prepare_data_per_node: whether `prepare_data` is called on the first rank of each host; on
            rank 0 alone if false, as for a folder that hosts share.
    """

    prepare_data_per_node = True

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch as it is to be moved to the device.
        If a DataModule and a Task have the same hook, the DataModule's is called.
        """
        return batch

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Return a batch on the device; what an override leaves where it is, stays there."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch as `training_step` and its kin get it:
        augmentation on the device, for example.
        """
        return batch

    def describe_input(self) -> dict[str, Any]:
        """Return what an export's description says of the input, for `serve`: "classes", the names
        by place in the output; and "image", how a picture becomes a sample: resize (the shorter
        side), crop, mean, std, as in validation."""
        return {}

    def prepare_data(self) -> None:
        """Download or unpack; called on the first rank of each host only, before `setup`; see
        `prepare_data_per_node`. Set no attributes here.
        """

    def train_dataloader(self) -> Any:
        """Return the training data of `fit`, or None."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation data, or None."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test data, or None."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the data of `predict`, or None."""
        return None


class DataModule(DataHooks, Configured):
    """Override the loaders that you have. Return a DataLoader, a Dataset, or any iterable of
    batches; never shard it.

    A loader's `batch_size` is the microbatch of one rank. The trainer shards the samples over
    ranks.
    """

    # What a batch is, as text; data and a task that declare different ones are refused.
    # A dict of argument -> text is for a batch that depends on which argument is given ("": none).
    batch_shape: str | dict[str, str] | None = None
    _kind = "DataModule"

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
    ) -> DataModule:
        """Return a DataModule of data sets: training data is shuffled;
        `batch_size` is the microbatch of one rank.
        """
        made = cls()
        kinds = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        for kind, dataset in kinds.items():
            if dataset is not None:
                shuffle = kind == "train" and not isinstance(dataset, IterableDataset)
                loader = DataLoader(dataset, batch_size, shuffle=shuffle, num_workers=num_workers)
                setattr(made, f"{kind}_dataloader", lambda loader=loader: loader)
        return made

    def setup(self, stage: StageName) -> None:
        """Make data sets; called on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold of this DataModule:
        plain values and tensors, the same on all ranks.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it, before training, on all ranks."""

    def teardown(self, stage: StageName) -> None:
        """Release the resources of `setup`."""
