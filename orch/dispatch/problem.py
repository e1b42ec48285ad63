"""What every dispatcher is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orch.comm.topology import IntArray, Topology
from orch.cost import CostModel, batch_tokens, is_additive


@dataclass(frozen=True, slots=True, eq=False)
class DispatchProblem:
    """The items of one stage, and the bins they may go to.

    Bins are numbered `rank * bins_per_rank + micro_step`; a stage within one micro-step has one bin a rank.

    Attributes:
        lengths: int64[N].
        home: int64[N], the bin of the rank that holds each item, where running it moves nothing.
        topology: Ranks and nodes.
        cost: The cost model whose largest load is to be small.
        bins_per_rank: Micro-steps that are dealt together.
        layout: "packed" or "padded": how the tokens of a batch, its memory, are counted.
        cap: The most tokens a bin may hold; None for no cap. Dispatchers do their best; callers check.
        move_bytes: int64[N], bytes that leave the rank with an item.
        target: int64[N], the bin whose rank needs the item's output; None where it is `home`.
        target_bytes: int64[N], bytes of the output, which go from the item's bin to `target`.
        slack: By what share loads may exceed the least possible one, for plans made sooner and fewer bytes moved.
        rough: Whether it is enough to know about where items will go; loads may then exceed that.
        group_bin: int64[N], the bin that each item is in as drawn; None where it is `home`.
    """

    lengths: IntArray
    home: IntArray
    topology: Topology
    cost: CostModel
    bins_per_rank: int = 1
    layout: str = "packed"
    cap: int | None = None
    move_bytes: IntArray | None = None
    target: IntArray | None = None
    target_bytes: IntArray | None = None
    slack: float = 0.0
    rough: bool = False
    group_bin: IntArray | None = None

    @property
    def drawn(self) -> IntArray:
        """The bin that each item is in as drawn: int64[N]."""
        return self.home if self.group_bin is None else self.group_bin

    def item_costs(self, dispatcher: str) -> IntArray:
        """Cost of each item: int64[N].

        Raises:
            ValueError: If the cost is not additive, as the named dispatcher needs it.
        """
        if not is_additive(self.cost):
            raise ValueError(f"`cost` must be additive for {dispatcher!r}, but is {self.cost} instead.")
        return self.cost.item_costs(self.lengths)

    def with_cap(self, cap: int) -> DispatchProblem:
        """The same problem under another cap."""
        return replace(self, cap=cap)

    def slack_of(self, load: int) -> int:
        """What a load may exceed the least possible one by, if that is it."""
        return int(load * float(self.slack))

    @property
    def num_bins(self) -> int:
        """Number of bins over all ranks."""
        return self.topology.num_ranks * self.bins_per_rank

    def loads(self, bin_of_item: IntArray) -> IntArray:
        """Cost of each bin: int64[num_bins]."""
        return self.cost.loads(self.lengths, bin_of_item, self.num_bins)

    def largest_load(self, bin_of_item: IntArray) -> int:
        """Cost of the costliest bin."""
        return int(self.loads(bin_of_item).max(initial=0))

    def step_load(self, bin_of_item: IntArray) -> int:
        """Cost of the costliest bin of each micro-step, in all: what ranks that wait for each other take."""
        loads = self.loads(bin_of_item).reshape(self.topology.num_ranks, self.bins_per_rank)
        return int(loads.max(axis=0, initial=0).sum())

    def largest_batch(self, bin_of_item: IntArray) -> int:
        """Tokens of the largest batch."""
        return int(batch_tokens(self.layout, self.lengths, bin_of_item, self.num_bins).max(initial=0))

    def moved_bytes(self, bin_of_item: IntArray) -> int:
        """Bytes of the items that leave their rank."""
        sizes = self.lengths if self.move_bytes is None else self.move_bytes
        moves = bin_of_item // self.bins_per_rank != self.home // self.bins_per_rank
        return int(sizes[moves].sum())

    def fits(self, bin_of_item: IntArray) -> bool:
        """Whether no bin holds more than the cap."""
        return self.cap is None or self.largest_batch(bin_of_item) <= self.cap
