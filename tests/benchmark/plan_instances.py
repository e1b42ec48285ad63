"""Instances of the planner's benchmark, drawn from the handed traces."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from orch.comm.topology import IntArray, Topology
from orch.lengths import ItemLengths, StepLengths

RANKS_PER_NODE = 8
POOL = 20_000  # samples generated of each mix, from which instances draw
STAGES = ("llm", "vision", "audio")
PATCH_BYTES = 4704 // 4  # uint8 pixels: a merged token is four patches
FRAME_BYTES = 128 * 2  # 128 mel bins in bf16
ROW_BYTES = 3584 * 2  # bf16 rows of a 7B model
TEXT_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Items of one stage: int64[N] lengths and homes, and the ranks."""

    mix: str
    stage: str
    per_rank: int
    topology: Topology
    lengths: IntArray
    home: IntArray

    @property
    def items_per_rank(self) -> float:
        """What the figures are grouped by."""
        return len(self.lengths) / self.topology.num_ranks


@functools.cache
def traces() -> ModuleType | None:
    """The handed generator, loaded by its path; None where there is no `ORCH_DATA`."""
    folder = os.environ.get("ORCH_DATA")
    path = Path(folder or ".") / "traces" / "gen_traces.py"
    if not folder or not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("gen_traces", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def pool(mix: str) -> list[dict[str, Any]]:
    """Samples of a mix."""
    module = traces()
    assert module is not None
    return list(module.generate(mix, POOL, 0))


@functools.cache
def step(mix: str, num_ranks: int, per_rank: int, seed: int = 0) -> StepLengths:
    """A step of `per_rank` samples a rank."""
    module = traces()
    assert module is not None
    index = np.random.default_rng([seed, num_ranks, per_rank]).integers(0, POOL, num_ranks * per_rank)
    samples = [pool(mix)[i] for i in index]
    text = np.array([sample["text_tokens"] for sample in samples], dtype=np.int64)
    llm = np.array([module.llm_tokens(sample) for sample in samples], dtype=np.int64)
    patches = [[t * h * w for t, h, w in sample["images"]] for sample in samples]
    frames = [sample["audio_frames"] for sample in samples]
    stages = {
        "vision": _items(patches, rows=lambda length: length // 4, unit_bytes=PATCH_BYTES),
        "audio": _items(frames, rows=lambda length: (length + 1) // 2 // 2, unit_bytes=FRAME_BYTES),
    }
    home = np.repeat(np.arange(num_ranks), per_rank)
    return StepLengths(home, home * 0, llm, text * TEXT_TOKEN_BYTES, text, 1, stages)


def _items(lengths: list[list[int]], rows: Any, unit_bytes: int) -> ItemLengths:
    sample = np.repeat(np.arange(len(lengths)), [len(mine) for mine in lengths])
    length = np.array([value for mine in lengths for value in mine], dtype=np.int64)
    return ItemLengths(sample, length, rows(length), length * unit_bytes)


def instance(mix: str, stage: str, num_ranks: int, per_rank: int, seed: int = 0) -> Instance | None:
    """The items of one stage of such a step; None where the mix has none."""
    lengths = step(mix, num_ranks, per_rank, seed)
    topology = Topology(num_ranks, RANKS_PER_NODE)
    if stage == "llm":
        return Instance(mix, stage, per_rank, topology, lengths.llm_length, lengths.home)
    items = lengths.stages[stage]
    if not len(items):
        return None
    return Instance(mix, stage, per_rank, topology, items.length, lengths.home[items.sample])
