"""Lengths in, groups out: which samples of a window share a group.

A group is an array of positions into the window, ascending. The result is a function of the lengths and their order
alone: ties keep the order of the window.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapreplace

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.budget import TokenBudget

Groups = list[IntArray]
DEALING_SLACK = 1 / 256


def form_groups(lengths: IntArray, budget: TokenBudget) -> Groups:
    """Cuts a window of samples into groups that keep the budget.

    Every position is in exactly one group. A sample over budget forms a group of its own.

    Padded groups are runs of the sorted lengths, cut from the longest: the fewest groups that any cut allows. Packed
    groups are dealt so that each has its share of long and short samples, by longest processing time first (Graham
    1969), and all are nearly full but the last; where that needs more groups than best fit decreasing (at most 11/9 of
    the optimum plus 4 groups; Johnson et al. 1974), which puts the long ones together, it is best fit.

    Args:
        lengths: int64[n], the length of each sample, in the order of the window.
        budget: When a group is full.

    Returns:
        The groups; the result depends on the lengths and their order alone.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    descending = np.argsort(-lengths, kind="stable")
    if budget.layout == "padded":
        groups = _padded_runs(lengths, descending, budget)
    else:
        groups = _dealt(lengths, budget)
        if len(groups) * budget.max_tokens >= int(lengths.sum()) + budget.max_tokens:  # perhaps there are fewer
            groups = min(groups, _best_fit(lengths, descending, budget), key=len)
    return [np.sort(group) for group in groups]


def _dealt(lengths: IntArray, budget: TokenBudget) -> Groups:
    """As many full groups as the samples make, each with its share of long and short ones; then what is left.

    The samples at the end of the window are left, whatever their lengths, so that none waits for being short.
    """
    total = np.cumsum(np.minimum(lengths, budget.max_tokens))
    num_groups = int(total[-1]) // budget.max_tokens
    num_dealt = int(np.searchsorted(total, num_groups * budget.max_tokens * (1 - DEALING_SLACK), side="right"))
    descending = np.argsort(-lengths[:num_dealt], kind="stable")
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    left: list[int] = []
    for position, length in zip(descending.tolist(), lengths[descending].tolist(), strict=True):
        load, group = loads[0]
        is_open = budget.max_samples is None or len(groups[group]) < budget.max_samples
        if is_open and (load + length <= budget.max_tokens or not load):
            groups[group].append(position)
            heapreplace(loads, (load + length, group))
        else:
            left.append(position)
    rest = np.sort(np.array([*left, *range(num_dealt, len(lengths))], dtype=np.int64))
    by_length = rest[np.argsort(-lengths[rest], kind="stable")]
    dealt = [np.array(group, dtype=np.int64) for group in groups if group]
    return dealt + (_best_fit(lengths, by_length, budget) if len(rest) else [])


def spread(lengths: IntArray, num_groups: int) -> Groups:
    """Deals all samples to groups of nearly as many tokens, each with its share of long and short ones (LPT)."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]
    descending = np.argsort(-lengths, kind="stable")
    for position, length in zip(descending.tolist(), lengths[descending].tolist(), strict=True):
        load, group = loads[0]
        groups[group].append(position)
        heapreplace(loads, (load + length, group))
    return [np.sort(np.array(group, dtype=np.int64)) for group in groups if group]


def _padded_runs(lengths: IntArray, descending: IntArray, budget: TokenBudget) -> Groups:
    groups, start = [], 0
    while start < len(descending):
        end = start + budget.capacity(int(lengths[descending[start]]))
        groups.append(descending[start:end])
        start = end
    return groups


def _best_fit(lengths: IntArray, descending: IntArray, budget: TokenBudget) -> Groups:
    """Each sample goes into the open group with the least room that still takes it; the oldest such group on a tie."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, group), ascending; full groups leave the list
    shortest = int(lengths[descending[-1]])
    for position, length in zip(descending.tolist(), lengths[descending].tolist(), strict=True):
        slot = bisect_left(rooms, (length, -1))
        if slot < len(rooms):
            room, group = rooms.pop(slot)
            groups[group].append(position)
        else:
            room, group = budget.max_tokens, len(groups)
            groups.append([position])
        room -= length
        if room >= shortest and (budget.max_samples is None or len(groups[group]) < budget.max_samples):
            insort(rooms, (room, group))
    return [np.array(group, dtype=np.int64) for group in groups]


def split_groups(groups: Groups, lengths: IntArray, num_groups: int) -> Groups:
    """Splits groups until there are `num_groups`; each halving takes the group of the most samples, the first on a tie.

    Raises:
        ValueError: If there are fewer samples than `num_groups`.
    """
    num_samples = sum(map(len, groups))
    if num_samples < num_groups:
        raise ValueError(f"`num_groups` must be at most {num_samples} samples, but is {num_groups} instead.")
    groups = list(groups)
    while len(groups) < num_groups:
        widest = max(range(len(groups)), key=lambda i: (len(groups[i]), -i))
        first, second = _halves(groups[widest], lengths)
        groups[widest] = first
        groups.insert(widest + 1, second)
    return groups


def _halves(group: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """The longer and the shorter half of a group, so that padding does not grow."""
    descending = group[np.argsort(-lengths[group], kind="stable")]
    half = (len(group) + 1) // 2
    return np.sort(descending[:half]), np.sort(descending[half:])
