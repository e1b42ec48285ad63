"""How long training waits for us: lengths, plans, raw items and rows that cross a link as fast as a large model's.

    python tests/benchmark/bench_waiting.py [--json FILE]

The three-modality example trains on two nodes of one rank and one core each. Their link is shaped so that what crosses
takes the share of a step's compute that it would take with a 7B model on nodes of 8 GPUs with 400 Gbit/s, of which the
arithmetic is printed; and then 8 and 64 times slower, to show what the link costs once it does. Epochs over the same
recorded steps take turns: as drawn, with nothing that crosses, and balanced at each speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ablate import Recorded, record
from bench_cluster import forward_backward, planned_rows
from omni.tokenizer import train_tokenizer
from tiny_omni import tiny_thinker_config
from training import make_model, make_parser

import orch
from orch.comm import all_to_all
from tests.cluster import Cluster, NotPermittedError

UNSHAPED_MBIT = 20_000.0
SLOWER = (1.0, 8.0, 64.0)


@dataclass(frozen=True, slots=True)
class LargeModel:
    """What is emulated: a 7B model with encoders of 0.7B parameters on nodes of 8 GPUs."""

    llm_parameters: float = 7.6e9
    encoder_parameters: float = 0.67e9
    flops_of_rank: float = 4e14  # 40 % of what an H100 does in bf16
    link_gbit_of_node: float = 400.0
    ranks_of_node: int = 8
    row_bytes: int = 3584 * 2

    def seconds(self, llm_tokens: float, encoder_tokens: float) -> float:
        """Of one rank's compute: forward and backward take 6 FLOPs for each parameter and token."""
        flops = 6 * (self.llm_parameters * llm_tokens + self.encoder_parameters * encoder_tokens)
        return flops / self.flops_of_rank

    def link_seconds(self, num_bytes: float) -> float:
        """Of one rank's share of its node's link."""
        return num_bytes * 8 * self.ranks_of_node / (self.link_gbit_of_node * 1e9)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one rank and step, on average.

    Attributes:
        llm_tokens: Tokens in the LLM.
        encoder_tokens: Patches and frames in the encoders.
        row_bytes: Bytes of rows that cross, forward and backward.
        other_bytes: Bytes of raw items and text that cross.
        row_bytes_of_width: The same as `row_bytes` at the width of the large model.
        step_s: Seconds of a step as drawn.
    """

    llm_tokens: float
    encoder_tokens: float
    row_bytes: float
    other_bytes: float
    row_bytes_of_width: float
    step_s: float


def equivalent_mbit(traffic: Traffic, large: LargeModel) -> tuple[float, str]:
    """The link on which this traffic takes the share of a step that the large model's does, and the arithmetic."""
    compute = large.seconds(traffic.llm_tokens, traffic.encoder_tokens)
    num_bytes = traffic.row_bytes_of_width + traffic.other_bytes
    share = large.link_seconds(num_bytes) / compute
    mbit = (traffic.row_bytes + traffic.other_bytes) * 8 / (share * traffic.step_s) / 1e6
    return mbit, (
        f"large: a rank's step of {traffic.llm_tokens:.0f} LLM and {traffic.encoder_tokens:.0f} encoder tokens takes "
        f"{1e3 * compute:.0f} ms; the {num_bytes / 1e6:.2f} MB of it that cross take "
        f"{1e3 * large.link_seconds(num_bytes):.2f} ms, {share:.2%}\n"
        f"here: a step takes {1e3 * traffic.step_s:.0f} ms; {(traffic.row_bytes + traffic.other_bytes) / 1e6:.2f} MB "
        f"cross; {share:.2%} of it on a link of {mbit:.0f} Mbit/s"
    )


def run_rank(args: Namespace, cluster: Cluster) -> dict[str, Any]:
    """Every rank: epochs take turns; seconds and waits of each."""
    torch.set_num_threads(1)
    waits = log_waits()
    tokenizer = train_tokenizer()
    config = tiny_thinker_config(tokenizer.vocab_size)
    groups = record(args, tokenizer, config)
    model = make_model(args, config, torch.device("cpu"))
    costs = orch.calibrate(model, [sample for group in groups for sample in group][:24])
    loaders = {
        balance: orch.orchestrate(Recorded(groups, "packed"), model, balance=balance, costs=costs, exchange="flat")
        for balance in ("none", "post")
    }
    epoch(model, loaders["none"], waits)
    traffic = measure_traffic(model, loaders, groups, waits)
    mbit, arithmetic = equivalent_mbit(traffic, LargeModel())
    speeds = {"as drawn": ("none", UNSHAPED_MBIT), "unshaped": ("post", UNSHAPED_MBIT)}
    speeds |= {f"equivalent / {slower:g}": ("post", mbit / slower) for slower in SLOWER}
    rows: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name in speeds}
    for name in itertools.chain.from_iterable(itertools.repeat(list(speeds), args.repeats)):
        balance, speed = speeds[name]
        dist.barrier()
        if dist.get_rank() == 0:
            cluster.set_link(speed)
        rows[name].append(epoch(model, loaders[balance], waits))
    return {"arithmetic": arithmetic, "traffic": asdict(traffic), "mbit": mbit, "rows": rows}


def log_waits() -> list[float]:
    """From now on, the seconds that this thread waits for each exchange of rows or of their gradients."""
    waits: list[float] = []
    thread, real = threading.get_ident(), all_to_all._waited

    def waited(*args: Any) -> Any:
        start = time.perf_counter()
        result = real(*args)
        if threading.get_ident() == thread:
            waits.append(time.perf_counter() - start)
        return result

    all_to_all._waited = waited
    return waits


def epoch(model: Any, loader: Any, waits: list[float]) -> tuple[float, float, list[float]]:
    """Trains on all steps but the first, which fills the pipeline.

    Returns:
        Seconds; seconds that batches were awaited; seconds of each wait for an exchange, which go through `waits`.
    """
    batches = iter(loader)
    forward_backward(model, next(batches))
    first = len(loader.report.wait_ms)
    dist.barrier()
    waits.clear()
    start = time.perf_counter()
    for batch in batches:
        forward_backward(model, batch)
    dist.barrier()
    awaited = sum(loader.report.wait_ms[first:-1]) / 1e3  # the last wait is for the end
    return time.perf_counter() - start, awaited, list(waits)


def measure_traffic(model: Any, loaders: dict[str, Any], groups: Any, waits: list[float]) -> Traffic:
    """From the plans of all steps, and the time of an epoch as drawn."""
    seconds, *_ = epoch(model, loaders["none"], waits)
    loader, row_bytes, widened, moved = loaders["post"], 0.0, 0.0, 0.0
    for batch in loader:
        forward_backward(model, batch)
        straight, crossing = planned_rows(batch["orch"], loader.setup)
        row_bytes += crossing
        widened += crossing * LargeModel().row_bytes / loader.setup.config.stage("vision").row_bytes
        moved += loader.report.steps[-1].moved.inter_node / 2 - straight
    lengths = [len(sample["input_ids"]) for group in groups for sample in group]
    encoded = [len(sample.get(key, ())) for group in groups for sample in group for key in
               ("pixel_values", "input_features")]  # fmt: skip
    own = [sum(lengths), sum(encoded), row_bytes, moved, widened]
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mean = (total / (dist.get_world_size() * len(groups))).tolist()
    return Traffic(mean[0], mean[1], mean[2], mean[3], mean[4], float(longest) / (len(groups) - 1))


def summarise(ranks: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Medians over epochs: milliseconds a step of the slowest rank, and the shares of them that were spent waiting.

    The rank that comes to an exchange last waits for the link alone, the others for that rank as well: so of each
    exchange the least wait counts.
    """
    rows = {}
    for name in ranks[0]["rows"]:
        seconds = np.array([[epoch[:2] for epoch in rank["rows"][name]] for rank in ranks])  # [ranks, epochs, 2]
        link = np.array([[epoch[2] for epoch in rank["rows"][name]] for rank in ranks]).min(axis=0).sum(axis=1)
        steps = seconds[..., 0].max(axis=0)
        rows[name] = {
            "step_ms": 1e3 * float(np.median(steps)) / num_steps,
            "awaited": float(np.median(seconds[..., 1].max(axis=0) / steps)),
            "link": float(np.median(link / steps)),
        }
    return {**{key: ranks[0][key] for key in ("arithmetic", "traffic", "mbit")}, "rows": rows}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="where to write everything")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=1200)
    options = parser.parse_args()
    args = make_parser("").parse_args([])
    args.steps, args.samples, args.num_workers, args.repeats = options.steps, 40 * options.steps, 0, options.repeats
    try:
        with Cluster((1, 1), mbit=UNSHAPED_MBIT) as cluster:
            ranks = cluster.run(run_rank, args, cluster, timeout_s=options.timeout_s)
    except NotPermittedError as error:
        print(f"skipped: no cluster can be emulated here: {error}")
        return
    found = summarise(ranks, options.steps - 1)
    print(found["arithmetic"])
    print(f"\n{'':18}{'step ms':>9}{'awaited':>9}{'link':>9}")
    for name, row in found["rows"].items():
        print(f"{name:18}{row['step_ms']:9.1f}{row['awaited']:9.2%}{row['link']:9.2%}")
    print("shares of a step. awaited: batches that were not ready. link: exchanges that all ranks had come to.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
