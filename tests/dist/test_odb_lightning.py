"""Lightning's Trainer on the loader, the real library: exact, and going on from its own checkpoints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # here, so that forked ranks start quickly

from orch import odb
from orch.odb.lightning import LightningBatches
from tests.dist.test_odb import Tokens
from tests.dist.test_odb_trainer import NUM_SAMPLES, in_rank, reference, steps_of, tiny_model
from tests.ranks import run_ranks

lightning = pytest.importorskip("lightning")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

ENV = {**in_rank(Path()), "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}


class Module(lightning.LightningModule):
    """Notes the samples of every micro-step."""

    def __init__(self, accumulate: int) -> None:
        super().__init__()
        self.model, self.seen, self.accumulate = tiny_model(), [], accumulate

    def train_dataloader(self) -> LightningBatches:
        options = {"token_budget": 300, "buffer_size": 16, "shuffle": True, "accumulation_steps": self.accumulate}
        return LightningBatches(odb.ODBDataLoader(Tokens(NUM_SAMPLES), **options), self.trainer)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        info = odb.pop_step_info(batch, accumulation_divisor=self.accumulate)
        self.seen.append([] if info.is_idle else batch["input_ids"][:, 0].tolist())
        return self.model(**batch).loss * info.loss_scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def weights(self) -> list[float]:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()]).tolist()


def fit(accumulate: int, checkpoint: Path | None = None, saves_to: Path | None = None, max_steps: int = -1) -> Module:
    """Two epochs, or what a checkpoint left of them; with `saves_to`, saves at each optimizer step and epoch's end."""
    module, saves = Module(accumulate), []
    if saves_to:
        saves = [
            callbacks.ModelCheckpoint(saves_to, "{step}", save_top_k=-1, every_n_train_steps=1),
            callbacks.ModelCheckpoint(saves_to, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True),
        ]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=bool(saves),
        callbacks=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return module


def test_lightning_trains_each_sample_once_and_exactly_and_resumes(tmp_path: Path) -> None:
    """Behind a checkpoint all goes on as if nothing had happened: amid an epoch, at its last batch, and at its end."""

    def train(accumulate: int) -> tuple[list[list[int]], list[float]]:
        folder = tmp_path / str(accumulate)
        whole = fit(accumulate, saves_to=folder)
        num_steps = len(list(folder.glob("step=*"))) // 2
        names = [f"step={num_steps - 1}", f"step={num_steps + 1}", "epoch=0"]
        is_short = len(whole.seen) // 2 % accumulate > 0
        for name in names if is_short else [*names, f"step={num_steps}"]:
            resumed = fit(accumulate, folder / f"{name}.ckpt")
            assert 0 < len(resumed.seen) < len(whole.seen), name
            assert resumed.seen == whole.seen[-len(resumed.seen) :], name
            assert resumed.weights() == whole.weights(), name
        stopped, checkpoint = fit(accumulate, max_steps=2), folder / "stopped.ckpt"
        stopped.trainer.save_checkpoint(checkpoint)
        resumed = fit(accumulate, checkpoint, max_steps=num_steps + 1)
        assert stopped.seen + resumed.seen == whole.seen[: len(stopped.seen) + len(resumed.seen)]
        with pytest.raises(ValueError, match="stopped within an epoch"):
            fit(accumulate, checkpoint)
        if dist.get_rank() == 0:  # alone, as after an exception of its own
            stopped.trainer.state.status = "interrupted"
            assert "on an exception" in stopped.trainer.train_dataloader.state_dict()["ranks"][1]
        if is_short:
            with pytest.raises(ValueError, match="behind a short optimizer step"):
                fit(accumulate, folder / f"step={num_steps}.ckpt")
        return whole.seen, whole.weights()

    ranks = run_ranks(lambda: [train(accumulate) for accumulate in (1, 2)], 2, timeout_s=150, env=ENV)
    for accumulate, results in zip((1, 2), zip(*ranks, strict=True), strict=True):
        samples = [seen for seen, _ in results]
        seen = Counter(i for rank in samples for ids in rank for i in ids)
        assert seen == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
        num_micro_steps = len(samples[0]) // 2
        steps = [
            step
            for epoch in (slice(num_micro_steps), slice(num_micro_steps, None))
            for step in steps_of([rank[epoch] for rank in samples], accumulate)
        ]
        for _, weights in results:
            assert torch.allclose(torch.tensor(weights), reference(steps), atol=2e-5)


def batches_alone(dataset: Any, num_trained: int) -> LightningBatches:
    """Of one rank, where Lightning has read one batch ahead of those trained; optimizer steps of two."""
    total = SimpleNamespace(processed=0)
    progress = SimpleNamespace(total=total, current=total, is_last_batch=False)
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=progress),
        epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0)),
    )
    loader = odb.ODBDataLoader(dataset, token_budget=300, buffer_size=16, accumulation_steps=2)
    batches = LightningBatches(loader, SimpleNamespace(world_size=1, fit_loop=loop, interrupted=False))
    iterator = iter(batches)
    next(iterator)
    for _ in range(num_trained):
        next(iterator)
        total.processed += 1
    return batches


def test_a_checkpoint_is_refused_where_nobody_can_go_on() -> None:
    within_a_step, within_a_stream = batches_alone(Tokens(60), 3), batches_alone(iter(Tokens(60)), 2)
    with pytest.raises(ValueError, match="saved within an optimizer step"):
        within_a_step.load_state_dict(within_a_step.state_dict())
    with pytest.raises(ValueError, match="saved within an epoch over an iterable"):
        within_a_stream.load_state_dict(within_a_stream.state_dict())
    with pytest.raises(ValueError, match="of 2 ranks cannot go on with 1"):
        within_a_step.load_state_dict({"ranks": [{}, {}]})
    fine = batches_alone(Tokens(60), 2)
    fine.load_state_dict(fine.state_dict())
