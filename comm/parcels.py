"""Exchange of parcels: whole samples and items as bytes, moved between ranks outside autograd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from orch.comm.collective_log import log_collective
from orch.comm.layout import Rearrangement
from orch.comm.topology import IntArray


def exchange_parcels(
    parcels: Sequence[torch.Tensor],
    rearrangement: Rearrangement,
    num_bytes: IntArray,
    rank: int,
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Moves every parcel from its source rank to its target rank.

    Args:
        parcels: This rank's parcels in the source layout, uint8[num_bytes[i]] each, in ascending id.
        rearrangement: The layouts of all parcels.
        num_bytes: int64[N], the size of every parcel; known on all ranks, so that no sizes are exchanged.
        rank: This rank within `group`.
        group: A group whose backend moves CPU tensors; None for a world of one rank.

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
        arrived = torch.empty(int(num_bytes[received].sum()), dtype=torch.uint8)
        recv_splits = _bytes_by_rank(source[received], num_bytes[received], rearrangement.source.num_ranks)
        send_splits = _bytes_by_rank(target[sent], num_bytes[sent], rearrangement.source.num_ranks)
        log_collective("all_to_all", "parcels", buffer.numel())
        dist.all_to_all_single(arrived, buffer, recv_splits, send_splits, group=group)
    pieces = torch.split(arrived, num_bytes[incoming].tolist()) if len(incoming) else ()
    by_id = dict(zip(incoming.tolist(), pieces, strict=True))
    return [by_id[i] for i in received.tolist()]


def _concatenated(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces)) if pieces else torch.empty(0, dtype=torch.uint8)


def _bytes_by_rank(ranks: IntArray, num_bytes: IntArray, num_ranks: int) -> list[int]:
    return np.bincount(ranks, weights=num_bytes, minlength=num_ranks).astype(np.int64).tolist()
