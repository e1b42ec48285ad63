"""Where an epoch stands, to the sample: what `state_dict` saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orch.comm.counts import check_state

STATE_VERSION = 2
Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """This rank's part of a round, and what lies behind it. Samples are named by their index in the data set.

    Attributes:
        epoch: Number of the epoch.
        num_consumed: Samples of this rank's order that were read into the window.
        num_rounds: Rounds so far, this one included.
        groups: The samples that this rank has for each of the round's micro-steps.
        ranks: The rank whose group each of them is in; () where all are in this rank's.
        held: Samples that were left in the window, in order.
        rounds_waited: For how many rounds each of them.
    """

    epoch: int
    num_consumed: int = 0
    num_rounds: int = 0
    groups: tuple[tuple[Any, ...], ...] = ()
    ranks: Ranks = ()
    held: tuple[Any, ...] = ()
    rounds_waited: tuple[int, ...] = ()

    def after(self, num_taken: int) -> RoundRecord:
        """The same with the first `num_taken` groups handed out."""
        return replace(self, groups=self.groups[num_taken:], ranks=self.ranks[num_taken:])

    def check_way(self, *, is_exchanged: bool) -> None:
        """Raises a `ValueError` if samples that lie outside their groups were to be handed out as groups."""
        if self.ranks and is_exchanged:
            raise ValueError(
                "A loader that was saved while orchestrated must go on orchestrated, or in `groups('global')`, "
                "but is iterated by itself instead."
            )

    @property
    def indices(self) -> list[Any]:
        """What is to be read again, in order: the groups' samples, then those held."""
        return [index for group in self.groups for index in group] + list(self.held)

    @property
    def waited(self) -> list[int]:
        """For how many rounds each of `indices` has waited."""
        return [0] * sum(map(len, self.groups)) + list(self.rounds_waited)

    def to_dict(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """The record as plain lists and numbers, with what must be the same at the resume."""
        return {
            "version": STATE_VERSION,
            **fingerprint,
            "epoch": self.epoch,
            "num_consumed": self.num_consumed,
            "num_rounds": self.num_rounds,
            "groups": [list(group) for group in self.groups],
            "ranks": [list(ranks) for ranks in self.ranks],
            "held": list(self.held),
            "rounds_waited": list(self.rounds_waited),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> RoundRecord:
        """The inverse of `to_dict`.

        Raises:
            ValueError: If the state was saved by another rank, on another number of ranks, or over other data.
        """
        check_state(state)
        for name, value in {"version": STATE_VERSION, **fingerprint}.items():
            if state.get(name) != value:
                raise ValueError(
                    f"`{name}` of a saved state must be {value!r}, as it is now, but is {state.get(name)!r} instead."
                )
        return cls(
            epoch=int(state["epoch"]),
            num_consumed=int(state["num_consumed"]),
            num_rounds=int(state["num_rounds"]),
            groups=tuple(tuple(group) for group in state["groups"]),
            ranks=tuple(tuple(ranks) for ranks in state["ranks"]),
            held=tuple(state["held"]),
            rounds_waited=tuple(state["rounds_waited"]),
        )


@dataclass(slots=True, eq=False)
class Position:
    """Where a loader stands: of one iteration, which alone moves it, or of the time between two.

    Attributes:
        record: What is behind the last batch taken.
        is_between: Whether nobody takes batches of it any more.
    """

    record: RoundRecord
    is_between: bool = True
