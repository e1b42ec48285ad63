"""Lengths in, groups out: which samples of a window share a group.

A group is an array of positions into the window, ascending. The result is a function of the lengths and their order
alone: ties keep the order of the window.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.budget import TokenBudget

Groups = list[IntArray]


def form_groups(lengths: IntArray, budget: TokenBudget) -> Groups:
    """Cuts a window of samples into groups that keep the budget.

    Every position is in exactly one group. A sample over budget forms a group of its own. Packed groups are built by
    best fit, longest first (at most 11/9 of the optimum plus 4 groups; Johnson et al. 1974); padded groups are runs of
    the sorted lengths, cut from the longest: the fewest groups that any cut allows.

    Args:
        lengths: int64[n], the length of each sample, in the order of the window.
        budget: When a group is full.

    Returns:
        The groups, in the order in which they were opened: the longest sample's first.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return []
    descending = np.argsort(-lengths, kind="stable")
    form = _padded_runs if budget.layout == "padded" else _best_fit
    return [np.sort(group) for group in form(lengths, descending, budget)]


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
