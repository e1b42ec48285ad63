"""The node-wise exchange: bytes for other nodes are collected inside the node, then cross, once per pair of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from orch.comm.collective_log import log_collective
from orch.comm.groups import Group, NodeGroups
from orch.comm.splits import Splits
from orch.comm.topology import IntArray
from orch.comm.two_hops import TwoHops


def start_node_wise(buffer: Tensor, splits: Splits, group: Group, label: str) -> Callable[[], Tensor]:
    """Begins the first hop; the second begins, and ends, when the result is asked for.

    Args:
        buffer: [rows sent, ...], in the order of the ranks they are for.
        splits: This rank's view, made with a topology.
        group: The group with those of its hops.
        label: What it is for, in a `CollectiveLog`; the first hop is called "inside".

    Returns:
        A function that waits and returns [rows received, ...], in the order of the ranks they come from.

    Raises:
        ValueError: If the hops are not known, for want of a topology or groups.
    """
    if splits.nodes is None or not isinstance(group, NodeGroups):
        raise ValueError(
            f"`exchange` and `group` of {label!r} must be made with a topology for the method 'node_wise', "
            f"but are made without: see `Exchange.of(..., topology)` and `new_node_groups`."
        )
    hops = TwoHops.of(splits)
    leaving = take_blocks(buffer, hops.send_sizes, hops.send_blocks)
    collected = _start_hop(leaving, hops.inside_send, hops.inside_recv, group.inside, f"{label}.inside")

    def finish() -> Tensor:
        arrived = collected()
        ranks = group.across_ranks
        crossing = take_blocks(arrived, hops.collected_sizes, hops.across_blocks)
        across = _start_hop(crossing, hops.across_send[ranks], hops.across_recv[ranks], group.across, label)
        staying = take_blocks(arrived, hops.collected_sizes, hops.staying_blocks)
        return in_order_of_sources(staying, across(), hops)

    return finish


def in_order_of_sources(staying: Tensor, crossed: Tensor, hops: TwoHops) -> Tensor:
    """Puts the rows of this rank's node between those of the nodes before and after it."""
    return torch.cat([crossed[: hops.own_place], staying, crossed[hops.own_place :]])


def take_blocks(buffer: Tensor, sizes: IntArray, blocks: IntArray) -> Tensor:
    """The given blocks of a buffer that is cut into blocks of `sizes` rows, behind each other."""
    pieces = torch.split(buffer, sizes.tolist())
    chosen = [pieces[block] for block in blocks.tolist() if len(pieces[block])]
    return torch.cat(chosen) if chosen else buffer[:0]


def _start_hop(
    buffer: Tensor, send: IntArray, recv: IntArray, group: ProcessGroup | None, label: str
) -> Callable[[], Tensor]:
    """One all-to-all; None is a node of one rank, which keeps what it has."""
    if group is None:
        return lambda: buffer
    received = buffer.new_empty((int(recv.sum()), *buffer.shape[1:]))
    log_collective("all_to_all", label, buffer.numel() * buffer.element_size())
    work: Any = dist.all_to_all_single(received, buffer, recv.tolist(), send.tolist(), group=group, async_op=True)

    def finish(sent: Tensor = buffer) -> Tensor:
        work.wait()
        return received

    return finish
