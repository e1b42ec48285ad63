"""Cost models measured on this device: each stage runs on batches of real samples, and a cost is fitted to the times.

FLOPs say little about a CPU or a small model, where the number of items and of attention segments counts too.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from orch.comm.counts import check_count
from orch.comm.groups import all_gather_single, get_world_size, is_distributed
from orch.cost import CostModel, PackedCost, PaddedCost
from orch.cost_fit import fit
from orch.prepare import to_device
from orch.stages import Item, Stage, stages_in

T = TypeVar("T")
Family = type[PackedCost] | type[PaddedCost]
LLM = "llm"
_NUM_SIZES, _NUM_KINDS = 2, 4  # of random batches; of batches
_ROUNDS = 8


def calibrate(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    *,
    layout: str = "packed",
    num_batches: int = 16,
    seed: int = 0,
) -> dict[str, CostModel]:
    """Measures what batches of each stage cost in forward and backward, and fits a cost model to it.

    Every rank calls it, before an engine wraps the model (whose hooks would answer); rank 0's result is given to all.

    Args:
        model: The model, its encoders stages; gradients are left as they were.
        samples: Processed samples to form batches of; as many as a rank's group holds, or more.
        layout: Layout of the LLM's batch.
        num_batches: Batches measured for each stage.
        seed: Of the choice of batches.

    Returns:
        By stage name, and "llm": a cost in seconds. Stages are left out that have no item in rank 0's `samples`, or
        items too few to tell a long batch from a short one; `orchestrate` then counts their FLOPs.

    Raises:
        ValueError: If `num_batches` is below 1; on all ranks alike, if one of them has no samples.
    """
    check_count("num_batches", num_batches)
    _check_samples(len(samples))
    family = PackedCost if layout == "packed" else PaddedCost
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()  # else the runs would add to what is kept
    try:
        costs = _measured_stages(model, samples, family, layout, num_batches, np.random.default_rng(seed))
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
    return _of_rank_0(
        {name: cost for name, cost in costs.items() if cost is not None},
        {**dict.fromkeys(stages_in(model), PackedCost), LLM: family},
    )


def _check_samples(num_samples: int) -> None:
    """All ranks raise alike where one has none, since they wait for each other in the end."""
    counts = torch.tensor([num_samples], device=_device())
    if is_distributed():
        own, counts = counts, counts.new_empty(get_world_size())
        all_gather_single(counts, own, None)
    if empty := torch.nonzero(counts == 0).flatten().tolist():
        raise ValueError(f"`samples` must have a sample on every rank, but is empty on ranks {empty} instead.")


def _measured_stages(
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    family: Family,
    layout: str,
    num_batches: int,
    rng: np.random.Generator,
) -> dict[str, CostModel | None]:
    """This rank's costs by stage name, and "llm"; None where times tell nothing."""
    costs: dict[str, CostModel | None] = {}
    device = next(model.parameters()).device
    for name, stage in stages_in(model).items():
        stage.bind(model.config)
        items = [item for sample in samples for item in stage.adapter.split(sample)]
        if items:
            length = stage.adapter.length
            batches = _batches(items, num_batches, length, rng)
            costs[name] = _measured(PackedCost, batches, _run_encoder(stage, device), length)
    collate = importlib.import_module("orch.encoders.backbone").collator_for(model, layout)
    texts = [{"input_ids": _text_only(s["input_ids"]), "labels": torch.as_tensor(s["labels"])} for s in samples]
    of_texts = _batches(texts, num_batches, _num_tokens, rng)
    costs[LLM] = _measured(family, of_texts, _run_llm(model, collate, device), _num_tokens)
    return costs


def _batches(
    pool: Sequence[T], num_batches: int, length: Callable[[T], int], rng: np.random.Generator
) -> list[list[T]]:
    """Batches that tell the coefficients apart.

    In turn: a random quarter and a random half of the pool, a quarter of like length (few long items cost more than
    many short ones of as many units), a lone item; of the latter two, some are short and some are long.
    """
    by_length = sorted(pool, key=length)
    quarter, num_turns = max(1, len(pool) // 4), -(-num_batches // _NUM_KINDS)
    batches = []
    for index in range(num_batches):
        turn, kind = divmod(index, _NUM_KINDS)
        place = turn / max(1, num_turns - 1)  # from the shortest to the longest
        if kind < _NUM_SIZES:
            batches.append([pool[i] for i in rng.permutation(len(pool))[: quarter * (kind + 1)]])
        elif kind == _NUM_SIZES:
            start = round(place * (len(pool) - quarter))
            batches.append(by_length[start : start + quarter])
        else:
            batches.append([by_length[round(place * (len(pool) - 1))]])
    return batches


def _measured(
    family: Family,
    batches: Sequence[list[T]],
    run: Callable[[list[T]], None],
    length: Callable[[T], int],
) -> CostModel | None:
    """The fitted cost; None where times do not grow with batches.

    Each batch counts with its quickest run, and its runs lie apart, since what disturbs a machine lasts for seconds.
    """
    run(batches[0])
    seconds = np.min([[_timed(run, batch) for batch in batches] for _ in range(_ROUNDS)], axis=0).tolist()
    lengths = [np.array([length(item) for item in batch], dtype=np.int64) for batch in batches]
    try:
        return fit(family, lengths, seconds)  # type: ignore[type-var]
    except ValueError:
        return None


def _timed(run: Callable[[T], None], batch: T) -> float:
    """Seconds of one run: of this thread on a CPU, of the device on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.thread_time()
    run(batch)
    return time.thread_time() - start


def _run_encoder(stage: Stage, device: torch.device) -> Callable[[list[Item]], None]:
    def run(items: list[Item]) -> None:
        rows = stage.encode(to_device(stage.adapter.join(items), device))
        if rows[0].requires_grad:
            torch.autograd.backward([tensor.sum() for tensor in rows])

    return run


def _run_llm(
    model: nn.Module, collate: Callable[..., dict[str, Any]], device: torch.device
) -> Callable[[list[dict[str, Any]]], None]:
    def run(samples: list[dict[str, Any]]) -> None:
        batch = dict(collate(samples, {}))
        batch.pop("labels")
        logits = model(**to_device(batch, device)).logits
        if logits.requires_grad:
            logits.sum().backward()

    return run


def _text_only(input_ids: Any) -> torch.Tensor:
    """Tokens of no media, as many."""
    return torch.zeros_like(torch.as_tensor(input_ids))


def _num_tokens(sample: Mapping[str, Any]) -> int:
    return len(sample["input_ids"])


def _device() -> str:
    """Where tensors that ranks send each other have to be."""
    return "cuda" if is_distributed() and dist.get_backend() == "nccl" else "cpu"


def _of_rank_0(costs: Mapping[str, CostModel], families: Mapping[str, Family]) -> dict[str, CostModel]:
    """Rank 0's coefficients on every rank: measurements differ, plans must not."""
    if not is_distributed():
        return dict(costs)
    fields = ("per_item", "linear", "quadratic")
    own = [[getattr(costs[name], field) for field in fields] if name in costs else [0.0] * 3 for name in families]
    shared = torch.tensor(own, dtype=torch.float64, device=_device())
    dist.broadcast(shared, src=0)
    rows = zip(families.items(), shared.tolist(), strict=True)
    return {name: family(*row) for (name, family), row in rows if any(row)}
