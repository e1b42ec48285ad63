"""Exchange of parcels: whole samples and items as bytes, moved between ranks outside autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from orch.comm.all_to_all import start_splits
from orch.comm.groups import Group
from orch.comm.layout import Rearrangement
from orch.comm.splits import Splits
from orch.comm.topology import IntArray, Topology


def exchange_parcels(
    parcels: Sequence[torch.Tensor],
    rearrangement: Rearrangement,
    num_bytes: IntArray,
    rank: int,
    group: Group,
    *,
    method: str = "flat",
    topology: Topology | None = None,
) -> list[torch.Tensor]:
    """Moves every parcel from its source rank to its target rank.

    Args:
        parcels: This rank's parcels in the source layout, uint8[num_bytes[i]] each, in ascending id.
        rearrangement: The layouts of all parcels.
        num_bytes: int64[N], the size of every parcel; known on all ranks, so that no sizes are exchanged.
        rank: This rank within `group`.
        group: A group whose backend moves CPU tensors; None for a world of one rank.
        method: How, as in `orch.comm.all_to_all.exchange_many`.
        topology: Ranks and nodes; "node_wise" and "auto" need it.

    Returns:
        This rank's parcels in the target layout, in ascending id.
    """
    source, target = rearrangement.source.rank_of_item, rearrangement.target.rank_of_item
    sent, received = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
    assert len(sent) == len(parcels), (len(sent), len(parcels))
    outgoing = np.argsort(target[sent], kind="stable")
    incoming = received[np.argsort(source[received], kind="stable")]
    buffer = _concatenated([parcels[i] for i in outgoing])
    arrived = buffer
    if group is not None and rearrangement.source.num_ranks > 1:
        splits = Splits.between(source, target, num_bytes, rank, rearrangement.source.num_ranks, topology)
        arrived = start_splits(buffer, splits, group, method, "parcels")()
    pieces = torch.split(arrived, num_bytes[incoming].tolist()) if len(incoming) else ()
    by_id = dict(zip(incoming.tolist(), pieces, strict=True))
    return [by_id[i] for i in received.tolist()]


def _concatenated(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)
