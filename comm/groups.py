"""Process groups, and ranks that are known without any: a single process is a world of one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from orch.comm.counts import check_seconds
from orch.comm.topology import IntArray, Topology

DEFAULT_TIMEOUT_S = 600.0
_SETTLE_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class NodeGroups:
    """A group, and the groups of its two hops: inside each node, and across nodes.

    Attributes:
        whole: The group itself.
        inside: This rank's node; None where it has one rank.
        across: Ranks that exchange rows between nodes. With equal nodes it holds one rank of each, those with the same
            place in their nodes. In uneven nodes some rank serves several places, no partition holds all pairs, and it
            is the whole group.
        across_ranks: int64[n], the rank in `whole` of each rank of `across`.
    """

    whole: ProcessGroup
    inside: ProcessGroup | None
    across: ProcessGroup
    across_ranks: IntArray


Group = ProcessGroup | NodeGroups | None
"""Where an exchange takes place; None for the world, or a world of one."""


def group_of_axis(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The group of a mesh's only axis; a group as it is.

    Raises:
        ValueError: If it is neither, the mesh has several axes, or the group does not hold this rank.
    """
    if group is None or isinstance(group, ProcessGroup):
        return group
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"`group` must hold rank {get_rank()}, which calls this, but is of other ranks instead.")
    is_mesh = isinstance(group, DeviceMesh)
    found = f"a mesh of {group.ndim} axes {group.mesh_dim_names or ''}" if is_mesh else repr(group)
    raise ValueError(
        f"`group` must be a process group or one axis of a mesh, as in `mesh['dp']`, but is {found} instead."
    )


def whole_of(group: Group) -> ProcessGroup | None:
    """The group itself, without those of its hops."""
    return group.whole if isinstance(group, NodeGroups) else group


def new_node_groups(
    whole: ProcessGroup, topology: Topology, *, timeout_s: float = DEFAULT_TIMEOUT_S, like: str | None = None
) -> NodeGroups:
    """Makes the groups of two hops; every rank of `whole` must call it, in the same order as its other groups.

    Leaves all ranks of `whole` in equally many groups, so that groups which only their ranks make can be made after it:
    those of fewer are given groups of their own.

    Args:
        whole: The group whose rows travel.
        topology: Nodes of its ranks.
        timeout_s: Seconds after which a collective of the new groups raises.
        like: Backend of the new groups; that of `whole` if not given.

    Raises:
        ValueError: If the topology has another number of ranks, or `timeout_s` is not positive.
    """
    if topology.num_ranks != get_world_size(whole):
        raise ValueError(f"`topology` must have {get_world_size(whole)} ranks, but has {topology.num_ranks} instead.")
    backend, rank = like or dist.get_backend(whole), get_rank(whole)
    neighbours = topology.ranks_of_node(int(topology.node_of_rank[rank]))
    _level_group_counts(whole)
    inside = _subgroup(whole, neighbours, backend, timeout_s) if len(neighbours) > 1 else None
    _level_group_counts(whole)  # a rank that is alone on its node has made none
    if not topology.is_even or topology.num_nodes == 1 or topology.node_size == 1:
        return NodeGroups(whole, inside, whole, np.arange(topology.num_ranks, dtype=np.int64))
    same_place = np.flatnonzero(topology.local_rank == topology.local_rank[rank])
    return NodeGroups(whole, inside, _subgroup(whole, same_place, backend, timeout_s), same_place)


def _level_group_counts(parent: ProcessGroup | None) -> None:
    """Makes all ranks of `parent` members of equally many groups; those of fewer make some of their own.

    torch names a group that only its ranks make by these ranks and by the number of groups that the caller is in
    (`use_local_synchronization`): under unequal names its ranks would wait for each other in vain.
    """
    device = "cuda" if dist.get_backend(parent) == "nccl" else "cpu"
    own = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=parent)
    for _ in range(int(most) - own):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _subgroup(whole: ProcessGroup, ranks: IntArray, backend: str, timeout_s: float) -> ProcessGroup:
    """A group of some ranks of `whole`; only they call it."""
    known = get_global_ranks(whole)
    return dist.new_group(
        [known[rank] for rank in ranks],
        backend=backend,
        timeout=_timeout(timeout_s),
        use_local_synchronization=True,
    )


def _timeout(timeout_s: float) -> timedelta:
    check_seconds("timeout_s", timeout_s)
    return timedelta(seconds=float(timeout_s))


def is_distributed() -> bool:
    """Whether `torch.distributed` is initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Rank of this process in `group` (None: the world); 0 without `torch.distributed`."""
    return dist.get_rank(group) if is_distributed() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks of `group` (None: the world); 1 without `torch.distributed`."""
    return dist.get_world_size(group) if is_distributed() else 1


def get_global_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Rank in the world of each rank of `group` (None: the world); [0] without `torch.distributed`."""
    if not is_distributed():
        return [0]
    return list(dist.get_process_group_ranks(group or dist.group.WORLD))


def new_cpu_group(parent: ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ProcessGroup | None:
    """A gloo group of orch's own over the ranks of `parent`, for integers and raw items.

    Every rank of `parent` must call it, in the same order as its other groups; ranks outside need not. So each
    data-parallel subgroup (one column of a `DeviceMesh`: `mesh.get_group("dp")`) can make its own.

    Args:
        parent: The data-parallel group; None for the world.
        timeout_s: Seconds after which a collective of the group raises.

    Returns:
        The group, or None without `torch.distributed`, which all of `orch.comm` takes for a world of one.

    Raises:
        ValueError: If `timeout_s` is not positive or the ranks of `parent` do not ascend.
    """
    timeout = _timeout(timeout_s)
    if not is_distributed():
        return None
    ranks = get_global_ranks(parent)
    if ranks == list(range(get_world_size())):
        return dist.new_group(backend="gloo", timeout=timeout)
    if ranks != sorted(ranks):
        raise ValueError(f"`parent` must hold its ranks in ascending order, but holds {ranks} instead.")
    _level_group_counts(parent)
    return dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)


def all_gather_single(
    output: Tensor, values: Tensor, group: ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Gathers equal tensors of all ranks into one, under the name that the installed torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, values, group=group, async_op=async_op)


def destroy_group(group: Group) -> None:
    """Releases what was made: the group of `new_cpu_group`, or the hops of `new_node_groups`, not what these join.

    Nothing happens for None, for the world or without one.
    """
    made = (
        [hop for hop in (group.inside, group.across) if hop is not group.whole]
        if isinstance(group, NodeGroups)
        else [group]
    )
    for each in made:
        if is_distributed() and each not in (None, dist.group.WORLD):
            dist.destroy_process_group(each)


def settle_before_exit() -> None:
    """Lets gloo's threads drop the tensors of the last collective; to be called at exit.

    They do so a moment after the collective has returned, and need the interpreter for it: if that is ending, the
    process is aborted ("terminate called without an active exception").
    """
    time.sleep(_SETTLE_S)
