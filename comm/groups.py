"""Process groups, and ranks that are known without any: a single process is a world of one."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT_S = 600.0


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
    if not timeout_s > 0:
        raise ValueError(f"`timeout_s` must be above 0, but is {timeout_s} instead.")
    if not is_distributed():
        return None
    timeout = timedelta(seconds=timeout_s)
    ranks = get_global_ranks(parent)
    if ranks == list(range(get_world_size())):
        return dist.new_group(backend="gloo", timeout=timeout)
    if ranks != sorted(ranks):
        raise ValueError(f"`parent` must hold its ranks in ascending order, but holds {ranks} instead.")
    return dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)


def all_gather_single(
    output: Tensor, values: Tensor, group: ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Gathers equal tensors of all ranks into one, under the name that the installed torch has for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, values, group=group, async_op=async_op)


def destroy_group(group: ProcessGroup | None) -> None:
    """Releases a group made by `new_cpu_group`; nothing happens for None or after the world has gone."""
    if group is not None and is_distributed():
        dist.destroy_process_group(group)
