"""From a planned micro-step to a batch: raw items move, then each rank joins what it encodes and what it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orch.comm.groups import Group
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.parcels import exchange_parcels
from orch.comm.topology import IntArray, Topology
from orch.draw import DrawnSample, open_parcel
from orch.lengths import StepLengths
from orch.loss import IGNORE
from orch.micro_step import StageBatch
from orch.plan import MicroStepPlan, StagePlan
from orch.stages import EncoderAdapter, Item
from orch.tags import TAG_BYTES, Tags, ids_in
from orch.wire import decode_record

Named = Mapping[str, str | float]
Collate = Callable[[Sequence[dict[str, Any]], Mapping[str, Sequence[Sequence[Item]]]], dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What a rank holds after the raw exchange of a micro-step.

    Attributes:
        samples: The samples of its LLM batch, without their items.
        parts: By stage, the LLM-side parts of each sample's items.
        items: By stage, the items that this rank encodes.
        named: The numbers and strings of each sample, without fillers.
    """

    samples: list[dict[str, Any]]
    parts: dict[str, list[list[Item]]]
    items: dict[str, list[Item]]
    named: tuple[Named, ...]


def exchange_step_parcels(
    drawn: Sequence[DrawnSample],
    lengths: StepLengths,
    plan: MicroStepPlan,
    rank: int,
    group: Group,
    *,
    method: str = "flat",
    topology: Topology | None = None,
    tags: Tags | None = None,
) -> list[torch.Tensor]:
    """Moves the text of this micro-step to the LLM's layout and raw items to their encoders, in one exchange."""
    first = int(np.searchsorted(lengths.home, rank))
    parcels = [drawn[i - first].parcel for i in plan.samples[plan.home.rank_of_item == rank].tolist()]
    sizes = [lengths.num_bytes[plan.samples]]
    for name, stage in plan.stages.items():
        own = [item for sample in drawn for item in sample.items[name]]
        first_item = int(np.searchsorted(lengths.stages[name].sample, first))
        parcels += [own[i - first_item] for i in stage.items[stage.home.rank_of_item == rank].tolist()]
        sizes.append(lengths.stages[name].num_bytes[stage.items])
    num_bytes = np.concatenate(sizes)
    if tags is not None:
        parcels, num_bytes = tags.attach(parcels), num_bytes + TAG_BYTES
    return exchange_parcels(parcels, _all_parcels(plan), num_bytes, rank, group, method=method, topology=topology)


def open_step_parcels(
    parcels: Sequence[torch.Tensor], plan: MicroStepPlan, rank: int, tags: Tags | None = None
) -> Arrived:
    """What came by `exchange_step_parcels`, decoded."""
    names = list(plan.stages)
    pieces = iter(parcels if tags is None else tags.detach(parcels))
    here = int((plan.llm.rank_of_item == rank).sum())
    opened = [open_parcel(next(pieces), names) for _ in range(here)]
    items = {
        name: [decode_record(next(pieces)) for _ in range(int((stage.encode.rank_of_item == rank).sum()))]
        for name, stage in plan.stages.items()
    }
    samples, parts = [sample for sample, _ in opened], {name: [part[name] for _, part in opened] for name in names}
    num_real = here - _mask_fillers(samples, plan, rank)
    named = tuple({k: v for k, v in s.items() if isinstance(v, (str, int, float))} for s in samples[:num_real])
    return Arrived(samples, parts, items, named)


def stage_batch(
    stage: StagePlan, num_rows: IntArray, items: list[Item], parts: Sequence[Sequence[Item]], adapter: EncoderAdapter,
    rank: int, topology: Topology | None = None, tags: tuple[Tags | None, Tags | None] = (None, None),
) -> StageBatch:  # fmt: skip
    """What one stage does on this rank; `num_rows` (int64[m]) are the rows of each of the micro-step's items."""
    encoded = stage.encode.rank_of_item == rank
    needed = stage.llm.rank_of_item == rank
    return StageBatch(
        inputs=adapter.join(items or [adapter.dummy()]),
        num_rows=int(num_rows[encoded].sum()),
        exchange=Exchange.of(stage.to_llm, rank, num_rows, topology),
        parts=tuple(part for sample in parts for part in sample),
        part_rows=tuple(num_rows[needed].tolist()),
        num_items=len(stage.items),
        moves=not np.array_equal(stage.encode.rank_of_item, stage.llm.rank_of_item),
        tags=tags[0],
        tags_of_gradients=tags[1],
    )


def parcel_tags(plan: MicroStepPlan, rank: int, step: int) -> Tags:
    """The tags of the raw exchange."""
    ids = np.concatenate(ids_in(plan))
    return Tags.of(step, "exchange raw items", list(plan.stages), ids, _all_parcels(plan), rank)


def row_tags(plan: MicroStepPlan, name: str, num_rows: IntArray, rank: int, step: int) -> tuple[Tags, Tags]:
    """The tags of a stage's rows on their way to the LLM, and of their gradients on the way back."""
    names = list(plan.stages)
    ids, move = ids_in(plan)[1 + names.index(name)], plan.stages[name].to_llm
    there = Tags.of(step, f"stage {name}, exchange rows", names, ids, move, rank, num_rows)
    back = Tags.of(step, f"stage {name}, exchange gradients of rows", names, ids, move.inverse(), rank, num_rows)
    return there, back


def _all_parcels(plan: MicroStepPlan) -> Rearrangement:
    """Texts, then the items of each stage, as one rearrangement."""
    moves = [plan.to_llm, *(stage.to_encoder for stage in plan.stages.values())]
    num_ranks = plan.home.num_ranks
    source = np.concatenate([move.source.rank_of_item for move in moves])
    target = np.concatenate([move.target.rank_of_item for move in moves])
    return Rearrangement(Layout(source, num_ranks), Layout(target, num_ranks))


def _mask_fillers(samples: Sequence[dict[str, Any]], plan: MicroStepPlan, rank: int) -> int:
    """Fillers keep the collectives aligned; they are not trained on. Returns how many this rank has, at the end."""
    is_filler = np.arange(len(plan.samples)) >= len(plan.samples) - plan.num_fillers
    num_fillers = int(is_filler[plan.llm.rank_of_item == rank].sum())
    for sample in samples[len(samples) - num_fillers :]:
        sample["labels"] = torch.full_like(torch.as_tensor(sample["labels"]), IGNORE)
    return num_fillers


def to_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors of a nested dict, list or tuple, without waiting for pinned ones."""
    return _mapped(value, lambda tensor: tensor.to(device, non_blocking=True))


def pinned_for(value: Any, device: torch.device) -> Any:
    """The tensors of a nested dict, list or tuple in page-locked memory where they will be copied to a GPU."""
    if device.type != "cuda":
        return value
    return _mapped(value, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return value
