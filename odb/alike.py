"""Ranks whose loaders differ are told so before the first round of an epoch, lest they train on wrong samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from orch.comm.alike import check_alike
from orch.odb.options import Grouping
from orch.odb.peers import Peers
from orch.odb.sampling import GivenOrder, ShardedOrder
from orch.odb.state import RoundRecord

if TYPE_CHECKING:
    from orch.odb.loader import ODBDataLoader

T = TypeVar("T")


def once_alike(settings: Mapping[str, object], peers: Peers, rounds: Iterable[T]) -> Iterator[T]:
    """Yields the rounds of an epoch, after `check_alike`: in the same thread, ahead of whatever they exchange."""
    if peers.num_ranks > 1:
        with peers.explaining():
            check_alike("`ODBDataLoader`", settings, peers.group, label="odb")
    yield from rounds


def settings_of(
    loader: ODBDataLoader, begin: RoundRecord, grouping: Grouping, *, is_collated: bool
) -> dict[str, object]:
    """What must be the same on all ranks in an epoch, and what to call it.

    Args:
        loader: This rank's loader.
        begin: Where the epoch begins.
        grouping: How it is iterated, which need not be the loader's own way,
        is_collated: and whether as batches.
    """
    takes_share = loader.order is None and loader.shard_stream
    nodes = np.bincount(loader.topology.node_of_rank).tolist() if grouping == "global" else None
    return {
        "`token_budget`": loader.token_budget,
        "`layout`": loader.layout,
        "`max_samples`": loader.budget.max_samples,
        "`grouping`": grouping,
        "`mixes_lengths`": loader.mixes_lengths,
        "`join`": loader.join,
        "`buffer_size`": loader.window_size.num_samples,
        "`accumulation_steps`": loader.accumulation_steps,
        "`loss_scaling`": loader.loss_scaling,
        "`shuffle`": loader.shuffle,
        "`seed`": loader.seed,
        "the number of samples of `dataset`": _num_samples(loader.order),
        "`shard_stream`": loader.shard_stream,
        "`num_workers` (each with its share of a stream)": max(1, loader.num_workers) if takes_share else None,
        "`topology` (ranks of each node)": nodes,
        "what is iterated": "batches" if is_collated else "groups",
        "the epoch (`set_epoch`, `load_state_dict`)": begin.epoch,
        "the number of rounds behind the loaded state": begin.num_rounds,
        "the number of micro-steps left of its last round": len(begin.groups),
    }


def _num_samples(order: ShardedOrder | GivenOrder | None) -> int | str:
    if order is None:
        return "up to a stream"
    return order.num_samples if isinstance(order, ShardedOrder) else "up to a `sampler`"
