"""What no plan can beat: the least possible largest load, and the least bytes that must cross nodes."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orch.balancing import as_counts, as_ranks
from orch.comm.topology import IntArray, Topology
from orch.cost import CostModel, PackedCost, PaddedLikeCost, is_additive, sum_by_bin
from orch.dispatch import DISPATCHERS, DispatchProblem
from orch.dispatch.bounds import least_load
from orch.dispatch.order import ascending, run_starts


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Bounds of one instance.

    Attributes:
        load: No layout has a smaller largest load, in units of the cost.
        target: The largest load that `inter_node` allows.
        inter_node: No layout with loads up to `target` moves fewer bytes between nodes; 0 for padded costs.
    """

    load: int
    target: int
    inter_node: int


def lower_bounds(
    lengths: npt.ArrayLike,
    home: npt.ArrayLike,
    topology: Topology,
    *,
    cost: CostModel | None = None,
    sizes: npt.ArrayLike | None = None,
    target: int | None = None,
) -> LowerBounds:
    """Bounds that every plan for these items can be measured against.

    The load of a packed batch: mean, longest item, and the pigeonhole bound of `least_load`; of a padded batch: the
    optimum itself, by `binary_search`. The bytes: a node that holds more than its ranks may at the target must send
    the rest, and sends at least what its cheapest items for their cost weigh, the last one counted in part.

    Args:
        lengths: int64[N], length of each item.
        home: int64[N], the rank that drew each item.
        topology: Ranks and nodes.
        cost: What a batch costs; None counts tokens.
        sizes: int64[N], bytes of each item; None means `lengths`.
        target: The largest load allowed; None means 1.01 times the bound.

    Raises:
        ValueError: If an argument is negative, out of range or of another length than `lengths`, or the cost is
            neither additive nor has a padded part.
    """
    cost = cost if cost is not None else PackedCost()
    length = as_counts("lengths", lengths)
    home_rank = as_ranks("home", home, len(length), topology)
    size = length if sizes is None else as_counts("sizes", sizes, len(length))
    if target is not None and (not isinstance(target, numbers.Integral) or target < 0):
        raise ValueError(f"`target` must be a whole number of the cost's units, not negative, but is {target} instead.")
    if not is_additive(cost):
        load = _padded_load(DispatchProblem(length, home_rank, topology, cost, layout="padded"))
        return LowerBounds(load, load + load // 100 if target is None else target, 0)
    costs = cost.item_costs(length)
    load = least_load(costs, topology.num_ranks)
    target = load + load // 100 if target is None else target
    return LowerBounds(load, target, _least_crossing(costs, size, topology.node_of_rank[home_rank], topology, target))


def _padded_load(problem: DispatchProblem) -> int:
    """The optimum of a padded cost; with a packed rest, the longest item or the mean without padding."""
    if not isinstance(problem.cost, PaddedLikeCost):
        raise ValueError(f"`cost` must be additive or have a padded part, but is {problem.cost} instead.")
    packed = problem.cost.packed_costs(problem.lengths)
    if packed is None:
        return problem.largest_load(DISPATCHERS["binary_search"](problem))
    return least_load(packed + problem.cost.slot_costs(problem.lengths), problem.num_bins)


def _least_crossing(costs: IntArray, sizes: IntArray, node: IntArray, topology: Topology, target: int) -> int:
    """The fractional relaxation of each node's cheapest surplus, rounded down."""
    excess = sum_by_bin(costs, node, topology.num_nodes) - target * topology.num_ranks_of_node
    items = np.flatnonzero((costs > 0) & (excess[node] > 0))
    if not len(items):
        return 0
    density = np.argsort(np.argsort(sizes[items] / costs[items], kind="stable"), kind="stable")
    items = items[ascending(node[items], density)]
    owner = node[items]
    total = np.cumsum(costs[items])
    before = total - costs[items] - (total - costs[items])[run_starts(owner)]
    share = np.clip((excess[owner] - before) / costs[items], 0.0, 1.0)
    return int((share * sizes[items]).sum())
