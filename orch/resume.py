"""Where a run goes on after a stop: behind the last optimizer step, not behind what was prepared ahead of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orch.comm.counts import check_state

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class ResumePoint:
    """The end of an optimizer step, or the beginning of an epoch.

    Attributes:
        step: Steps of the epoch that lie behind it.
        peaks: Largest batches that the run had needed as drawn, by stage: caps of the steps to come follow from them.
        loader: What the loader said of itself when the next step had not been drawn.
        refused: Why the loader could not say; empty if it could.
    """

    step: int = 0
    peaks: Mapping[str, int] = field(default_factory=dict)
    loader: Any = None
    refused: str = ""

    @classmethod
    def of(cls, loader: Any, step: int, peaks: Mapping[str, int]) -> ResumePoint:
        """Asks the loader where it stands."""
        if not hasattr(loader, "state_dict"):
            refused = f"`loader` must have `state_dict` to be resumed, but {type(loader).__name__} has none instead."
            return cls(step, dict(peaks), refused=refused)
        try:
            return cls(step, dict(peaks), loader.state_dict())
        except TypeError as error:  # as of an iterable data set; a reason only for who asks
            return cls(step, dict(peaks), refused=str(error))

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, if those of the loader are.

        Raises:
            TypeError: If the loader has no `state_dict`, or cannot be resumed.
        """
        if self.refused:
            raise TypeError(self.refused)
        return {"version": STATE_VERSION, "step": self.step, "peaks": dict(self.peaks), "loader": self.loader}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> ResumePoint:
        """The inverse of `to_dict`.

        Raises:
            ValueError: If it is not such a state.
        """
        check_state(state)
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"`version` of a state must be {STATE_VERSION}, but is {state.get('version')!r} instead.")
        if missing := sorted({"step", "peaks", "loader"} - set(state)):
            raise ValueError(f"A state must have {missing}, but has {sorted(state)} instead.")
        return cls(int(state["step"]), {name: int(peak) for name, peak in state["peaks"].items()}, state["loader"])
