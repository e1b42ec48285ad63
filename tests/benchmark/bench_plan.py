"""The planner's figures: balance, bytes and time of every dispatcher beside lower bounds and peers.

    ORCH_DATA=... python tests/benchmark/bench_plan.py [--quick] [--json FILE]

Loads are over the best proven bound; what crosses nodes is a share of all tokens, beside the least that must at a
load of 1.01 times the bound; times are medians of CPU time. "local 1%" is `local` with a slack of 0.01: polished no
further than that. Peers (`plan_peers.py`) run where they are installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orch.balancing import balance
from orch.bounds import lower_bounds
from orch.comm.placement import Traffic
from orch.comm.topology import IntArray, Topology
from orch.config import BalanceConfig, StageConfig
from orch.cost import PackedCost, PaddedCost
from orch.dispatch import DISPATCHERS, DispatchProblem
from orch.dispatch.bounds import least_load
from orch.dispatch.deal import deal
from orch.dispatch.placed import place
from orch.metrics import step_metrics
from orch.plan import plan_step
from tests.benchmark.plan_gil import longest_gil_ms
from tests.benchmark.plan_instances import RANKS_PER_NODE, ROW_BYTES, STAGES, Instance, instance, step, traces
from tests.benchmark.plan_peers import PEERS, compare_loads, compare_times, peers
from tests.benchmark.plan_proof import least_step_bytes, proven_load

SLACK = 0.01
ALLOWED = 0.005  # of all tokens, which may cross beyond what must
OURS = ("greedy", "local", "local 1%")
QUADRATIC = PackedCost(0.0, 0.0, 1.0)  # what VeOmni balances


@dataclass(slots=True)
class Row:
    """One instance: largest loads over the bound, shares of tokens that cross nodes, milliseconds.

    Attributes:
        volume: The most tokens that any rank sends to or receives from other nodes, over the mean load of a rank.
    """

    ranks: int
    per_rank: int
    mix: str
    stage: str
    items_per_rank: float
    bound_over_mean: float = 1.0
    load: dict[str, float] = field(default_factory=dict)
    crossing: dict[str, float] = field(default_factory=dict)
    volume: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)


def timed(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result and the median time in milliseconds of CPU, which other work on the machine hardly changes."""
    times, result = [], None
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        times.append((time.process_time() - start) * 1e3)
    return result, float(np.median(times))


def measure(case: Instance, repeats: int, with_peers: bool) -> Row:
    """All dispatchers, peers and bounds on one instance."""
    num_ranks = case.topology.num_ranks
    row = Row(num_ranks, case.per_rank, case.mix, case.stage, round(case.items_per_rank, 2))
    problem = DispatchProblem(case.lengths, case.home, case.topology, PackedCost())
    layouts = _packed_layouts(case, problem, row, repeats)
    for name, peer in peers().items() if with_peers else ():
        ranks, spent = timed(lambda peer=peer: peer(case.lengths, num_ranks), 1)
        if ranks is not None:
            layouts[name], row.ms[name] = ranks, spent
    bounds = lower_bounds(case.lengths, case.home, case.topology)
    proven = bounds.load
    if case.items_per_rank < 16:
        proven = proven_load(case.lengths, num_ranks, bounds.load, problem.largest_load(layouts["greedy"]))
    row.bound_over_mean = proven / (case.lengths.sum() / num_ranks)
    row.crossing["bound"] = bounds.inter_node / int(case.lengths.sum())
    of_peers = [problem.largest_load(layouts[name]) for name in PEERS if name in layouts]
    if of_peers:
        as_good = lower_bounds(case.lengths, case.home, case.topology, target=min(of_peers))
        row.crossing["bound as good as peers"] = as_good.inter_node / int(case.lengths.sum())
    for name, ranks in layouts.items():
        row.load[name] = problem.largest_load(ranks) / proven
        row.crossing[name] = _crossing(case, ranks)
    for name in ("lpt", "lpt placed", "local", "local 1%", "local placed"):
        row.volume[name] = _largest_volume(case, layouts[name])
    _measure_squared(case, row, layouts)
    _measure_padded(case, row, layouts, repeats)
    return row


def _packed_layouts(case: Instance, problem: DispatchProblem, row: Row, repeats: int) -> dict[str, IntArray]:
    """As drawn, and what the dispatchers of packed batches make of it; LPT and `local` placed as well."""
    layouts: dict[str, IntArray] = {"drawn": case.home}
    nothing = np.zeros(case.topology.num_ranks, dtype=np.int64)
    _, row.ms["sort"] = timed(lambda: np.argsort(case.lengths, kind="stable"), repeats)
    (layouts["lpt"], _), row.ms["lpt"] = timed(lambda: deal(case.lengths, nothing), repeats)
    for name in ("greedy", "local"):
        layouts[name], row.ms[name] = timed(lambda name=name: DISPATCHERS[name](problem), repeats)
    loose = replace(problem, slack=SLACK)
    layouts["local 1%"], row.ms["local 1%"] = timed(lambda: DISPATCHERS["local"](loose), repeats)
    layouts["lpt placed"], row.ms["placement"] = timed(lambda: place(problem, layouts["lpt"]), 1)
    layouts["local placed"], row.ms["placement of local"] = timed(lambda: place(problem, layouts["local"]), 1)
    return layouts


def _crossing(case: Instance, ranks: IntArray) -> float:
    """The share of tokens whose node changes."""
    node = case.topology.node_of_rank
    return int(case.lengths[node[ranks] != node[case.home]].sum()) / int(case.lengths.sum())


def _largest_volume(case: Instance, ranks: IntArray) -> float:
    """What placement minimises: the most tokens between any rank and other nodes, over the mean load."""
    traffic = Traffic.of(case.home, ranks, case.lengths, case.topology)
    return traffic.largest_volume(case.topology.node_of_rank) * case.topology.num_ranks / int(case.lengths.sum())


def _measure_squared(case: Instance, row: Row, layouts: dict[str, IntArray]) -> None:
    """Squared lengths beside VeOmni, which balances those."""
    squared = DispatchProblem(case.lengths, case.home, case.topology, QUADRATIC, layout="padded")
    least = least_load(QUADRATIC.item_costs(case.lengths), case.topology.num_ranks)
    row.load["greedy squared"] = squared.largest_load(DISPATCHERS["greedy"](squared)) / least
    if "veomni" in layouts:
        row.load["veomni squared"] = squared.largest_load(layouts["veomni"]) / least


def _measure_padded(case: Instance, row: Row, layouts: dict[str, IntArray], repeats: int) -> None:
    """Padded batches beside verl.

    A padded batch costs no less than its tokens, so that the least that must cross nodes for packed batches of up to
    1.01 times the padded optimum must for padded ones too. It holds for `binary_search`; `local` pads more than that.
    """
    padded = DispatchProblem(case.lengths, case.home, case.topology, PaddedCost(), layout="padded")
    found: dict[str, IntArray] = {}
    search = DISPATCHERS["binary_search"]
    found["binary_search"], row.ms["binary_search"] = timed(lambda: search(padded), repeats)
    found["binary_search placed"] = place(padded, found["binary_search"])
    found["local padded"] = balance_padded(case)
    bounds = lower_bounds(case.lengths, case.home, case.topology, cost=PaddedCost())
    least = lower_bounds(case.lengths, case.home, case.topology, target=bounds.target).inter_node
    row.crossing["bound padded"] = least / int(case.lengths.sum())
    for name, ranks in found.items():
        row.load[name] = padded.largest_load(ranks) / bounds.load
        row.crossing[name] = _crossing(case, ranks)
    for name in PEERS:
        if name in layouts:
            row.load[f"{name} padded"] = padded.largest_load(layouts[name]) / bounds.load


def balance_padded(case: Instance) -> IntArray:
    """`local` for padded batches."""
    return balance(case.lengths, case.home, case.topology, cost=PaddedCost(), dispatcher="local")


@dataclass(slots=True)
class StepRow:
    """A whole step of three stages: bytes between nodes and planning time.

    Attributes:
        loose_plan_ms: With a slack of 0.01, unpolished; its bytes and imbalances likewise.
        inter_node_bytes_by_stage: Raw items and encoder outputs; of the LLM, the text.
        least_by_stage: What must cross, see `least_step_bytes`: raw items, without outputs; of the LLM, the text.
        all_bytes: Text, raw items and outputs once each.
    """

    ranks: int
    per_rank: int
    mix: str
    plan_ms: float
    loose_plan_ms: float
    loose_inter_node_bytes: int
    loose_imbalance: dict[str, float]
    inter_node_bytes: int
    inter_node_bytes_by_stage: dict[str, int]
    least_by_stage: dict[str, int]
    all_bytes: int
    lpt_plan_ms: float
    lpt_inter_node_bytes: int
    imbalance: dict[str, float]
    longest_gil_ms: float

    @property
    def ratio(self) -> float:
        """Bytes of LPT with placement over bytes of ours."""
        return self.lpt_inter_node_bytes / max(self.inter_node_bytes, 1)

    @property
    def least(self) -> int:
        """Bytes that must cross."""
        return sum(self.least_by_stage.values())

    @property
    def over_least(self) -> float | None:
        """Bytes of ours over the least that must cross; None where nothing must."""
        return self.inter_node_bytes / self.least if self.least else None

    @property
    def distance(self) -> float:
        """Bytes of ours beyond the least that must cross, as a share of all bytes."""
        return (self.inter_node_bytes - self.least) / self.all_bytes


def measure_step(mix: str, num_ranks: int, per_rank: int, repeats: int) -> StepRow:
    """`plan_step` with `local` and with LPT and placement, and the least that must cross nodes."""
    lengths, topology = step(mix, num_ranks, per_rank), Topology(num_ranks, RANKS_PER_NODE)
    encoder = {name: StageConfig(row_bytes=ROW_BYTES) for name in lengths.stages}
    ours = BalanceConfig("post", stages=encoder)
    greedy = {name: StageConfig(dispatcher="greedy", row_bytes=ROW_BYTES) for name in lengths.stages}
    lpt = BalanceConfig("post", StageConfig(dispatcher="greedy"), greedy)
    loose = replace(ours, slack=SLACK)
    plan, spent = timed(lambda: plan_step(lengths, topology, ours), repeats)
    loose_plan, loose_spent = timed(lambda: plan_step(lengths, topology, loose), repeats)
    loose_metrics = step_metrics(lengths, loose_plan, topology, loose)
    lpt_plan, lpt_spent = timed(lambda: plan_step(lengths, topology, lpt), 1)
    metrics = step_metrics(lengths, plan, topology, ours)
    items = [part.num_bytes.sum() + part.num_rows.sum() * ROW_BYTES for part in lengths.stages.values()]
    return StepRow(
        ranks=num_ranks,
        per_rank=per_rank,
        mix=mix,
        plan_ms=spent,
        loose_plan_ms=loose_spent,
        loose_inter_node_bytes=loose_metrics.moved.inter_node,
        loose_imbalance={name: stage.imbalance_after / stage.bound for name, stage in loose_metrics.stages.items()},
        inter_node_bytes=metrics.moved.inter_node,
        inter_node_bytes_by_stage={name: stage.moved.inter_node for name, stage in metrics.stages.items()},
        least_by_stage=least_step_bytes(lengths, topology, ours),
        all_bytes=int(lengths.num_bytes.sum() + sum(items)),
        lpt_plan_ms=lpt_spent,
        lpt_inter_node_bytes=step_metrics(lengths, lpt_plan, topology, lpt).moved.inter_node,
        imbalance={name: stage.imbalance_after / stage.bound for name, stage in metrics.stages.items()},
        longest_gil_ms=longest_gil_ms(lambda: plan_step(lengths, topology, ours), repeats),
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
                    row = measure(case, repeats, with_peers=True)
                    print(_line(row), flush=True)
                    yield row


def _line(row: Row) -> str:
    shown = ("drawn", "lpt", "greedy", "local", "local 1%", *PEERS, "binary_search", "local padded")
    packed = ("bound", "local", "local 1%", "local placed", "lpt", "lpt placed")
    crossed = (*packed, "bound padded", "binary_search", "binary_search placed", "local padded")
    times = (*shown[1:], "placement", "placement of local")
    where = f"{row.ranks:5d} x {row.per_rank:2d} {row.mix:16s} {row.stage:6s} {row.items_per_rank:6.1f} items"
    parts = [(row.load, shown, ".4f"), (row.crossing, crossed, ".2%"), (row.ms, times, ".1f")]
    loads, crossing, ms = (
        "  ".join(f"{name} {values[name]:{form}}" for name in names if name in values) for values, names, form in parts
    )
    return f"{where} | {loads} | cross: {crossing} | ms: {ms}"


def _step_line(row: StepRow) -> str:
    over = "" if row.over_least is None else f", {row.over_least:.2f} x"
    by_stage = "  ".join(
        f"{name} {moved / 1e6:.1f} (least {row.least_by_stage[name] / 1e6:.1f})"
        for name, moved in row.inter_node_bytes_by_stage.items()
    )
    return (
        f"step {row.ranks:5d} x {row.per_rank:2d} {row.mix:16s} | MB between nodes: {row.inter_node_bytes / 1e6:.1f}  "
        f"least {row.least / 1e6:.1f} ({row.distance:.2%} of all bytes above it{over})  "
        f"lpt {row.lpt_inter_node_bytes / 1e6:.1f} ({row.ratio:.1f} x ours) | {by_stage} | "
        f"load: {_by_name(row.imbalance)} | slack {SLACK}: {row.loose_inter_node_bytes / 1e6:.1f} MB, "
        f"{_by_name(row.loose_imbalance)} | ms: plan {row.plan_ms:.1f}  slack {row.loose_plan_ms:.1f}  "
        f"lpt {row.lpt_plan_ms:.1f}  gil {row.longest_gil_ms:.1f}"
    )


def _by_name(loads: dict[str, float]) -> str:
    return "  ".join(f"{name} {load:.4f}" for name, load in loads.items())


def summary(found: list[Row], steps: list[StepRow]) -> dict[str, Any]:
    """The figures of the README's table."""
    many = [row for row in found if row.items_per_rank >= 16]
    few = [row for row in found if 4 <= row.items_per_rank < 16]
    large = [row for row in many if row.ranks == 2560 and row.per_rank == 60 and row.stage == "llm"]
    loads = ("drawn", "lpt", "greedy", "local", "local 1%")
    return {
        "load >= 16 items": {name: _mean([row.load[name] for row in many]) for name in loads},
        "load 4-16 items": {name: _mean([row.load[name] for row in few]) for name in loads},
        **_beside_peers(found),
        "binary_search over optimum, worst": max(row.load["binary_search"] for row in found),
        "local padded over optimum": _mean([row.load["local padded"] for row in many if row.ranks > RANKS_PER_NODE]),
        **_between_nodes([row for row in found if row.ranks > RANKS_PER_NODE]),
        "crossing over bound, worst and mean": [
            max((row.crossing["local"] - row.crossing["bound"] for row in many), default=None),
            _mean([row.crossing["local"] - row.crossing["bound"] for row in many if row.ranks > RANKS_PER_NODE]),
        ],
        "ms, 153,600 items on 2,560 ranks": {
            name: _mean([row.ms[name] for row in large]) for name in ("lpt", *OURS, "binary_search")
        },
        "steps": [
            {
                **asdict(row),
                "bytes of LPT over ours": row.ratio,
                "least bytes": row.least,
                "bytes of ours over the least": row.over_least,
                "bytes beyond the least, share of all": row.distance,
            }
            for row in steps
        ],
    }


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _beside_peers(found: list[Row]) -> dict[str, Any]:
    """Loads and times of ours beside those of the peers on the same instances."""
    names = sorted({name for row in found for name in row.load if name.split(" ")[0] in ("verl", "veomni")})

    def worse(name: str, ours: str, suffix: str = "") -> list[str]:
        """Instances on which a peer is better."""
        return [
            f"{row.ranks}x{row.per_rank} {row.mix} {row.stage}: {row.load[ours]:.5f} > {row.load[name + suffix]:.5f}"
            for row in found
            if name + suffix in row.load and row.load[ours] > row.load[name + suffix] * (1 + 1e-9)
        ]

    beaten = [
        (row.load["local"] / least - 1, row.crossing["bound as good as peers"] - row.crossing["bound"])
        for row in found
        for least in [min((row.load[name] for name in PEERS if name in row.load), default=np.inf)]
        if row.load["local"] > least * (1 + 1e-9) and row.ranks > RANKS_PER_NODE
    ]
    needed = [need for _, need in beaten]
    avoidable = [excess for excess, need in beaten if need <= ALLOWED]
    return {
        "peers, all instances": {name: _mean([row.load[name] for row in found if name in row.load]) for name in names},
        "ours on the same": {
            name: _mean([row.load[_counterpart(name)] for row in found if name in row.load]) for name in names
        },
        "peers better than greedy": [line for name in PEERS for line in worse(name, "greedy")]
        + worse("veomni", "greedy squared", " squared"),
        "load over the best peer's": {ours: compare_loads([row.load for row in found], ours) for ours in OURS},
        "ms of peers over ours, median": {
            f"{peer} over {ours}": compare_times([(row.ranks, row.ms) for row in found], peer, ours)
            for peer in PEERS
            for ours in (*OURS, "binary_search", "sort")  # padded batches are cut by none of the peers
        },
        "crossing that any plan as good as the best peer needs, beyond the bound at 1.01, worst and mean": [
            max(needed, default=None),
            _mean(needed),
        ],
        "local worse than the best peer on several nodes though that needs no more than 0.5 % beyond; by, worst": [
            len(avoidable),
            max(avoidable, default=None),
        ],
    }


def _between_nodes(found: list[Row]) -> dict[str, Any]:
    """What crosses nodes, and what placement saves of it: means over the instances of more than one node."""
    packed = ("lpt", "lpt placed", "local", "local 1%", "local placed")
    padded = ("bound padded", "binary_search", "binary_search placed", "local padded")
    return {
        "crossing": {name: _mean([row.crossing[name] for row in found]) for name in ("bound", *packed)},
        "crossing, padded": {name: _mean([row.crossing[name] for row in found]) for name in padded},
        "largest volume of a rank over its mean load": {
            name: _mean([row.volume[name] for row in found]) for name in packed
        },
        "crossing that placement saves, most and mean": {
            name: [max(saved, default=None), _mean(saved)]
            for name in ("lpt", "local")
            for saved in [[row.crossing[name] - row.crossing[f"{name} placed"] for row in found]]
        },
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
            print(_step_line(steps[-1]), flush=True)
    report = summary(found, steps)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps({"summary": report, "rows": [asdict(row) for row in found]}, indent=1))


if __name__ == "__main__":
    main()
