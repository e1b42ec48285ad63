"""Layouts say where every item is; rearrangements lead from one layout to another.

Items keep ascending global ids on every rank. A layout is then one array, the inverse of a rearrangement is a swap of
its two layouts, and a composition keeps the first source and the last target.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from orch.comm.splits import Splits
from orch.comm.topology import IntArray, Topology


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where every item is.

    Attributes:
        rank_of_item: int64[N], the rank that holds each item; on a rank, items lie in ascending id.
        num_ranks: Number of ranks.

    Raises:
        ValueError: If `rank_of_item` is not a vector of ranks in [0, num_ranks).
    """

    rank_of_item: IntArray
    num_ranks: int

    def __post_init__(self) -> None:
        ranks = np.asarray(self.rank_of_item)
        if ranks.ndim != 1:
            raise ValueError(f"`rank_of_item` must be a vector, but has shape {ranks.shape} instead.")
        if ranks.size and not (ranks.min() >= 0 and ranks.max() < self.num_ranks):
            raise ValueError(
                f"`rank_of_item` must be in [0, {self.num_ranks}), but spans [{ranks.min()}, {ranks.max()}] instead."
            )
        object.__setattr__(self, "rank_of_item", np.ascontiguousarray(ranks, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rank_of_item)

    def items_on(self, rank: int) -> IntArray:
        """Ids of the items on `rank`, ascending: int64[n]."""
        return np.flatnonzero(self.rank_of_item == rank)

    def num_items_per_rank(self) -> IntArray:
        """Number of items on each rank: int64[num_ranks]."""
        return np.bincount(self.rank_of_item, minlength=self.num_ranks).astype(np.int64)

    def select(self, items: IntArray) -> Layout:
        """The layout of a subset of the items, renumbered in the given order."""
        return Layout(self.rank_of_item[items], self.num_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Volumes:
    """What a rearrangement sends, one entry for each pair of ranks that sends anything.

    Attributes:
        source: int64[P], the sending rank of each pair.
        target: int64[P], the receiving rank; pairs with source == target are not listed.
        size: int64[P], what is sent, in the unit of the sizes given (bytes, rows).
    """

    source: IntArray
    target: IntArray
    size: IntArray

    def intra_and_inter_node(self, topology: Topology) -> tuple[int, int]:
        """Size that moves between ranks of one node, and size that crosses nodes."""
        crosses = topology.node_of_rank[self.source] != topology.node_of_rank[self.target]
        return int(self.size[~crosses].sum()), int(self.size[crosses].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Rearrangement:
    """The plan that leads from one layout of the same items to another."""

    source: Layout
    target: Layout

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target) or self.source.num_ranks != self.target.num_ranks:
            raise ValueError(
                "`target` must lay out the items and ranks of `source`, but has "
                f"{len(self.target)} items on {self.target.num_ranks} ranks instead of "
                f"{len(self.source)} on {self.source.num_ranks}."
            )

    def inverse(self) -> Rearrangement:
        """The way back."""
        return Rearrangement(self.target, self.source)

    def then(self, following: Rearrangement) -> Rearrangement:
        """The composition: first this, then `following`, in one go.

        Raises:
            ValueError: If `following` does not start where this one ends.
        """
        if not np.array_equal(self.target.rank_of_item, following.source.rank_of_item):
            raise ValueError(
                "`following` must start at the target of this rearrangement, but starts elsewhere instead."
            )
        return Rearrangement(self.source, following.target)

    def volumes(self, sizes: IntArray) -> Volumes:
        """What each pair of ranks sends, given the size of each item (int64[N])."""
        moves = np.flatnonzero(self.source.rank_of_item != self.target.rank_of_item)
        pair = self.source.rank_of_item[moves] * self.source.num_ranks + self.target.rank_of_item[moves]
        pairs, index = np.unique(pair, return_inverse=True)
        size = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(size, index, np.asarray(sizes, dtype=np.int64)[moves])
        return Volumes(pairs // self.source.num_ranks, pairs % self.source.num_ranks, size)


@dataclass(frozen=True, slots=True, eq=False)
class Exchange(Splits):
    """One rank's view of a rearrangement of items that are made of rows.

    The rank lays its rows out by `send_index`, cuts them by `send_splits`, receives pieces of `recv_splits` in the
    order of their source ranks, and puts them into ascending item id by `recv_index`.

    Attributes:
        send_index: int64[rows sent], for each row sent its position among this rank's rows in the source layout.
        recv_index: int64[rows received], for each row of the target layout its position among the rows received.
    """

    send_index: IntArray
    recv_index: IntArray

    @classmethod
    def of(
        cls, rearrangement: Rearrangement, rank: int, num_rows: IntArray, topology: Topology | None = None
    ) -> Exchange:
        """The view of `rank`, where item i has `num_rows[i]` rows (int64[N]).

        Args:
            rearrangement: Where the items are and where they go.
            rank: This rank.
            num_rows: int64[N].
            topology: Ranks and nodes; the methods "node_wise" and "auto" need it.

        Raises:
            ValueError: If the topology has another number of ranks.
        """
        source, target = rearrangement.source.rank_of_item, rearrangement.target.rank_of_item
        num_rows = np.asarray(num_rows, dtype=np.int64)
        splits = Splits.between(source, target, num_rows, rank, rearrangement.source.num_ranks, topology)
        sent, received = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
        send_order = np.argsort(target[sent], kind="stable")
        recv_order = np.argsort(source[received], kind="stable")
        arrival = np.argsort(recv_order, kind="stable")
        return cls(
            **{field.name: getattr(splits, field.name) for field in fields(Splits)},
            send_index=_rows_of(num_rows[sent], send_order),
            recv_index=_rows_of(num_rows[received][recv_order], arrival),
        )

    def inverse(self) -> Exchange:
        """The way back, as the backward pass needs it."""
        return Exchange(
            send_index=_inverse_permutation(self.recv_index),
            send_splits=self.recv_splits,
            recv_splits=self.send_splits,
            recv_index=_inverse_permutation(self.send_index),
            send_starts=self.recv_starts,
            recv_starts=self.send_starts,
            most_sent=self.most_received,
            most_received=self.most_sent,
            nodes=None if self.nodes is None else self.nodes.inverse(),
        )


def _rows_of(num_rows: IntArray, order: IntArray) -> IntArray:
    """Row positions of items of `num_rows` rows each, when the items are taken in `order`."""
    starts = np.cumsum(num_rows) - num_rows
    counts = num_rows[order]
    offset = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts[order], counts) + offset


def _inverse_permutation(permutation: IntArray) -> IntArray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation), dtype=np.int64)
    return inverse
