"""Lightning's Trainer on an `ODBDataLoader`.

    trainer = Trainer(devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(module, LightningBatches(loader))

In `training_step`, `pop_step_info(batch)` and multiply the loss by its scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orch.odb.loader import ODBDataLoader


class LightningBatches:
    """The batches of a loader without a length: Lightning takes no more batches than `len` says, and it is not known.

    Lightning reads one batch ahead of training, so the position within an epoch is not saved in its checkpoints; resume
    at epochs, or save `loader.state_dict()` before the next batch is asked for.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: ODBDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch; Lightning calls it."""
        self.loader.set_epoch(epoch)
