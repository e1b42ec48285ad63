"""What balancing is worth: the same recorded steps under none, pre, llm, post, and post with the all-gather exchange.

    torchrun --nproc-per-node 2 examples/ablate.py

All variants take turns at every step in one set of processes, so that a drifting machine favours none of them.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from checks import at_least, check_run
from omni.tokenizer import train_tokenizer
from part_times import PartTimes, least, pin_thread
from reporting import print_ablation
from tiny_omni import tiny_thinker_config
from torch.nn.parallel import DistributedDataParallel
from training import make_loader, make_model, make_parser

import orch
from orch.comm.gather import gather_ragged

FloatArray = npt.NDArray[np.float64]
Samples = list[dict[str, Any]]
VARIANTS = {
    "none": ("none", "flat"),
    "pre": ("pre", "flat"),
    "llm": ("llm", "flat"),
    "post": ("post", "flat"),
    "post, all-gather": ("post", "all_gather"),
}
NUM_CALIBRATION_SAMPLES = 24


class Recorded:
    """A loader that replays groups."""

    def __init__(self, groups: list[Samples], layout: str) -> None:
        self._groups, self.layout = groups, layout

    def groups(self) -> Any:
        """The groups, from the first on."""
        return iter(self._groups)


def record(args: Namespace, tokenizer: Any, config: Any) -> list[Samples]:
    """What this rank has at hand of the first groups that the loader forms."""
    loader = make_loader(args, tokenizer, config)
    groups = list(islice(loader.groups(loader.grouping), args.steps))
    loader.close()
    return groups


def bytes_per_step(loader: Any) -> dict[str, float]:
    """Bytes that change rank in a step, within and between nodes, gradients not counted.

    An all-gather brings all rows of every rank, padded to the most that one has, to every other.
    """
    setup, more = loader.setup, np.zeros(2, dtype=np.int64)
    node = setup.topology.node_of_rank
    same, other = node == node[setup.rank], node != node[setup.rank]
    same[setup.rank] = False
    for batch in loader:
        for name, stage in batch["orch"].stages.items():
            if setup.choices.exchange == "all_gather" and stage.moves:
                padding = stage.exchange.most_sent - stage.exchange.recv_splits
                more += setup.config.stage(name).row_bytes * np.array([padding[same].sum(), padding[other].sum()])
    planned, num_steps = loader.report.summary()["bytes"], len(loader.report.steps)
    total = np.sum(gather_ragged(more), axis=0) + np.array([planned["intra_node"], planned["inter_node"]])
    return dict(zip(("intra_node", "inter_node"), (total / num_steps).tolist(), strict=True))


def measure(engine: Any, loaders: dict[str, Any], parts: PartTimes, num_repeats: int) -> tuple[FloatArray, FloatArray]:
    """Seconds of forward and backward on this rank: CPU [variants, steps], wall clock [variants, repeats, steps].

    Ranks change cores at every repeat, so that a slow core is no rank's own.
    """
    runs: dict[str, list[list[tuple[list[float], float]]]] = {name: [] for name in loaders}
    names = list(loaders)
    for repeat in range(num_repeats + 1):
        if dist.get_rank() == 0:
            print(f"round {repeat + 1} of {num_repeats + 1}", file=sys.stderr, flush=True)
        pin_thread(dist.get_rank() + repeat)
        batches = {name: iter(loader) for name, loader in loaders.items()}
        for turn in count(repeat):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            prepared = {name: next(batches[name], None) for name in order}
            if prepared[names[0]] is None:
                break
            for name in order:
                if turn == repeat:
                    runs[name].append([])
                runs[name][-1].append(_timed(engine, prepared[name], parts))
    kept = {name: runs[name][1:] for name in names}  # the first round warms up
    cpu = [[least([seconds for seconds, _ in step]) for step in zip(*kept[name], strict=True)] for name in names]
    wall = [[[elapsed for _, elapsed in run] for run in kept[name]] for name in names]
    return np.array(cpu), np.array(wall)


def _timed(engine: Any, batch: Any, parts: PartTimes) -> tuple[list[float], float]:
    """CPU seconds of each part, and seconds that passed."""
    dist.barrier()
    start = time.perf_counter()
    with parts.measure() as seconds:
        engine(**batch).loss.backward()
    elapsed = time.perf_counter() - start
    engine.zero_grad()
    return seconds, elapsed


def over_ranks(seconds: FloatArray) -> FloatArray:
    """Everyone's times, ranks first; in seconds."""
    gathered = gather_ragged(np.round(seconds * 1e9).astype(np.int64).ravel())
    return np.stack(gathered).reshape(-1, *seconds.shape) / 1e9


def summarise(
    cpu: FloatArray, wall: FloatArray, loaders: dict[str, Any], moved: dict[str, Any], num_tokens: int
) -> dict[str, Any]:
    """The table, from all ranks' times: CPU [ranks, variants, steps], wall clock [ranks, variants, repeats, steps]."""
    step_cpu, step_wall = cpu.max(axis=0), np.median(wall.max(axis=0), axis=1)
    perfect = cpu[:, 0].mean(axis=0)
    possible = step_cpu[0].sum() - perfect.sum()
    rows = {}
    for index, (name, loader) in enumerate(loaders.items()):
        rows[name] = {
            "cpu_ms": _median_and_interval(step_cpu[index]),
            "wall_ms": _median_and_interval(step_wall[index]),
            "tokens_per_s": num_tokens / step_cpu[index].sum(),
            "work": cpu[:, index].sum() / cpu[:, 0].sum(),
            "speed": step_cpu[0].sum() / step_cpu[index].sum(),
            "share_of_possible_gain": (step_cpu[0].sum() - step_cpu[index].sum()) / possible,
            "rank_cpu_s": cpu[:, index].tolist(),
            "stages": loader.report.stages(),
            "bytes_per_step": moved[name],
        }
    ideal = {
        "cpu_ms": _median_and_interval(perfect),
        "speed": step_cpu[0].sum() / perfect.sum(),
        "tokens_per_s": num_tokens / perfect.sum(),
    }
    return {"num_steps": wall.shape[3], "num_repeats": wall.shape[2], "variants": rows, "perfect balance": ideal}


def _median_and_interval(seconds: FloatArray) -> dict[str, float]:
    """Milliseconds: the median over steps and its 95 % interval, from 1,000 resamplings."""
    drawn = np.random.default_rng(0).choice(seconds, (1000, len(seconds)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {"median": 1e3 * float(np.median(seconds)), "low": 1e3 * float(low), "high": 1e3 * float(high)}


def run(args: Namespace) -> dict[str, Any]:
    """Records, replays, and sums up."""
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    config = tiny_thinker_config(tokenizer.vocab_size, hidden_size=args.hidden_size, num_layers=args.num_layers)
    groups = record(args, tokenizer, config)
    model = make_model(args, config, torch.device("cpu"))
    drawn = [sample for group in groups for sample in group][:NUM_CALIBRATION_SAMPLES]
    costs = orch.calibrate(model, drawn, layout=args.layout)
    parts, engine = PartTimes(model), DistributedDataParallel(model)
    topology = orch.Topology(dist.get_world_size(), args.ranks_per_node)
    loaders = {
        name: orch.orchestrate(
            Recorded(groups, args.layout),
            engine,
            balance=balance,
            exchange=exchange,
            costs=costs,
            topology=topology,
            prefetch=0,
        )
        for name, (balance, exchange) in VARIANTS.items()
        if name in ("none", *args.variants)
    }
    moved = {name: bytes_per_step(loader) for name, loader in loaders.items()}
    cpu, wall = measure(engine, loaders, parts, args.repeats)
    num_tokens = sum(len(sample["input_ids"]) for group in groups for sample in group)
    everyones = int(sum(int(tokens[0]) for tokens in gather_ragged(np.array([num_tokens], dtype=np.int64))))
    fitted = {name: asdict(cost) for name, cost in costs.items()}
    return summarise(over_ranks(cpu), over_ranks(wall), loaders, moved, everyones) | {"costs_s": fitted}


def make_arguments() -> ArgumentParser:
    """Those of the training example, and those of the comparison."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--repeats", type=at_least(1), default=14, help="times that every step is run under each variant"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help='to compare; "none" always takes part'
    )
    # Wide and shallow: attention takes a share of a step that is near that of large models at their lengths.
    parser.add_argument("--hidden-size", type=at_least(1), default=512, help="of the LLM")
    parser.add_argument("--num-layers", type=at_least(1), default=2, help="of the LLM and of the vision tower")
    parser.set_defaults(steps=5, samples=1000, token_budget=2048, max_pixels=448 * 448, ranks_per_node=1)
    return parser


def main() -> None:
    """Every rank runs this."""
    args = make_arguments().parse_args()
    dist.init_process_group("gloo")
    check_run(args)
    result = run(args)
    if dist.get_rank() == 0:
        print_ablation(result)
        if args.report is not None:
            args.report.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
