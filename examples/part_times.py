"""CPU time of a step, part by part: what disturbs a machine for a moment then spoils a part of a run, not the step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

FloatArray = npt.NDArray[np.float64]


class PartTimes:
    """Splits a step behind each module with parameters of its own (projections, norms), in forward and in backward.

    Args:
        model: What runs in the step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marks: list[float] = []
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(self._mark_module)

    def _mark_module(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._mark()
        first = output if isinstance(output, torch.Tensor) else output[0]
        if first.requires_grad:
            first.register_hook(self._mark)

    def _mark(self, *_: Any) -> None:
        self._marks.append(time.thread_time())

    @contextmanager
    def measure(self) -> Iterator[list[float]]:
        """The seconds of this thread in each part of what runs inside; filled in at the end."""
        seconds: list[float] = []
        self._marks.clear()
        self._mark()
        yield seconds
        self._mark()
        seconds.extend(np.diff(self._marks))


def least(runs: list[list[float]]) -> float:
    """A step's time from several runs of the same parts: of each part the least, since disturbances only add.

    Raises:
        ValueError: If the runs have different numbers of parts.
    """
    return float(np.array(runs).min(axis=0).sum())


def pin_thread(turn: int) -> None:
    """Puts this thread on one core of those it may use, another one each turn, where the system lets it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {_CORES[turn % len(_CORES)]})


_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
