"""Balancing on its own: lengths in, ranks out; for data loaders, RL frameworks and all that want no more than this."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orch.comm.counts import check_count
from orch.comm.topology import IntArray, Topology, check_topology_kind
from orch.cost import CostModel, PackedCost, is_additive
from orch.dispatch import DispatchProblem, check_dispatcher, check_slack, dispatch


def balance(
    lengths: npt.ArrayLike,
    home: npt.ArrayLike,
    topology: Topology,
    *,
    dispatcher: str = "local",
    cost: CostModel | None = None,
    max_tokens: int | None = None,
    sizes: npt.ArrayLike | None = None,
    slack: float = 0.0,
) -> IntArray:
    """Gives every item a rank, such that the costliest rank costs as little as possible.

    A function of the numbers: the same input gives the same result on any machine.

    Args:
        lengths: int64[N], length of each item.
        home: int64[N], the rank that drew each item.
        topology: Ranks and nodes.
        dispatcher: "local" (keep items at home, move the surplus), "greedy" (longest processing time first, polished),
            "binary_search" (padded batches) or "none".
        cost: What a batch costs; None counts tokens.
        max_tokens: The most tokens a rank may hold (padded costs: items times the longest). None allows the most that
            any rank drew, which is also kept with a number.
        sizes: int64[N], bytes of each item, of which few should move; None means `lengths`.
        slack: By what share the load of packed batches may exceed the least possible one, from 0 to 1. With 0.01 the
            plan is made sooner, and less moves.

    Returns:
        rank_of_item: int64[N].

    Raises:
        ValueError: If an argument is negative, out of range or of another length than `lengths`, if the dispatcher is
            unknown or does not suit the cost, or if no layout under `max_tokens` was found.
    """
    cost = cost if cost is not None else PackedCost()
    check_dispatcher(dispatcher, cost)
    check_slack(slack)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    length = as_counts("lengths", lengths)
    home_rank = as_ranks("home", home, len(length), topology)
    problem = DispatchProblem(
        lengths=length,
        home=home_rank,
        topology=topology,
        cost=cost,
        layout="packed" if is_additive(cost) else "padded",
        cap=None,
        move_bytes=None if sizes is None else as_counts("sizes", sizes, len(length)),
        slack=slack,
    )
    drawn = problem.largest_batch(home_rank)
    problem = problem.with_cap(drawn if max_tokens is None else min(drawn, max_tokens))
    ranks = dispatch(problem, dispatcher)
    if not problem.fits(ranks):
        least = problem.largest_batch(ranks)
        raise ValueError(f"`max_tokens` must be at least {least} for these lengths, but is {max_tokens} instead.")
    return ranks


def as_counts(name: str, values: npt.ArrayLike, size: int | None = None) -> IntArray:
    """A vector of non-negative integers as int64, or a `ValueError` that says what is wrong with it."""
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must be integers, but are {array.dtype} instead.")
    array = np.ascontiguousarray(array, dtype=np.int64)
    if array.ndim != 1 or (size is not None and len(array) != size):
        wanted = "a vector" if size is None else f"a vector of {size}"
        raise ValueError(f"`{name}` must be {wanted}, but has shape {array.shape} instead.")
    if array.size and int(array.min()) < 0:
        where = int(np.argmin(array))
        raise ValueError(f"`{name}` must not be negative, but is {array[where]} at {where} instead.")
    return array


def as_ranks(name: str, values: npt.ArrayLike, size: int, topology: Topology) -> IntArray:
    """A vector of ranks of the topology, or a `ValueError` that says what is wrong with it."""
    check_topology_kind(topology)
    array = as_counts(name, values, size)
    if array.size and int(array.max()) >= topology.num_ranks:
        raise ValueError(f"`{name}` must be below {topology.num_ranks}, but reaches {array.max()} instead.")
    return array
