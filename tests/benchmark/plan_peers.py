"""What users would otherwise take, where it is installed: verl's Karmarkar-Karp and VeOmni's greedy.

Both are single modules within large packages whose import needs much else; the one file is found on the path and run
with that else left out. Install them apart from orch, for example `pip install --no-deps --target DIR verl veomni`,
and put DIR on `PYTHONPATH`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orch.comm.topology import IntArray

PEERS = ("verl equal", "verl", "veomni")
Peer = Callable[[IntArray, int], "IntArray | None"]
_MOST_SETS = 300_000  # verl's unequal form keeps items x ranks sets
_MOST_ITEMS = 50_000  # and its equal form takes minutes beyond


def peers() -> dict[str, Peer]:
    """The peers that are installed, by name; each gives int64[N] ranks, or None where it cannot."""
    found: dict[str, Peer] = {}
    verl = _module("verl", "utils/seqlen_balancing.py")
    if verl is not None:
        found["verl equal"] = lambda lengths, ranks: _verl(verl, lengths, ranks, equal_size=True)
        found["verl"] = lambda lengths, ranks: _verl(verl, lengths, ranks, equal_size=False)
    veomni = _module("veomni", "utils/data_balance/balance_sorting_algo.py")
    if veomni is not None:
        found["veomni"] = lambda lengths, ranks: _veomni(veomni, lengths, ranks)
    return found


def compare_loads(loads: Sequence[Mapping[str, float]], ours: str) -> dict[str, float | int | None]:
    """How the largest load of one of ours stands to the least of all peers, over the instances that a peer finished.

    Args:
        loads: Of each instance, the largest load by name.
        ours: A name.
    """
    ratios = [
        load[ours] / min(load[peer] for peer in PEERS if peer in load)
        for load in loads
        if any(peer in load for peer in PEERS)
    ]
    worse = [ratio - 1 for ratio in ratios if ratio > 1 + 1e-9]
    return {
        "instances": len(ratios),
        "mean": float(np.mean(ratios)) if ratios else None,
        "better on": sum(ratio < 1 - 1e-9 for ratio in ratios),
        "worse on": len(worse),
        "worse by over 1 % on": sum(excess > 0.01 for excess in worse),
        "worse by, mean where worse": float(np.mean(worse)) if worse else 0.0,
        "worse by, most": max(worse, default=0.0),
    }


def compare_times(times: Sequence[tuple[int, Mapping[str, float]]], peer: str, ours: str) -> dict[str, float | int]:
    """The median of a peer's time over ours, in all and by number of ranks, over the instances that it finished.

    Args:
        times: Of each instance, its number of ranks and the milliseconds by name.
        peer: A name.
        ours: A name.
    """
    ratios = [(ranks, ms[peer] / max(ms[ours], 1e-3)) for ranks, ms in times if peer in ms]
    found: dict[str, float | int] = {"instances": len(ratios)}
    if ratios:
        found["all"] = float(np.median([ratio for _, ratio in ratios]))
    for ranks in sorted({ranks for ranks, _ in ratios}):
        found[f"{ranks} ranks"] = float(np.median([ratio for of, ratio in ratios if of == ranks]))
    return found


def _module(package: str, path: str) -> dict[str, Any] | None:
    """The functions of one file of a package, without the imports of that package; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / path
    if not file.exists():
        return None
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if not _imports(node, package)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
    names: dict[str, Any] = {}
    exec(compile(tree, str(file), "exec"), names)  # the user's own installation of the package
    return names


def _imports(node: ast.stmt, package: str) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package


def _verl(module: dict[str, Any], lengths: IntArray, num_ranks: int, equal_size: bool) -> IntArray | None:
    size = len(lengths)
    if size < num_ranks or (equal_size and (size % num_ranks or size > _MOST_ITEMS)):
        return None
    if not equal_size and size * num_ranks > _MOST_SETS:
        return None
    ranks = np.empty(size, dtype=np.int64)
    parts = module["get_seqlen_balanced_partitions"](lengths.tolist(), num_ranks, equal_size)
    for rank, items in enumerate(parts):
        ranks[items] = rank
    return ranks


def _veomni(module: dict[str, Any], lengths: IntArray, num_ranks: int) -> IntArray:
    import torch

    table = torch.stack([torch.arange(len(lengths)), torch.from_numpy(lengths)], dim=1)
    parts = module["post_mbs_balancing_greedy_without_pad"](table, num_ranks, 1)
    ranks = np.empty(len(lengths), dtype=np.int64)
    for rank, rows in enumerate(parts):
        ranks[rows[:, 0].numpy()] = rank
    return ranks
