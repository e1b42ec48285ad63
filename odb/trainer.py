"""transformers' Trainer on an `ODBDataLoader`.

    class MyTrainer(ODBTrainerMixin, Trainer): ...
    trainer = MyTrainer(..., odb={"token_budget": 16384})

Trainer averages by label tokens over ranks and micro-steps by itself where the model or a loss function takes
`num_items_in_batch`; nothing is scaled twice. Elsewhere the loader's own scale is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from orch.odb.loader import ODBDataLoader
from orch.odb.measure import IGNORED_LABEL
from orch.odb.step_info import ODB_STEP_INFO_KEY, ODBStepInfo, pop_step_info

SPARE_LENGTH = 1.25


class TrainerBatches:
    """The batches of an `ODBDataLoader` as Trainer wants them.

    Trainer asks for the number of batches beforehand and takes no more; it is not known. So `len` is a bound with room
    to spare, epochs are counted here, and the last optimizer step of an epoch is filled up with idle batches. A
    schedule that must end exactly needs `max_steps`, as for any data without a length.

    Args:
        loader: The loader.
        num_epochs: Epochs to train; none yields anything beyond.
        masks_idle: Mask all labels of idle batches, for losses that are sums over `num_items_in_batch`.
    """

    def __init__(self, loader: ODBDataLoader, num_epochs: float, *, masks_idle: bool) -> None:
        self.loader, self.num_epochs, self.masks_idle = loader, num_epochs, masks_idle
        self.dataset = loader.dataset
        self._bound: int | None = None

    def __len__(self) -> int:
        if self._bound is None:
            size = self.loader.accumulation_steps
            self._bound = math.ceil((SPARE_LENGTH * len(self.loader) + 2) / size) * size
        return self._bound

    def __iter__(self) -> Iterator[MutableMapping[str, Any]]:
        if self.loader.epoch >= self.num_epochs:
            return
        num_micro_steps, batch = 0, None
        for batch in self.loader:
            info = pop_step_info(batch)
            num_micro_steps += 1
            yield self._with_info(batch, info)
        while batch is not None and num_micro_steps % self.loader.accumulation_steps:
            num_micro_steps += 1
            yield self._with_info(dict(batch), ODBStepInfo(0, loss_scale=0.0))

    def _with_info(self, batch: MutableMapping[str, Any], info: ODBStepInfo) -> MutableMapping[str, Any]:
        if info.is_idle and self.masks_idle:
            batch["labels"] = torch.full_like(batch["labels"], IGNORED_LABEL)
        batch[ODB_STEP_INFO_KEY] = info
        return batch


class ODBTrainerMixin:
    """Mixed into transformers' `Trainer`, before it: trains on batches formed online.

    Args:
        *args: Of the Trainer.
        odb: Keywords of `ODBDataLoader`, `token_budget` at least.
        **kwargs: Of the Trainer.
    """

    args: Any

    def __init__(self, *args: Any, odb: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.odb_options = dict(odb)
        self.odb_batches: TrainerBatches | None = None
        self._odb_resume_from: Path | None = None
        if not self.args.average_tokens_across_devices:
            raise ValueError("`average_tokens_across_devices` must be True for exact gradients, but is False instead.")

    def get_train_dataloader(self) -> Any:
        """The batches that Trainer trains on; not given to Accelerate, which would rebuild them."""
        if self.odb_batches is None:
            self.odb_batches = self._odb_make_batches()
        return self.odb_batches

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`; a resumed run goes on behind the last sample trained."""
        if resume_from_checkpoint:
            from transformers.trainer_utils import get_last_checkpoint

            found = resume_from_checkpoint
            if not isinstance(found, str):
                found = resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            self._odb_resume_from = Path(found) if found else None
            self.args.ignore_data_skip = True
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, inputs: MutableMapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.compute_loss`, scaled by the loader where Trainer does not average by tokens itself.

        Raises:
            KeyError: If something took the loader's step info out of a training batch: its scale would be unknown.
        """
        info = inputs.pop(ODB_STEP_INFO_KEY, None)
        if info is None and model.training:
            raise KeyError(f"`inputs` must carry {ODB_STEP_INFO_KEY!r}, but has only {sorted(inputs)} instead.")
        result = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if info is None or self._odb_averages_by_itself():
            return result
        scale = info.loss_scale * self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        if isinstance(result, tuple):
            return result[0] * scale, *result[1:]
        return result * scale

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self.odb_batches is not None:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            state = self.odb_batches.loader.state_dict()
            self._odb_state_file(folder).write_text(json.dumps(state))

    def _odb_make_batches(self) -> TrainerBatches:
        args, trainer = self.args, self
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")  # type: ignore[attr-defined]
        options = {
            "collate_fn": collate,
            "shuffle": True,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "num_workers": args.dataloader_num_workers,
            "persistent_workers": args.dataloader_persistent_workers,
            "accumulation_steps": args.gradient_accumulation_steps,
            **self.odb_options,
        }
        loader = ODBDataLoader(trainer.train_dataset, **options)  # type: ignore[attr-defined]
        if self._odb_resume_from is not None:
            loader.load_state_dict(json.loads(self._odb_state_file(self._odb_resume_from).read_text()))
        num_epochs = math.inf if args.max_steps > 0 else args.num_train_epochs
        return TrainerBatches(loader, num_epochs, masks_idle=self._odb_averages_by_itself())

    def _odb_averages_by_itself(self) -> bool:
        return bool(self.model_accepts_loss_kwargs or self.compute_loss_func is not None)  # type: ignore[attr-defined]

    def _odb_state_file(self, folder: Path) -> Path:
        return folder / f"odb_state_{self.args.process_index}.json"
