"""Which padded groups go next: the densest runs of the sorted lengths, in steps of even cost.

A padded group wastes the padding within it, and in a step all ranks wait for the costliest group. Both shrink if there
is a choice: what fits badly stays in the window until samples of its length have come, but for samples that have
waited long, which go first.
"""

from __future__ import annotations

import numpy as np

from orch.comm.topology import IntArray
from orch.odb.budget import TokenBudget
from orch.odb.grouping import Groups, form_groups

URGENCY = 10.0
NUM_BISECTIONS = 12
MAX_SAMPLES_CHOSEN_FROM = 2**15


def densest_groups(lengths: IntArray, budget: TokenBudget, is_urgent: np.ndarray, num_groups: int) -> Groups:
    """At least `num_groups` disjoint full runs of the sorted lengths with the least padding, if there are so many.

    Every run is worth a bonus less its share of padding; the most valuable set of disjoint runs is found by dynamic
    programming, and the bonus by bisection. Beyond `MAX_SAMPLES_CHOSEN_FROM` samples lengths are so dense that there is
    nothing to choose, and all of them form groups.

    Args:
        lengths: int64[n].
        budget: When a group is full.
        is_urgent: bool[n], the samples that should be in a group.
        num_groups: How many groups are wanted.

    Returns:
        The groups, as positions into `lengths`.
    """
    if len(lengths) > MAX_SAMPLES_CHOSEN_FROM:
        return form_groups(lengths, budget)
    descending = np.argsort(-lengths, kind="stable")
    ends, padding = _runs(lengths[descending], budget)
    urgent = np.concatenate([[0], np.cumsum(is_urgent[descending])])
    worth = URGENCY * (urgent[ends] - urgent[:-1]) - padding
    low, high = 0.0, 1.0
    starts = _best_runs(ends, worth + high)
    for _ in range(NUM_BISECTIONS):
        if len(starts) <= num_groups:
            break
        middle = (low + high) / 2
        fewer = _best_runs(ends, worth + middle)
        if len(fewer) >= num_groups:
            high, starts = middle, fewer
        else:
            low = middle
    return [np.sort(descending[start : ends[start]]) for start in starts]


def _runs(descending: IntArray, budget: TokenBudget) -> tuple[IntArray, np.ndarray]:
    """Where the run from each sample ends, and its share of padding; a run that is not full is padded to that."""
    positions = np.arange(len(descending))
    capacity = np.maximum(1, budget.max_tokens // descending)
    if budget.max_samples is not None:
        capacity = np.minimum(capacity, budget.max_samples)
    ends = np.minimum(positions + capacity, len(descending))
    before = np.concatenate([[0], np.cumsum(descending)])
    return ends, 1 - (before[ends] - before[positions]) / (descending * capacity)


def _best_runs(ends: IntArray, worth: np.ndarray) -> list[int]:
    """The starts of the disjoint runs of the largest total worth."""
    end_of, value_of = ends.tolist(), worth.tolist()
    best, taken = [0.0] * (len(end_of) + 1), [False] * len(end_of)
    for start in range(len(end_of) - 1, -1, -1):
        with_it = value_of[start] + best[end_of[start]]
        taken[start] = with_it > best[start + 1]
        best[start] = max(with_it, best[start + 1])
    starts, start = [], 0
    while start < len(end_of):
        if taken[start]:
            starts.append(start)
        start = end_of[start] if taken[start] else start + 1
    return starts


def most_even_steps(
    costs: IntArray, tokens: IntArray, is_urgent: np.ndarray, num_ranks: int, num_steps: int
) -> list[IntArray]:
    """The steps of one group a rank that waste the least: neighbours in cost.

    Args:
        costs: int64[n], tokens of each group with padding,
        tokens: int64[n], and without.
        is_urgent: bool[n], the groups that should go.
        num_ranks: Groups of a step; n is at least as large.
        num_steps: How many steps at most.

    Returns:
        The groups of each step.
    """
    order = np.argsort(-costs, kind="stable")
    starts = np.arange(len(order) - num_ranks + 1)
    real, urgent = (np.concatenate([[0], np.cumsum(values[order])]) for values in (tokens, is_urgent))
    worth = (real[starts + num_ranks] - real[starts]) / (num_ranks * costs[order][starts])
    worth += URGENCY * (urgent[starts + num_ranks] - urgent[starts])
    chosen = _best_windows(worth.tolist(), num_ranks, min(num_steps, len(order) // num_ranks))
    return [order[start : start + num_ranks] for start in chosen]


def _best_windows(worth: list[float], width: int, count: int) -> list[int]:
    """The starts, ascending, of `count` disjoint windows of that width with the largest total worth."""
    num_places = len(worth) + width
    best = [0.0] * num_places
    taken: list[list[bool]] = []
    for _ in range(count):
        fewer, best, took = best, [-np.inf] * num_places, [False] * num_places
        for end in range(width, num_places):
            with_it = fewer[end - width] + worth[end - width]
            took[end] = with_it > best[end - 1]
            best[end] = max(with_it, best[end - 1])
        taken.append(took)
    starts, end = [], num_places - 1
    while taken:
        if taken[-1][end]:
            end -= width
            starts.append(end)
            taken.pop()
        else:
            end -= 1
    return starts[::-1]


def mixed_steps(longest: IntArray, costs: IntArray, num_steps: int) -> list[IntArray]:
    """Deals groups to steps so that each step has long and short ones; costs meet where that leaves a choice.

    Args:
        longest: int64[n], the longest length of each group; n is a multiple of `num_steps`.
        costs: int64[n].
        num_steps: Number of steps.

    Returns:
        The groups of each step.
    """
    by_length = np.argsort(-longest, kind="stable").reshape(-1, num_steps)
    return list(np.take_along_axis(by_length, np.argsort(-costs[by_length], axis=1, kind="stable"), axis=1).T)
