"""The other ranks, as the loader sees them: integers from each, or all fail together."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from torch.distributed import ProcessGroup, distributed_c10d

from orch.comm.gather import RankFailedError, Status, gather, gather_status
from orch.comm.groups import get_rank, get_world_size, new_cpu_group
from orch.comm.topology import IntArray, Topology
from orch.odb.heartbeat import DEFAULT_LOST_AFTER_S, Heartbeat

LONGEST_WAIT_S = 7 * 86400.0
PATIENCE = 20


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The ranks that share a loader.

    Attributes:
        rank: This rank.
        num_ranks: All of them.
        group: A CPU group that the loader alone uses; None for a single rank.
        heartbeat: Tells who is alive; None for a single rank.
    """

    rank: int
    num_ranks: int
    group: ProcessGroup | None = None
    heartbeat: Heartbeat | None = None

    @property
    def patience_s(self) -> float:
        """For how many seconds others are waited for that are alive, once this rank has left what they are still in."""
        return math.inf if self.heartbeat is None else PATIENCE * self.heartbeat.lost_after_s

    def gather(self, values: Sequence[int] | IntArray) -> list[IntArray]:
        """One int64 vector from each rank.

        Raises:
            RankFailedError: On all ranks, if one told of a failure instead.
            RankLostError: If a rank is gone.
        """
        vector = np.asarray(values, dtype=np.int64)
        if self.num_ranks == 1:
            return [vector]
        with self.explaining():
            return gather(vector, Status.OK, "", self.group, label="odb").values

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Around a collective: says which rank is gone where the backend says that a connection is.

        Raises:
            RankLostError: If the collective fails.
        """
        try:
            yield
        except RankFailedError:
            raise
        except RuntimeError as error:
            if self.heartbeat is None:
                raise
            raise self.heartbeat.explain(error) from error

    def check(self) -> None:
        """Looks whether all ranks are alive; call it now and then while waiting.

        Raises:
            RankLostError: If one has been silent for too long.
        """
        if self.heartbeat is not None:
            self.heartbeat.check()

    def tell_failure(self, message: str) -> None:
        """Meets the others' `gather`, which raises there and names this rank."""
        if self.num_ranks == 1:
            return
        with contextlib.suppress(RankFailedError, RuntimeError):
            gather_status(Status.FAILED, message, self.group, label="odb")


def join_peers(
    group: ProcessGroup | None, rank: int | None, num_ranks: int | None, lost_after_s: float = DEFAULT_LOST_AFTER_S
) -> Peers:
    """The ranks that share the data, with a new CPU group of their own; all of them call it.

    Args:
        group: The data-parallel group; None for the world.
        rank: This rank, if not as `group` says; only 0 of 1 differs in that.
        num_ranks: Given with `rank`.
        lost_after_s: A rank that is silent for so long counts as lost; one that is late is waited for.

    Raises:
        ValueError: If the two are not given together, or do not fit `group`.
    """
    if (rank is None) != (num_ranks is None):
        raise ValueError(f"`rank` and `world_size` must be given together, but are {rank} and {num_ranks} instead.")
    known = get_rank(group), get_world_size(group)
    if rank is None or num_ranks is None:
        rank, num_ranks = known
    if (rank, num_ranks) not in (known, (0, 1)):
        raise ValueError(
            f"`rank` and `world_size` must be those of `group`, {known[0]} of {known[1]}, or 0 of 1, "
            f"but are {rank!r} of {num_ranks!r} instead."
        )
    if num_ranks == 1:
        return Peers(rank, num_ranks)
    own = new_cpu_group(group)
    assert own is not None
    # All ranks must come to make the group soon; from then on the heartbeat decides how long is too long.
    distributed_c10d._set_pg_timeout(timedelta(seconds=LONGEST_WAIT_S), own)
    return Peers(rank, num_ranks, own, Heartbeat(own, rank, lost_after_s))


def topology_of(peers: Peers, group: ProcessGroup | None) -> Topology:
    """Which ranks share a node, as the launcher tells each by LOCAL_WORLD_SIZE for the world; else all do.

    All ranks call it: on uneven nodes each is told the size of its own.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "") if group is None else ""
    own = int(said) if said.isdigit() else 0
    if peers.num_ranks == 1:
        return Topology(1)
    told = [int(size) for (size,) in peers.gather(np.array([own], dtype=np.int64))]
    sizes: list[int] = []
    while (begin := sum(sizes)) < len(told):
        size = told[begin]
        node = told[begin : begin + size]
        if size < 1 or set(node) != {size}:
            return Topology(peers.num_ranks)
        sizes.append(len(node))
    return Topology.of_node_sizes(tuple(sizes))
