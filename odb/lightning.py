"""Lightning's Trainer on an `ODBDataLoader`.

    trainer = Trainer(devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(module, LightningBatches(loader))

In `training_step`, `pop_step_info(batch)` and multiply the loss by its scale; with `accumulate_grad_batches`, by which
Lightning divides, give it as `accumulation_divisor` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orch.odb.loader import ODBDataLoader
from orch.odb.step_info import ODB_STEP_INFO_KEY


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
        for batch in self.loader:
            batch.pop(ODB_STEP_INFO_KEY)  # Lightning refuses frozen objects in a batch; the flat keys say as much.
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch; Lightning calls it."""
        self.loader.set_epoch(epoch)
