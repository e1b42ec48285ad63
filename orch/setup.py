"""What a run fixes once: stages, ranks, groups, costs, and how the engine divides gradients."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from orch import __version__
from orch.choices import Choices
from orch.comm.alike import check_alike, told
from orch.comm.counts import check_count
from orch.comm.groups import Group, get_rank, get_world_size, new_cpu_group, new_node_groups
from orch.comm.hosts import discover_topology
from orch.comm.liveness import Liveness, LivenessConfig
from orch.comm.topology import Topology
from orch.config import BalanceConfig, StageConfig
from orch.cost import CostModel, PackedCost, PaddedCost
from orch.cost_fit import transformer_flops
from orch.engine import EngineInfo, read_engine
from orch.micro_step import instrument_model, watch_of
from orch.prepare import Collate
from orch.stages import EncoderAdapter, Stage, stages_in
from orch.unstaged import Unstaged, unstaged_encoders
from orch.unused_keys import UnusedKeys

_ENCODER_CONFIGS = ("vision_config", "audio_config")  # of a model's configuration


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What a run fixes once; see `orch.orchestrate` for what each choice means.

    Attributes:
        choices: What the script chose.
        engine: The engine as orch sees it.
        stages: The stages of its model by name.
        rank: This process's rank among the data-parallel ranks.
        topology: Ranks and nodes.
        config: How to balance.
        accumulate: K, groups drawn for each optimizer step.
        collate: Samples and parts to the arguments of the model.
        placeholders: Token ids that stand for rows of each stage, where known.
        unstaged: Encoders with a known adapter that are no stages; none with a collator of one's own, which may feed
            them.
        unused_keys: Names keys that nothing takes; None with a `collate_fn` of the script's own.
        integers: CPU group for lengths; the background thread's own.
        parcels: The same for raw items, with the groups of its hops where they may travel node-wise.
        rows: Group for encoder outputs, with those of its hops; the training thread's own.
        device: Where the model is.
        liveness: This rank's heartbeat and its view of the others.
    """

    choices: Choices
    engine: EngineInfo
    stages: Mapping[str, Stage]
    rank: int
    topology: Topology
    config: BalanceConfig
    accumulate: int
    collate: Collate
    placeholders: Mapping[str, Sequence[int]]
    unstaged: Sequence[Unstaged]
    unused_keys: UnusedKeys | None
    integers: dist.ProcessGroup | None
    parcels: Group
    rows: Group
    device: torch.device
    liveness: Liveness

    @property
    def parcel_method(self) -> str:
        """How raw items travel; the baseline of all-gather is for encoder outputs alone."""
        return "flat" if self.choices.exchange == "all_gather" else self.choices.exchange

    @property
    def adapters(self) -> dict[str, EncoderAdapter]:
        """The adapter of each stage."""
        return {name: stage.adapter for name, stage in self.stages.items()}

    def describe(self) -> str:
        """All that ranks must agree on before a step, in words: what was chosen, and what came of it."""
        return (
            f"{told(self.choices)} and so {told(self.config)}, {self.topology}, accumulate={self.accumulate}, "
            f"trained tensors and dtypes {self._trained()}"
        )

    def _trained(self) -> dict[str, tuple[int, list[str]]]:
        """How many tensors of each stage are trained (where none is, its rows have no way back), and all dtypes."""
        parameters = {name: list(stage.encoder.parameters()) for name, stage in self.stages.items()}
        return {
            name: (sum(p.requires_grad for p in of_stage), sorted({str(p.dtype) for p in of_stage}))
            for name, of_stage in parameters.items()
        }

    def fingerprint(self) -> int:
        """A 63-bit hash of `describe()`."""
        return int.from_bytes(hashlib.blake2b(self.describe().encode(), digest_size=8).digest(), "little") >> 1


def make_setup(
    engine: nn.Module,
    choices: Choices,
    *,
    collate_fn: Collate | None,
    group: dist.ProcessGroup | DeviceMesh | None,
    timeout_s: float,
) -> Setup:
    """Reads the engine, instruments its model and makes the groups; every rank calls it at the same point."""
    info = read_engine(engine, group)
    model, num_ranks = info.model, get_world_size(info.group)
    stages = stages_in(model)
    if not stages and any(hasattr(model.config, name) for name in _ENCODER_CONFIGS):
        warnings.warn("No encoder of the model is a stage: call `orch.stage` on each before this.", stacklevel=3)
    for stage in stages.values():
        stage.bind(model.config)
    instrument_model(model)
    watch_of(model).watch_engine(engine)
    backbone = importlib.import_module("orch.encoders.backbone")
    liveness = _heartbeat(timeout_s)
    with liveness.guard("set up"):
        integers = new_cpu_group(info.group, timeout_s=timeout_s)
        adapters = str({name: type(stage.adapter).__name__ for name, stage in stages.items()})  # in their order
        settings = {"the version of orch": __version__, **choices.by_name(), "the adapter of each stage": adapters}
        check_alike("`orch.orchestrate`", settings, integers, label="choices")
        choices.check(num_ranks)
        topology = choices.topology or discover_topology(integers)
        parcels = _with_hops(integers, topology, choices.exchange, timeout_s)
        rows = _with_hops(_rows_group(info.group, timeout_s), topology, choices.exchange, timeout_s)
    liveness.pause()  # a rank whose loader is never iterated may leave
    placeholders = {name: backbone.placeholder_ids(model, stage.adapter) for name, stage in stages.items()}
    return Setup(
        choices=choices,
        engine=info,
        stages=stages,
        rank=get_rank(info.group),
        topology=topology,
        config=_balance_config(model, stages, choices, backbone),
        accumulate=_accumulate(info, choices.accumulate),
        collate=collate_fn or backbone.collator_for(model, choices.layout),
        placeholders=placeholders,
        unstaged=() if collate_fn else unstaged_encoders(model, stages, placeholders),
        unused_keys=UnusedKeys(chain(*(stage.adapter.keys for stage in stages.values()))) if not collate_fn else None,
        integers=integers,
        parcels=parcels,
        rows=rows,
        device=next(model.parameters()).device,
        liveness=liveness,
    )


def _heartbeat(timeout_s: float) -> Liveness:
    """One heartbeat for each process, whatever the number of loaders: the first one's limits hold.

    One that began before there were other ranks has nobody to tell, and gives way.
    """
    if not _heartbeats or (_heartbeats[0].board is None and get_world_size() > 1):
        _heartbeats[:] = [_start_heartbeat(timeout_s)]
    return _heartbeats[0]


_heartbeats: list[Liveness] = []


def _start_heartbeat(timeout_s: float) -> Liveness:
    """A silent rank ends the others within a minute."""
    silent_s = max(2.0, min(30.0, timeout_s))
    return Liveness.start(
        LivenessConfig(suspect_after_s=min(5.0, silent_s), lost_after_s=silent_s, end_after_s=min(10.0, timeout_s))
    )


def _accumulate(info: EngineInfo, accumulate: int | None) -> int:
    """K, as given or as the engine says; DeepSpeed divides by its own, so the two must agree there."""
    known = info.accumulate
    if accumulate is not None and known is not None and accumulate != known:
        raise ValueError(f"`accumulate` must be the engine's {known}, but is {accumulate} instead.")
    chosen = next(value for value in (accumulate, known, 1) if value is not None)
    check_count("accumulate", chosen)
    return chosen


def _rows_group(group: dist.ProcessGroup | None, timeout_s: float) -> dist.ProcessGroup | None:
    """The engine's own group on GPUs (concurrent NCCL communicators can deadlock); on CPUs a group apart."""
    if group is None or dist.get_backend(group) != "gloo":
        return group
    return new_cpu_group(group, timeout_s=timeout_s)


def _with_hops(group: dist.ProcessGroup | None, topology: Topology, exchange: str, timeout_s: float) -> Group:
    """The group with those of two hops, where they may be used."""
    if group is None or not (exchange == "node_wise" or (exchange == "auto" and topology.num_nodes > 1)):
        return group
    return new_node_groups(group, topology, timeout_s=timeout_s)


def _balance_config(model: nn.Module, stages: Mapping[str, Stage], choices: Choices, backbone: Any) -> BalanceConfig:
    costs, is_packed = choices.costs or {}, choices.layout == "packed"
    if unknown := sorted(set(costs) - {*stages, "llm"}):
        raise ValueError(f"`costs` must be of the stages {[*stages, 'llm']}, but has {unknown} instead.")
    flops = transformer_flops(**backbone.llm_dimensions(model))
    cost: CostModel = flops if is_packed else PaddedCost(flops.per_item, flops.linear, flops.quadratic)
    encoders = {
        name: StageConfig(
            cost=costs.get(name) or _packed_cost(stage.adapter),
            dispatcher=choices.dispatcher,
            row_bytes=_row_bytes(model, stage),
        )
        for name, stage in stages.items()
    }
    llm = StageConfig(
        cost=costs.get("llm", cost),
        dispatcher=choices.dispatcher if is_packed else None,
        max_tokens=choices.max_tokens,
        layout=choices.layout,
    )
    return BalanceConfig(mode=choices.balance, llm=llm, stages=encoders, slack=choices.slack)


def _packed_cost(adapter: EncoderAdapter) -> PackedCost:
    per_item, linear, quadratic = adapter.cost()
    return PackedCost(per_item=per_item, linear=linear, quadratic=quadratic)


def _row_bytes(model: Any, stage: Stage) -> int:
    """Bytes of one row that leaves the encoder: of the LLM's width, if its adapter does not say, in its dtype."""
    width: int = getattr(stage.adapter, "row_width", 0) or model.config.get_text_config().hidden_size
    return width * next(chain(stage.encoder.parameters(), model.parameters())).element_size()
