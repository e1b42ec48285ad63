"""The planner's figures: balance, bytes and time of every dispatcher beside lower bounds and peers.

    ORCH_DATA=... python tests/benchmark/bench_plan.py [--quick] [--json FILE]

Loads are over the best proven bound; bytes are shares of all; times are medians of CPU time. Peers (`plan_peers.py`)
run where they are installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orch.balancing import balance
from orch.bounds import lower_bounds
from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.cost import CostModel, PackedCost, PaddedCost
from orch.dispatch import DISPATCHERS, DispatchProblem
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal
from orch.dispatch.placed import place
from orch.metrics import step_metrics
from orch.plan import plan_step
from tests.benchmark.plan_gil import longest_gil_ms
from tests.benchmark.plan_instances import RANKS_PER_NODE, ROW_BYTES, STAGES, Instance, instance, step, traces
from tests.benchmark.plan_peers import peers
from tests.benchmark.plan_proof import proven_load

QUADRATIC = PackedCost(0.0, 0.0, 1.0)  # what VeOmni balances


@dataclass(slots=True)
class Row:
    """One instance: largest loads over the bound, shares of tokens that cross nodes, milliseconds."""

    ranks: int
    per_rank: int
    mix: str
    stage: str
    items_per_rank: float
    bound_over_mean: float = 1.0
    load: dict[str, float] = field(default_factory=dict)
    crossing: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)


def timed(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result and the median time in milliseconds of CPU, which other work on the machine hardly changes."""
    times, result = [], None
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        times.append((time.process_time() - start) * 1e3)
    return result, float(np.median(times))


def measure(case: Instance, repeats: int, with_peers: bool, placed: bool) -> Row:
    """All dispatchers, peers and bounds on one instance."""
    num_ranks = case.topology.num_ranks
    row = Row(num_ranks, case.per_rank, case.mix, case.stage, round(case.items_per_rank, 2))
    problem = DispatchProblem(case.lengths, case.home, case.topology, PackedCost())
    layouts: dict[str, IntArray] = {"drawn": case.home}
    nothing = np.zeros(num_ranks, dtype=np.int64)
    (layouts["lpt"], _), row.ms["lpt"] = timed(lambda: deal(case.lengths, nothing), repeats)
    for name in ("greedy", "local"):
        layouts[name], row.ms[name] = timed(lambda name=name: DISPATCHERS[name](problem), repeats)
    if placed:
        layouts["lpt placed"], row.ms["placement"] = timed(lambda: place(problem, layouts["lpt"]), 1)
    for name, peer in peers().items() if with_peers else ():
        ranks, spent = timed(lambda peer=peer: peer(case.lengths, num_ranks), 1)
        if ranks is not None:
            layouts[name], row.ms[name] = ranks, spent
    bounds = lower_bounds(case.lengths, case.home, case.topology)
    proven = bounds.load
    if case.items_per_rank < 16:
        proven = proven_load(case.lengths, num_ranks, bounds.load, problem.largest_load(layouts["greedy"]))
    row.bound_over_mean = proven / (case.lengths.sum() / num_ranks)
    total, node = int(case.lengths.sum()), case.topology.node_of_rank
    row.crossing["bound"] = bounds.inter_node / total
    for name, ranks in layouts.items():
        row.load[name] = problem.largest_load(ranks) / proven
        row.crossing[name] = int(case.lengths[node[ranks] != node[case.home]].sum()) / total
    _measure_other_costs(case, row, layouts, repeats)
    return row


def _measure_other_costs(case: Instance, row: Row, layouts: dict[str, IntArray], repeats: int) -> None:
    """Squared lengths beside VeOmni, which balances those, and padded batches beside verl."""

    def problem(cost: CostModel) -> DispatchProblem:
        return DispatchProblem(case.lengths, case.home, case.topology, cost, layout="padded")

    squared = problem(QUADRATIC)
    least = least_load(QUADRATIC.item_costs(case.lengths), case.topology.num_ranks)
    row.load["greedy squared"] = squared.largest_load(DISPATCHERS["greedy"](squared)) / least
    if "veomni" in layouts:
        row.load["veomni squared"] = squared.largest_load(layouts["veomni"]) / least
    padded = problem(PaddedCost())
    ranks, row.ms["binary_search"] = timed(lambda: DISPATCHERS["binary_search"](padded), repeats)
    optimum = lower_bounds(case.lengths, case.home, case.topology, cost=PaddedCost()).load
    row.load["binary_search"] = padded.largest_load(ranks) / optimum
    row.load["local padded"] = padded.largest_load(balance_padded(case)) / optimum
    for name in ("verl equal", "verl", "veomni"):
        if name in layouts:
            row.load[f"{name} padded"] = padded.largest_load(layouts[name]) / optimum


def balance_padded(case: Instance) -> IntArray:
    """`local` for padded batches."""
    return balance(case.lengths, case.home, case.topology, cost=PaddedCost(), dispatcher="local")


@dataclass(slots=True)
class StepRow:
    """A whole step of three stages: bytes between nodes and planning time."""

    ranks: int
    per_rank: int
    mix: str
    plan_ms: float
    inter_node_bytes: int
    lpt_plan_ms: float
    lpt_inter_node_bytes: int
    imbalance: dict[str, float]
    longest_gil_ms: float

    @property
    def ratio(self) -> float:
        """Bytes of LPT with placement over bytes of ours."""
        return self.lpt_inter_node_bytes / max(self.inter_node_bytes, 1)


def measure_step(mix: str, num_ranks: int, per_rank: int, repeats: int) -> StepRow:
    """`plan_step` with `local` and with LPT and placement."""
    lengths, topology = step(mix, num_ranks, per_rank), Topology(num_ranks, RANKS_PER_NODE)
    encoder = {name: StageConfig(row_bytes=ROW_BYTES) for name in lengths.stages}
    ours = BalanceConfig("post", stages=encoder)
    greedy = {name: StageConfig(dispatcher="greedy", row_bytes=ROW_BYTES) for name in lengths.stages}
    lpt = BalanceConfig("post", StageConfig(dispatcher="greedy"), greedy)
    plan, spent = timed(lambda: plan_step(lengths, topology, ours), repeats)
    lpt_plan, lpt_spent = timed(lambda: plan_step(lengths, topology, lpt), 1)
    metrics = step_metrics(lengths, plan, topology, ours)
    lpt_metrics = step_metrics(lengths, lpt_plan, topology, lpt)
    imbalance = {name: stage.imbalance_after / stage.bound for name, stage in metrics.stages.items()}
    held = longest_gil_ms(lambda: plan_step(lengths, topology, ours), repeats)
    return StepRow(
        num_ranks,
        per_rank,
        mix,
        spent,
        metrics.moved.inter_node,
        lpt_spent,
        lpt_metrics.moved.inter_node,
        imbalance,
        held,
    )


def grid(quick: bool) -> Iterator[tuple[int, int]]:
    """Ranks and samples a rank."""
    for num_ranks in (8, 64) if quick else (8, 64, 256, 2560):
        for per_rank in (4, 16) if quick else (4, 16, 60):
            yield num_ranks, per_rank


def rows(quick: bool, repeats: int) -> Iterator[Row]:
    """All instances."""
    module = traces()
    assert module is not None
    for num_ranks, per_rank in grid(quick):
        for mix in ("omni-3mod", "obelics-like") if quick else module.MIXES:
            for stage in STAGES:
                case = instance(mix, stage, num_ranks, per_rank)
                if case is not None:
                    placed = mix in ("omni-3mod", "obelics-like")
                    row = measure(case, repeats, with_peers=True, placed=placed)
                    print(_line(row), flush=True)
                    yield row


def _line(row: Row) -> str:
    shown = ("drawn", "lpt", "greedy", "local", "verl equal", "verl", "veomni", "binary_search")
    loads = "  ".join(f"{name} {row.load[name]:.4f}" for name in shown if name in row.load)
    crossing = "  ".join(
        f"{name} {row.crossing[name]:.2%}" for name in ("bound", "local", "lpt placed") if name in row.crossing
    )
    times = "  ".join(f"{name} {row.ms[name]:.1f}" for name in (*shown[1:], "placement") if name in row.ms)
    where = f"{row.ranks:5d} x {row.per_rank:2d} {row.mix:16s} {row.stage:6s} {row.items_per_rank:6.1f} items"
    return f"{where} | {loads} | cross: {crossing} | ms: {times}"


def summary(found: list[Row], steps: list[StepRow]) -> dict[str, Any]:
    """The figures of the README's table."""
    many = [row for row in found if row.items_per_rank >= 16]
    few = [row for row in found if 4 <= row.items_per_rank < 16]
    large = [row for row in many if row.ranks == 2560 and row.per_rank == 60 and row.stage == "llm"]

    def mean(values: list[float]) -> float | None:
        return float(np.mean(values)) if values else None

    def worse(name: str, ours: str, suffix: str = "") -> list[str]:
        """Instances on which a peer is better."""
        return [
            f"{row.ranks}x{row.per_rank} {row.mix} {row.stage}: {row.load[ours]:.5f} > {row.load[name + suffix]:.5f}"
            for row in found
            if name + suffix in row.load and row.load[ours] > row.load[name + suffix] * (1 + 1e-9)
        ]

    names = sorted({name for row in found for name in row.load if name.split(" ")[0] in ("verl", "veomni")})
    return {
        "load >= 16 items": {
            name: mean([row.load[name] for row in many]) for name in ("drawn", "lpt", "greedy", "local")
        },
        "load 4-16 items": {
            name: mean([row.load[name] for row in few]) for name in ("drawn", "lpt", "greedy", "local")
        },
        "peers, all instances": {name: mean([row.load[name] for row in found if name in row.load]) for name in names},
        "ours on the same": {
            name: mean([row.load[_counterpart(name)] for row in found if name in row.load]) for name in names
        },
        "peers better than greedy": [
            line for name in ("verl equal", "verl", "veomni") for line in worse(name, "greedy")
        ]
        + worse("veomni", "greedy squared", " squared"),
        "binary_search over optimum, worst": max(row.load["binary_search"] for row in found),
        "local padded over optimum": mean([row.load["local padded"] for row in many if row.ranks > RANKS_PER_NODE]),
        "crossing over bound, worst and mean": [
            max((row.crossing["local"] - row.crossing["bound"] for row in many), default=None),
            mean([row.crossing["local"] - row.crossing["bound"] for row in many if row.ranks > RANKS_PER_NODE]),
        ],
        "ms, 153,600 items on 2,560 ranks": {
            name: mean([row.ms[name] for row in large]) for name in ("lpt", "greedy", "local", "binary_search")
        },
        "steps": [{**asdict(row), "bytes of LPT over ours": row.ratio} for row in steps],
    }


def _counterpart(peer: str) -> str:
    if peer.endswith("padded"):
        return "binary_search"
    return "greedy squared" if peer.endswith("squared") else "greedy"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small instances only")
    parser.add_argument("--json", type=Path, default=None, help="where to write everything")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if traces() is None:
        print("skipped: ORCH_DATA names no folder with traces/gen_traces.py")
        return
    found = list(rows(options.quick, options.repeats))
    steps = []
    for num_ranks, per_rank in ((64, 16),) if options.quick else ((64, 16), (256, 16), (2560, 16), (2560, 60)):
        for mix in ("omni-3mod", "obelics-like"):
            steps.append(measure_step(mix, num_ranks, per_rank, options.repeats))
            print(f"step {steps[-1]}  ratio {steps[-1].ratio:.1f}", flush=True)
    report = summary(found, steps)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": report, "rows": [asdict(row) for row in found]}, indent=1))


if __name__ == "__main__":
    main()
