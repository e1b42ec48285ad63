"""Plain loops that stop within an epoch and go on in new objects: DDP, Accelerate and DeepSpeed, each rank's own state."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # here, so that forked ranks start quickly
from torch.nn.parallel import DistributedDataParallel

from orch import odb
from tests.dist.test_odb import Tokens
from tests.dist.test_odb_trainer import NUM_SAMPLES, in_rank, reference, steps_of, tiny_model
from tests.ranks import run_ranks

ACCUMULATE, STOP_AFTER = 2, 4


class Ddp:
    """DDP and an optimizer; rank 0 saves both."""

    divisor = 1

    def __init__(self) -> None:
        self.bare = tiny_model()
        self.model = DistributedDataParallel(self.bare)
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1)

    def prepare(self, loader: odb.ODBDataLoader) -> odb.ODBDataLoader:
        return loader

    def train(self, batch: dict[str, Any], info: odb.ODBStepInfo) -> None:
        self.model.require_backward_grad_sync = info.is_last_micro_step
        self.backward(self.model(**batch).loss * info.loss_scale)
        if info.is_last_micro_step:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            torch.save([self.bare.state_dict(), self.optimizer.state_dict()], folder / "model.pt")

    def load(self, folder: Path) -> None:
        model, optimizer = torch.load(folder / "model.pt")
        self.bare.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class Accelerate(Ddp):
    """Accelerate prepares, saves and loads all but the loader."""

    def __init__(self) -> None:
        from accelerate import Accelerator

        self.bare, self.accelerator = tiny_model(), Accelerator(cpu=True)
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)
        self.backward = self.accelerator.backward

    def prepare(self, loader: odb.ODBDataLoader) -> odb.ODBDataLoader:
        return self.accelerator.prepare(loader)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


class Zero2(Ddp):
    """DeepSpeed ZeRO-2."""

    divisor = ACCUMULATE

    def __init__(self) -> None:
        from tests.zero import wrap_zero

        self.bare = tiny_model()
        self.model = wrap_zero(self.bare, torch.optim.SGD(self.bare.parameters(), lr=0.1), ACCUMULATE)

    def train(self, batch: dict[str, Any], info: odb.ODBStepInfo) -> None:
        self.model.set_gradient_accumulation_boundary(info.is_last_micro_step)
        self.model.backward(self.model(**batch).loss * info.loss_scale)
        self.model.step()

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.model.load_checkpoint(str(folder))


def run(engine: Ddp, folder: Path, *, resumes: bool = False, stop_after: int | None = None) -> list[list[int]]:
    """Trains to the end of the epoch, or to where it saves and stops; the samples of each micro-step."""
    options = {"token_budget": 300, "buffer_size": 16, "shuffle": True, "accumulation_steps": ACCUMULATE}
    loader = engine.prepare(odb.ODBDataLoader(Tokens(NUM_SAMPLES), **options))
    state_file = folder / f"loader_{dist.get_rank()}.pt"
    if resumes:
        engine.load(folder)
        loader.load_state_dict(torch.load(state_file))
    seen: list[list[int]] = []
    for batch in loader:
        info = odb.pop_step_info(batch, accumulation_divisor=engine.divisor)
        engine.train(batch, info)
        seen.append([] if info.is_idle else batch["input_ids"][:, 0].tolist())
        if len(seen) == stop_after:
            engine.save(folder)
            torch.save(loader.state_dict(), state_file)
            loader.close()
            break
    return seen


@pytest.mark.parametrize(
    ("make", "needs"),
    [(Ddp, "torch"), (Accelerate, "accelerate"), (Zero2, "deepspeed")],
    ids=["ddp", "accelerate", "zero2"],
)
def test_a_plain_loop_goes_on_within_an_epoch(make: Callable[[], Ddp], needs: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    if needs == "deepspeed":
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # so that forked ranks start quickly

    def work() -> tuple[list[list[int]], list[list[int]], list[float]]:
        before = run(make(), tmp_path, stop_after=STOP_AFTER)
        dist.barrier()
        engine = make()
        after = run(engine, tmp_path, resumes=True)
        return before, after, torch.cat([p.detach().flatten() for p in engine.bare.parameters()]).tolist()

    results = run_ranks(work, 2, timeout_s=100, env=in_rank(tmp_path))
    assert all(len(before) == STOP_AFTER and after for before, after, _ in results)
    samples = [before + after for before, after, _ in results]
    assert Counter(i for seen in samples for ids in seen for i in ids) == Counter(range(NUM_SAMPLES))
    expected = reference(steps_of(samples, ACCUMULATE))
    for *_, weights in results:
        assert torch.allclose(torch.tensor(weights), expected, atol=2e-5)
