"""Lightning's Trainer on an `ODBDataLoader`.

    class Module(LightningModule):
        def train_dataloader(self):  # here, where the ranks know each other, and not before `fit`
            return LightningBatches(ODBDataLoader(...), self.trainer)

    Trainer(devices=2, strategy="ddp", use_distributed_sampler=False).fit(Module())

In `training_step`, `pop_step_info(batch)` and multiply the loss by its scale; with `accumulate_grad_batches`, by which
Lightning divides, give it as `accumulation_divisor` too. `fit(..., ckpt_path=...)` goes on behind the last batch that
was trained, on the same number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from orch.comm.groups import get_rank, get_world_size
from orch.odb.loader import ODBDataLoader
from orch.odb.step_info import ODB_STEP_INFO_KEY, ODBStepInfo


class LightningBatches:
    """The batches of a loader without a length: Lightning takes no more batches than `len` says, and it is not known.

    Lightning reads ahead of training, and only rank 0 writes a checkpoint. So the position saved is that of the batches
    that Lightning counts as processed, and it is saved for all ranks.

    Args:
        loader: The loader.
        trainer: Lightning's Trainer, which counts.

    Raises:
        ValueError: If the ranks do not know each other yet: the loader would read all data on each.
    """

    def __init__(self, loader: ODBDataLoader, trainer: Any) -> None:
        if trainer.world_size > 1 and not dist.is_initialized():
            raise ValueError("`loader` must be made in `train_dataloader`, but is made before `fit` instead.")
        self.loader, self.trainer = loader, trainer
        self._positions: dict[int, dict[str, Any] | str] = {}
        self._has_loaded = False

    def __iter__(self) -> Iterator[Any]:
        if not self._has_loaded:
            self._begin_epoch()
        self._has_loaded, num_taken, batches = False, self._num_trained, iter(self.loader)
        self._note_position(num_taken)
        for batch in batches:
            info = batch.pop(ODB_STEP_INFO_KEY)  # Lightning refuses frozen objects; the flat keys say as much.
            num_taken += 1
            self._note_position(num_taken, self._why_not_behind(info))
            yield batch
        self._note_position(num_taken)

    def state_dict(self) -> dict[str, Any]:
        """Where the ranks stand, behind the last batch trained; all of them call it, as Lightning does."""
        return {"ranks": self._gather(self._positions.get(self._num_trained, self._loader_state()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where this rank stood.

        Raises:
            ValueError: If the checkpoint is of another number of ranks or other data, or was saved where nobody can go
                on: within an optimizer step or just behind a short one, within an epoch over an iterable data set, or
                on an exception.
        """
        ranks = state["ranks"]
        if len(ranks) != get_world_size():
            raise ValueError(f"A checkpoint of {len(ranks)} ranks cannot go on with {get_world_size()}.")
        position, batches = ranks[get_rank()], self.trainer.fit_loop.epoch_loop.batch_progress
        if batches.is_last_batch and batches.current.processed % self.loader.accumulation_steps:
            position = "behind a short optimizer step, from where Lightning would miscount"
        if isinstance(position, str):
            raise ValueError(f"A checkpoint cannot go on that was saved {position}.")
        if position:
            self.loader.load_state_dict(position)
            self._has_loaded = True

    @property
    def _num_trained(self) -> int:
        """Batches trained since the very first epoch; Lightning saves the number, and never sets it back."""
        return int(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def _begin_epoch(self) -> None:
        """Chooses the epoch that Lightning counts: behind a checkpoint of an epoch's end, it gives us no state."""
        loop = self.trainer.fit_loop
        if self._num_trained and not self._positions and not loop.epoch_loop.batch_progress.is_last_batch:
            raise ValueError(
                "`fit` cannot go on where it had stopped within an epoch, which Lightning then takes as ended. Resume "
                "from a checkpoint saved within `fit`, as ModelCheckpoint does, or with `max_steps`."
            )
        self.loader.set_epoch(loop.epoch_progress.current.processed)

    def _why_not_behind(self, info: ODBStepInfo) -> str:
        """Why nobody can go on behind a batch; empty if they can."""
        if self.loader.order is None:
            return "within an epoch over an iterable data set"
        return "" if info.is_last_micro_step else "within an optimizer step"

    def _note_position(self, num_taken: int, why_not: str = "") -> None:
        """Notes where the loader stands once `num_taken` batches are trained."""
        kept = {number: position for number, position in self._positions.items() if number >= self._num_trained}
        self._positions = {**kept, num_taken: why_not or self._loader_state()}

    def _loader_state(self) -> dict[str, Any]:
        return {} if self.loader.order is None else self.loader.state_dict()

    def _gather(self, position: dict[str, Any] | str) -> list[dict[str, Any] | str]:
        ranks: list[Any] = [position] * get_world_size()
        if len(ranks) > 1 and self.trainer.interrupted:
            return ["on an exception, which the other ranks may not have met"] * len(ranks)
        if len(ranks) > 1:
            dist.all_gather_object(ranks, position)
        return ranks
