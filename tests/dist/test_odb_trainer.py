"""transformers' Trainer and Accelerate on the loader, each the real library."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from orch import odb
from tests.dist.test_odb import Tokens
from tests.ranks import run_ranks

try:
    import accelerate
except ImportError:
    accelerate = None

needs_accelerate = pytest.mark.skipif(accelerate is None, reason="accelerate is not installed")

NUM_SAMPLES, PORT = 60, 29731


@pytest.fixture(scope="module", autouse=True)
def _libraries_before_the_fork() -> None:
    """Imported by the parent, so that no forked rank spends seconds on it."""
    for name in ("transformers.trainer", "transformers.models.llama", "torch.nn.parallel.distributed"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


class Recorder:
    """A collate function that notes which samples it joined."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        from orch.odb.collate import collate_padded

        return collate_padded(samples)


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_trainer(folder: Path, *, accumulate: int = 1, epochs: int = 2, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from orch.odb.trainer import ODBTrainerMixin

    class Recording(ODBTrainerMixin, Trainer):
        """Notes the samples and the loss of every micro-step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.samples: list[list[int]] = []

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            info = inputs.get(odb.ODB_STEP_INFO_KEY)
            self.samples.append([] if info is None or info.is_idle else inputs["input_ids"][:, 0].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
        **{"save_strategy": "no", **arguments},
    )
    return Recording(
        model=tiny_model(),
        args=args,
        train_dataset=Tokens(NUM_SAMPLES),
        data_collator=Recorder(),
        odb={"token_budget": 300, "buffer_size": 16},
    )


def weights(trainer: Any) -> list[float]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def reference(samples_of_step: list[list[int]]) -> torch.Tensor:
    """One process, one SGD step for each list of samples, the mean over all label tokens."""
    model = tiny_model()
    for ids in samples_of_step:
        total = sum(int((Tokens(NUM_SAMPLES)[i]["labels"][1:] != -100).sum()) for i in ids)
        model.zero_grad()
        for i in ids:
            sample = Tokens(NUM_SAMPLES)[i]
            (model(sample["input_ids"][None], labels=sample["labels"][None], num_items_in_batch=total).loss).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def steps_of(samples_of_rank: list[list[list[int]]], accumulate: int) -> list[list[int]]:
    micro_steps = [[i for ids in ranks for i in ids] for ranks in zip(*samples_of_rank, strict=True)]
    return [
        [i for ids in micro_steps[start : start + accumulate] for i in ids]
        for start in range(0, len(micro_steps), accumulate)
    ]


def in_rank(folder: Path) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + os.getpid() % 500), "ACCELERATE_USE_CPU": "true"}


@needs_accelerate
def test_trainer_trains_each_sample_once_and_exactly(tmp_path: Path) -> None:
    """Accumulation steps, and whether Trainer averages by tokens itself (LLaMA-Factory's with a processor does not)."""
    cases = [(1, True), (3, True), (3, False)]

    def work() -> list[tuple[list[list[int]], list[float]]]:
        trained = []
        for accumulate, averages in cases:
            trainer = make_trainer(tmp_path, accumulate=accumulate)
            trainer.model_accepts_loss_kwargs = averages
            trainer.train()
            trained.append((list(trainer.samples), weights(trainer)))
        with pytest.raises(KeyError, match="must carry 'odb_step_info'"):
            trainer.compute_loss(trainer.model.train(), dict(Recorder()([Tokens(1)[0]])))
        return trained

    ranks = run_ranks(work, 2, timeout_s=150, env=in_rank(tmp_path))
    for (accumulate, _), results in zip(cases, zip(*ranks, strict=True), strict=True):
        assert len(results[0][0]) == len(results[1][0])
        seen = Counter(i for samples, _ in results for ids in samples for i in ids)
        assert seen == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
        expected = reference(steps_of([samples for samples, _ in results], accumulate))
        for _, found in results:
            assert torch.allclose(torch.tensor(found), expected, atol=2e-5)


@needs_accelerate
def test_trainer_resumes_behind_the_last_sample(tmp_path: Path) -> None:
    def work() -> tuple[list[list[int]], list[list[int]], list[float]]:
        first = make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
        first.train()
        second = make_trainer(tmp_path)
        second.train(resume_from_checkpoint=True)
        return first.samples, second.samples, weights(second)

    results = run_ranks(work, 2, timeout_s=150, env=in_rank(tmp_path))
    seen = Counter(i for before, after, _ in results for ids in [*before, *after] for i in ids)
    assert seen == Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
    expected = reference(steps_of([before + after for before, after, _ in results], 1))
    assert torch.allclose(torch.tensor(results[0][2]), expected, atol=2e-5)


@needs_accelerate
def test_accelerate_leaves_the_loader_as_it_is() -> None:
    def work() -> tuple[list[int], list[float]]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = odb.ODBDataLoader(Tokens(NUM_SAMPLES), token_budget=300, buffer_size=16, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(loader, odb.ODBDataLoader)
        seen = []
        for batch in loader:
            info = odb.pop_step_info(batch)
            accelerator.backward(model(**batch).loss * info.loss_scale)
            optimizer.step()
            optimizer.zero_grad()
            seen.append([] if info.is_idle else batch["input_ids"][:, 0].tolist())
        assert dist.get_world_size() == 2
        found = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
        return seen, found.tolist()

    results = run_ranks(work, 2, timeout_s=150, env=in_rank(Path()))
    assert Counter(i for seen, _ in results for ids in seen for i in ids) == Counter(range(NUM_SAMPLES))
    expected = reference(steps_of([seen for seen, _ in results], 1))
    assert torch.allclose(torch.tensor(results[0][1]), expected, atol=2e-5)
