"""How a step is to be balanced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orch.comm.counts import check_count
from orch.cost import CostModel, PackedCost, PaddedCost
from orch.dispatch import check_dispatcher, check_slack, default_dispatcher

BALANCE_MODES = ("none", "pre", "llm", "post")
BATCH_LAYOUTS = ("packed", "padded")
_TOKENS, _PADDED_TOKENS = PackedCost(), PaddedCost()


@dataclass(frozen=True, slots=True)
class StageConfig:
    """How one stage is balanced.

    Attributes:
        cost: What a batch costs; None counts tokens, padded ones where the layout is padded.
        dispatcher: A key of `orch.dispatch.DISPATCHERS`; None takes `local` for packed and `binary_search` for padded.
        max_tokens: The most tokens a rank's batch may hold, in this stage's units (padded: items times the longest).
            None allows what the unbalanced step would have needed, which is also kept with a number.
        layout: "packed" or "padded": how the batch lies in memory.
        row_bytes: Bytes of one output row on its way to the LLM, which weigh where items are moved. Encoders only.

    Raises:
        ValueError: If a value is unknown or out of range, or the dispatcher does not suit the cost.
    """

    cost: CostModel | None = None
    dispatcher: str | None = None
    max_tokens: int | None = None
    layout: str = "packed"
    row_bytes: int = 0

    def __post_init__(self) -> None:
        if self.layout not in BATCH_LAYOUTS:
            raise ValueError(f"`layout` must be one of {BATCH_LAYOUTS}, but is {self.layout!r} instead.")
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens)
        if self.row_bytes < 0:
            raise ValueError(f"`row_bytes` must not be negative, but is {self.row_bytes} instead.")
        check_dispatcher(self.dispatcher_name, self.cost_model)

    @property
    def cost_model(self) -> CostModel:
        """The cost in force."""
        if self.cost is not None:
            return self.cost
        return _TOKENS if self.layout == "packed" else _PADDED_TOKENS

    @property
    def dispatcher_name(self) -> str:
        """The dispatcher in force."""
        return self.dispatcher if self.dispatcher is not None else default_dispatcher(self.cost_model)


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """How a step is balanced.

    Attributes:
        mode: "none", as drawn; "pre", whole samples dealt by LLM length, encoders run where the sample is; "llm", the
            LLM's samples dealt, items encoded where they were drawn; "post", every stage dealt on its own.
        llm: The LLM's stage.
        stages: Encoder stages by name; a stage that is not named gets `StageConfig()`.
        placement: Whether balanced batches are placed on the ranks that hold most of their data already
            (OrchMLLM's node-wise rearrangement).
        slack: By what share the load of packed stages may exceed the least possible one. With 0.01 plans are made
            sooner, and less moves.

    Raises:
        ValueError: If `mode` is unknown, or `slack` no number from 0 to 1.
    """

    mode: str = "post"
    llm: StageConfig = field(default_factory=StageConfig)
    stages: Mapping[str, StageConfig] = field(default_factory=dict)
    placement: bool = True
    slack: float = 0.0

    def __post_init__(self) -> None:
        check_slack(self.slack)
        if self.mode not in BALANCE_MODES:
            raise ValueError(f"`mode` must be one of {BALANCE_MODES}, but is {self.mode!r} instead.")

    def stage(self, name: str) -> StageConfig:
        """The configuration of the encoder stage `name`."""
        return self.stages.get(name) or _DEFAULT_STAGE


_DEFAULT_STAGE = StageConfig()
