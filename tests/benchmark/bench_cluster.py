"""Step times and bytes on the link of an emulated cluster, for ways to balance and to exchange, which take turns.

    python tests/benchmark/bench_cluster.py [--quick] [--json FILE]

The three-modality example trains on recorded groups of its generated data, on nodes that are network namespaces with
a shaped link between them (`tests.cluster`). Bytes are what the links' counters say, against what the plan says;
gradients are not reduced, so that only our own traffic crosses. Ranks share this machine's cores: a step's time shows
what the link costs, and not what balance saves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ablate import Recorded, record
from omni.tokenizer import train_tokenizer
from tiny_omni import tiny_thinker_config
from training import make_model, make_parser

import orch
from tests.cluster import Cluster, NotPermittedError, link_bytes


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do a step."""

    balance: str = "post"
    dispatcher: str | None = None
    placement: bool = True
    exchange: str = "flat"


VARIANTS = {
    "none": Variant("none"),
    "LPT + identity": Variant(dispatcher="greedy", placement=False),
    "LPT + ILP": Variant(dispatcher="greedy"),
    "local": Variant(dispatcher="local"),
    "local, node-wise": Variant(dispatcher="local", exchange="node_wise"),
    "local, all-gather": Variant(dispatcher="local", exchange="all_gather"),
}


@dataclass(slots=True)
class Row:
    """A variant's figures for each step, medians over repeats; bytes are a step's, over all links, one way."""

    variant: str
    step_ms: list[float]
    train_ms: list[float]
    planned_bytes: list[int]
    link_bytes: list[float]
    loss: list[float]

    @property
    def ratio(self) -> float:
        """Bytes on the link over those planned, of all steps together; 1 where nothing is planned."""
        return sum(self.link_bytes) / sum(self.planned_bytes) if sum(self.planned_bytes) else 1.0


def make_loader(model: Any, groups: Any, variant: Variant, timeout_s: float) -> Any:
    """The groups, balanced and exchanged in one way."""
    loader = orch.orchestrate(
        Recorded(groups, "packed"),
        model,
        balance=variant.balance,
        dispatcher=variant.dispatcher,
        exchange=variant.exchange,
        prefetch=0,
        timeout_s=timeout_s,
    )
    config = replace(loader.setup.config, placement=variant.placement)
    loader.setup = replace(loader.setup, config=config)
    return loader


def run_rank(args: Namespace, repeats: int) -> list[dict[str, Any]]:
    """Every rank: the variants take turns at each step, in another order each time; an entry for each."""
    tokenizer = train_tokenizer()
    config = tiny_thinker_config(tokenizer.vocab_size)
    groups = record(args, tokenizer, config)
    model = make_model(args, config, torch.device("cpu"))
    loaders = {name: make_loader(model, groups, variant, args.timeout_s) for name, variant in VARIANTS.items()}
    records: list[dict[str, Any]] = []
    for repeat in range(repeats + 1):  # the first round connects and warms up
        batches = {name: iter(loader) for name, loader in loaders.items()}
        for step in range(len(groups)):
            names = list(loaders)
            turn = (repeat + step) % len(names)
            for name in names[turn:] + names[:turn]:
                found = run_step(model, loaders[name], batches[name])
                if repeat:
                    records.append({"variant": name, "step": step, **found})
    return records


def run_step(model: Any, loader: Any, batches: Iterator[Any]) -> dict[str, Any]:
    """Prepares and trains one step; this rank's figures, and what the plan says of the bytes that it sends."""
    ready: list[Any] = []
    idle = measured(lambda: None)
    prepare = measured(lambda: ready.append(next(batches)))
    losses: list[Any] = []
    train = measured(lambda: losses.append(forward_backward(model, ready[0])))
    micro_step = ready[0]["orch"]
    rows, crossing = planned_rows(micro_step, loader.setup)
    return {
        "node": int(loader.setup.topology.node_of_rank[loader.setup.rank]),
        "ms": [prepare[1], train[1]],
        "bytes": [prepare[0] - idle[0], train[0] - idle[0]],
        "rows": rows,
        "crossing": crossing,
        "moved": loader.report.steps[-1].moved.inter_node,
        "loss": micro_step.mean_loss(losses[0]),
    }


def forward_backward(model: Any, batch: Any) -> Any:
    """One step without an optimizer; returns the loss."""
    loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    return loss.detach()


def measured(do: Any) -> tuple[int, float]:
    """Bytes that left this node's link meanwhile, and milliseconds until all ranks were done."""
    dist.barrier()
    before = link_bytes().sent
    dist.barrier()
    start = time.perf_counter()
    do()
    dist.barrier()
    milliseconds = 1e3 * (time.perf_counter() - start)
    after = link_bytes().sent
    dist.barrier()
    return after - before, milliseconds


def planned_rows(micro_step: Any, setup: Any) -> tuple[int, int]:
    """Bytes of rows that this rank sends to other nodes: in the forward if sent straight; both ways, as they go.

    An all-gather goes round a ring: each rank hands on what all others have, padded to the most, and one rank of each
    node hands it to the next node.
    """
    node, straight, crossing = setup.topology.node_of_rank, 0, 0
    follows = (setup.rank + 1) % setup.topology.num_ranks
    for name, stage in micro_step.stages.items():
        exchange, row_bytes = stage.exchange, setup.config.stage(name).row_bytes
        away = node != node[setup.rank]
        straight += row_bytes * int(exchange.send_splits[away].sum())
        if setup.choices.exchange == "all_gather" and stage.moves:
            handed_on = (setup.topology.num_ranks - 1) * (exchange.most_sent + exchange.most_received)
            crossing += row_bytes * handed_on * int(node[follows] != node[setup.rank])
        else:
            crossing += row_bytes * int(exchange.send_splits[away].sum() + exchange.recv_splits[away].sum())
    return straight, crossing


def summarise(ranks: list[list[dict[str, Any]]]) -> list[Row]:
    """One row for each variant, from the records of all ranks, which are in the same order."""
    by_step: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for records in zip(*ranks, strict=True):
        first = records[0]
        one_of_each_node = {record["node"]: record for record in records}.values()
        straight, crossing = (sum(record[key] for record in records) for key in ("rows", "crossing"))
        train_ms = max(record["ms"][1] for record in records)
        figures = (
            train_ms + max(record["ms"][0] for record in records),
            train_ms,
            first["moved"] - straight + crossing,
            sum(sum(record["bytes"]) for record in one_of_each_node),
            sum(record["loss"] for record in records),
        )
        by_step.setdefault((first["variant"], first["step"]), []).append(figures)
    rows = []
    for name in VARIANTS:
        steps = [np.median(figures, axis=0).tolist() for (variant, _), figures in by_step.items() if variant == name]
        columns = [list(column) for column in zip(*steps, strict=True)]
        rows.append(Row(name, columns[0], columns[1], [int(value) for value in columns[2]], columns[3], columns[4]))
    return rows


def print_rows(rows: list[Row], title: str) -> None:
    """The table and the order found."""
    print(f"\n{title}\n{'':20}{'step ms':>9}{'train ms':>9}{'plan kB':>9}{'link kB':>9}{'link/plan':>10}{'loss':>9}")
    for row in rows:
        planned, crossed = (sum(values) / len(values) / 1e3 for values in (row.planned_bytes, row.link_bytes))
        print(
            f"{row.variant:20}{np.median(row.step_ms):9.0f}{np.median(row.train_ms):9.0f}{planned:9.0f}{crossed:9.0f}"
            f"{row.ratio if planned else float('nan'):10.3f}{np.mean(row.loss):9.4f}"
        )
    for what, key in (("time", lambda row: np.median(row.step_ms)), ("bytes", lambda row: sum(row.link_bytes))):
        print(f"by {what}, least first: " + " < ".join(row.variant for row in sorted(rows, key=key)))


def run_cluster(node_sizes: tuple[int, ...], options: Namespace) -> dict[str, Any]:
    """All variants on one cluster."""
    args = make_parser("").parse_args([])
    args.steps, args.samples, args.token_budget, args.num_workers = options.steps, 40 * options.steps, 1024, 0
    args.timeout_s = options.timeout_s
    with Cluster(node_sizes, mbit=options.mbit) as cluster:
        rows = summarise(cluster.run(run_rank, args, options.repeats, timeout_s=options.timeout_s))
    title = (
        f"{'+'.join(map(str, node_sizes))} ranks, {options.mbit:g} Mbit/s, {options.steps} steps x {options.repeats}"
    )
    print_rows(rows, title)
    return {"nodes": node_sizes, "mbit": options.mbit, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps, once, on 2 nodes of 2 ranks")
    parser.add_argument("--json", type=Path, default=None, help="where to write everything")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=200, help="of each node's link, each way")
    parser.add_argument("--timeout-s", type=float, default=900)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.repeats = 2, 1
    try:
        found = [run_cluster(sizes, options) for sizes in (((2, 2),) if options.quick else ((2, 2), (1, 1, 1, 1)))]
    except NotPermittedError as error:
        print(f"skipped: no cluster can be emulated here: {error}")
        return
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
