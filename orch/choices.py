"""What a script chose, once for a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from orch.comm.all_to_all import METHODS
from orch.comm.counts import check_count
from orch.comm.topology import Topology, check_topology_kind
from orch.config import BALANCE_MODES
from orch.cost import CostModel
from orch.dispatch import DISPATCHERS
from orch.tags import is_debugging

EXCHANGE_METHODS = ("auto", *METHODS)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Choices:
    """What a script chose, the same on every rank; `orch.orchestrate` says what each means.

    Attributes:
        debug: Whether ids travel with what moves (`ORCH_DEBUG=1`).
    """

    layout: str
    balance: str
    dispatcher: str | None
    accumulate: int | None
    topology: Topology | None
    max_tokens: int | None
    slack: float
    costs: Mapping[str, CostModel] | None
    exchange: str
    prefetch: int
    debug: bool = field(default_factory=is_debugging)

    def check(self, num_ranks: int) -> None:
        """Refuses what makes no sense, once ranks know that they chose alike: one that raises alone leaves the others.

        Raises:
            ValueError: If the way to balance, to deal or to exchange is unknown, a cost is none, `prefetch` is no
                count, or the topology is none or has another number of ranks.
        """
        if self.balance not in BALANCE_MODES:
            raise ValueError(f"`balance` must be one of {BALANCE_MODES}, but is {self.balance!r} instead.")
        if self.exchange not in EXCHANGE_METHODS:
            raise ValueError(f"`exchange` must be one of {EXCHANGE_METHODS}, but is {self.exchange!r} instead.")
        if self.dispatcher is not None and self.dispatcher not in tuple(DISPATCHERS):
            raise ValueError(f"`dispatcher` must be one of {sorted(DISPATCHERS)}, but is {self.dispatcher!r} instead.")
        costs = self.costs if isinstance(self.costs, Mapping) else {} if self.costs is None else {"": self.costs}
        if wrong := [cost for cost in costs.values() if not (cost is None or isinstance(cost, CostModel))]:
            raise ValueError(f"`costs` must be cost models by name of a stage or 'llm', but has {wrong[0]!r} instead.")
        check_count("prefetch", self.prefetch, least=0)
        if self.topology is not None:
            check_topology_kind(self.topology)
            if self.topology.num_ranks != num_ranks:
                raise ValueError(f"`topology` must have {num_ranks} ranks, but has {self.topology.num_ranks} instead.")

    def by_name(self) -> dict[str, Any]:
        """All of them, by name, as in a message: strings in quotes, so that "2" is not 2."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {f"`{name}`": repr(value) if isinstance(value, str) else value for name, value in values.items()}
