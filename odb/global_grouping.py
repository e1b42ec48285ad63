"""Groups over the windows of all ranks.

The ranks gather the lengths in their windows; with everyone's at hand each computes the same steps of W groups. The
window is W times as large, every rank has the same number of groups by construction, and nothing is split or idles
while there are as many samples as ranks. A plan is a function of the lengths and their order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

from orch.comm.topology import IntArray, Topology
from orch.odb.budget import TokenBudget
from orch.odb.grouping import Groups, form_groups, split_groups, spread
from orch.odb.padded_steps import densest_groups, mixed_steps, most_even_steps

MAX_ROUNDS_WAITED = 8
SHARE_OF_STEPS = 1 / 2
CHOICE = 7 / 4
INTER_NODE_WEIGHT = 16
FULL = 0.98
FIELDS = ("ordinal", "length", "num_label_tokens", "num_bytes", "index", "rounds_waited")


@dataclass(slots=True, eq=False)
class GlobalWindow:
    """The samples that wait on all ranks; each rank keeps the same copy.

    Attributes:
        budget: When a group is full.
        topology: Which ranks share a node.
        mixes_lengths: Padded: each step has long and short groups, which costs evenness.
        rank: int64[N], where each sample is; samples ascend by rank, then by number, whenever they arrived.
        ordinal: int64[N], its number on that rank.
        length: int64[N].
        num_label_tokens: int64[N].
        num_bytes: int64[N].
        index: int64[N], its index in the data set.
        rounds_waited: int64[N], how often each was left over.
    """

    budget: TokenBudget
    topology: Topology
    mixes_lengths: bool = False
    rank: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ordinal: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    length: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_label_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_bytes: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    index: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    rounds_waited: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rank)

    def add(self, rows_of_rank: Sequence[IntArray]) -> None:
        """Adds what each rank read: int64[n, 6] with the columns of `FIELDS`."""
        ranks = np.repeat(np.arange(len(rows_of_rank), dtype=np.int64), [len(rows) for rows in rows_of_rank])
        rows = np.concatenate(rows_of_rank)
        self.rank = np.concatenate([self.rank, ranks])
        for column, name in enumerate(FIELDS):
            setattr(self, name, np.concatenate([getattr(self, name), rows[:, column]]))
        self._select(np.lexsort((self.ordinal, self.rank)))

    def plan_steps(self, *, all_ended: bool) -> list[Groups]:
        """Chooses the next steps of one group for each rank, [] where there are fewer samples than ranks.

        While samples still come, half of the steps go, those that waste the least; what has waited for
        `MAX_ROUNDS_WAITED` rounds goes before all else. At the end everything goes.

        Padded, a step's groups are of nearly equal cost. Cost goes with length, so a step's lengths are then no random
        draw: with `mixes_lengths` they are nearer to one (and nearer than sorting offline and shuffling the groups),
        but the ranks wait for each other 1-5 % longer. Packed steps are like random ones anyway.

        Returns:
            For each step, the samples (positions into this window) of each rank's group.
        """
        if not len(self):
            return []
        groups = self._even_groups() if all_ended else self._formed()
        num_steps = max(1, int(len(groups) / self.topology.num_ranks * SHARE_OF_STEPS))
        if not all_ended and len(groups) < self.topology.num_ranks:
            groups = split_groups(groups, self.length, min(self.topology.num_ranks, len(self)))
        if self.budget.layout == "packed":
            steps = self._by_home(groups)[: None if all_ended else num_steps]
        else:
            steps = self._by_cost(groups) if all_ended else self._least_waste(groups, num_steps)
            steps = self._mixed(steps) if self.mixes_lengths else steps
        return [self._assigned(step) for step in steps]

    def remove(self, steps: Sequence[Groups]) -> None:
        """Takes the samples of steps out of the window; the rest has waited one more round."""
        stays = np.ones(len(self), dtype=bool)
        for step in steps:
            for group in step:
                stays[group] = False
        self._select(np.flatnonzero(stays))
        self.rounds_waited += 1

    def _select(self, samples: IntArray) -> None:
        for name in ("rank", *FIELDS):
            setattr(self, name, getattr(self, name)[samples])

    def _formed(self) -> Groups:
        """Padded: over all samples. Packed: each rank's own first, then what is left in groups that are not full."""
        if self.budget.layout == "padded":
            return form_groups(self.length, self.budget)
        full: Groups = []
        rest: list[IntArray] = []
        for rank in range(self.topology.num_ranks):
            here = np.flatnonzero(self.rank == rank)
            for group in form_groups(self.length[here], self.budget):
                is_full = self._cost(here[group]) >= FULL * self.budget.max_tokens
                (full if is_full else rest).append(here[group])
        left = np.sort(np.concatenate(rest)) if rest else np.empty(0, dtype=np.int64)
        return full + [left[group] for group in form_groups(self.length[left], self.budget)]

    def _even_groups(self) -> Groups:
        """Everything in as few steps as possible.

        Packed: each group with its share of long and short samples, where the budget allows this. Otherwise under the
        smallest budget that needs no more steps.
        """
        num_ranks = self.topology.num_ranks
        num_steps = -(-len(form_groups(self.length, self.budget)) // num_ranks)
        if self.budget.layout == "packed":
            groups = spread(self.length, num_steps * num_ranks)
            if all(self._keeps_budget(group) for group in groups):
                return groups
        low, high = min(int(self.length.max()), self.budget.max_tokens), self.budget.max_tokens
        while low < high:
            middle = (low + high) // 2
            tried = TokenBudget(middle, self.budget.layout, self.budget.max_samples)
            if len(form_groups(self.length, tried)) <= num_steps * num_ranks:
                high = middle
            else:
                low = middle + 1
        groups = form_groups(self.length, TokenBudget(high, self.budget.layout, self.budget.max_samples))
        return split_groups(groups, self.length, min(max(len(groups), num_steps * num_ranks), len(self)))

    def _by_fill(self, groups: Groups) -> IntArray:
        """The order of groups: what has waited long, then the fullest."""
        is_fresh = np.array([self.rounds_waited[group].max() < MAX_ROUNDS_WAITED for group in groups])
        tokens = np.array([self.length[group].sum() for group in groups])
        return np.lexsort((np.arange(len(groups)), -tokens, is_fresh))

    def _by_cost(self, groups: Groups) -> list[Groups]:
        """Steps of groups of nearly equal cost."""
        order = np.argsort([-self._cost(group) for group in groups], kind="stable")
        return self._cut([groups[i] for i in order])

    def _by_home(self, groups: Groups) -> list[Groups]:
        """Steps of groups that are at home on different ranks, the fullest of each rank first."""
        order = self._by_fill(groups)
        home = np.array([np.bincount(self.rank[groups[i]]).argmax() for i in order])
        place = np.empty(len(groups), dtype=np.int64)
        for rank in range(self.topology.num_ranks):
            place[home == rank] = np.arange(np.count_nonzero(home == rank))
        return self._cut([groups[order[i]] for i in np.lexsort((home, place))])

    def _cut(self, groups: Groups) -> list[Groups]:
        num_ranks = self.topology.num_ranks
        return [groups[start : start + num_ranks] for start in range(0, len(groups), num_ranks)]

    def _least_waste(self, groups: Groups, num_steps: int) -> list[Groups]:
        """Padded steps of the groups with the least padding, or of `groups` where there are too few of those."""
        num_ranks, is_urgent = self.topology.num_ranks, self.rounds_waited >= MAX_ROUNDS_WAITED
        densest = densest_groups(self.length, self.budget, is_urgent, int(num_steps * num_ranks * CHOICE))
        groups = densest if len(densest) >= num_ranks else groups
        if len(groups) < num_ranks:
            return [groups]
        costs = np.array([self._cost(group) for group in groups])
        tokens = np.array([self.length[group].sum() for group in groups])
        urgent = np.array([is_urgent[group].any() for group in groups])
        steps = most_even_steps(costs, tokens, urgent, num_ranks, num_steps)
        return [[groups[i] for i in step] for step in steps]

    def _mixed(self, steps: list[Groups]) -> list[Groups]:
        """The same groups, dealt so that each step has long and short ones."""
        groups = [group for step in steps for group in step]
        if len(groups) % len(steps):
            return steps
        longest = np.array([self.length[group].max() for group in groups])
        costs = np.array([self._cost(group) for group in groups])
        return [[groups[i] for i in step] for step in mixed_steps(longest, costs, len(steps))]

    def _assigned(self, groups: Groups) -> Groups:
        """Gives each group to the rank that makes the fewest bytes move, between nodes above all."""
        num_ranks, node = self.topology.num_ranks, self.topology.node_of_rank
        at = np.zeros((len(groups), num_ranks))
        for row, group in enumerate(groups):
            np.add.at(at[row], self.rank[group], self.num_bytes[group])
        on_node = at @ (node[:, None] == node[None, :])
        total = at.sum(axis=1, keepdims=True)
        moved = (on_node - at) + INTER_NODE_WEIGHT * (total - on_node)
        rows, ranks = linear_sum_assignment(moved)
        group_of_rank = dict(zip(ranks.tolist(), rows.tolist(), strict=True))
        nothing = np.empty(0, dtype=np.int64)
        return [groups[group_of_rank[rank]] if rank in group_of_rank else nothing for rank in range(num_ranks)]

    def _keeps_budget(self, group: IntArray) -> bool:
        most = self.budget.max_samples
        fits = self._cost(group) <= self.budget.max_tokens and (most is None or len(group) <= most)
        return fits or len(group) == 1

    def _cost(self, group: IntArray) -> int:
        return self.budget.tokens(self.length[group])
