"""Ranks whose loaders differ are told so before the first round of an epoch, lest they train on wrong samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from orch.comm.groups import get_global_ranks
from orch.comm.hosts import decode_text, encode_text
from orch.odb.options import Grouping
from orch.odb.peers import Peers
from orch.odb.sampling import GivenOrder, ShardedOrder
from orch.odb.state import RoundRecord

if TYPE_CHECKING:
    from orch.odb.loader import ODBDataLoader

T = TypeVar("T")
MAX_NAMED = 4


def once_alike(settings: Mapping[str, object], peers: Peers, rounds: Iterable[T]) -> Iterator[T]:
    """Yields the rounds of an epoch, after `check_alike`: in the same thread, ahead of whatever they exchange."""
    check_alike(settings, peers)
    yield from rounds


def check_alike(settings: Mapping[str, object], peers: Peers) -> None:
    """Compares what ranks are about to do; all of them call it. A single rank exchanges nothing.

    Args:
        settings: Words for each setting, and its value, compared as text; the same settings on all ranks.
        peers: The ranks.

    Raises:
        ValueError: On all ranks alike, if any setting differs; names it, and who has which value.
        RankLostError: If a rank is gone.
    """
    if peers.num_ranks == 1:
        return
    own = json.dumps({name: str(value) for name, value in settings.items()})  # 1 and np.int64(1) are alike.
    told = [json.loads(decode_text(words)) for words in peers.gather(encode_text(own))]
    ranks = get_global_ranks(peers.group)
    values = {name: [each.get(name, "unknown") for each in told] for name in told[0]}
    wrong = [f"{name} is {_by_rank(found, ranks)}" for name, found in values.items() if len(set(found)) > 1]
    if wrong:
        raise ValueError(f"`ODBDataLoader` must be set up alike on all ranks, but {'; '.join(wrong)} instead.")


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


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Which ranks have which value, that of the lowest rank first."""
    having: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        having.setdefault(value, []).append(rank)
    words = [f"{value} on {_named(of_value)}" for value, of_value in having.items()]
    if len(words) > MAX_NAMED:
        words = [*words[:MAX_NAMED], f"{len(words) - MAX_NAMED} other values elsewhere"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"ranks {list(ranks[:MAX_NAMED])}{more}"
