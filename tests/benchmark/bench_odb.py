"""How well the online-dynamic-batching loader fills batches, and what it costs.

    python tests/benchmark/bench_odb.py [--quick] [--json FILE] [--released PYTHON]

`--released` names the interpreter of an environment that holds `online-dynamic-batching`, which then runs beside.

The mean length is 600 because there, over 24,000 samples and without its warm-up ramp, the released package shows what
was measured of it before: micro-steps over the oracle 1.33 / 1.43 / 1.54 at a coefficient of variation of 0.5 / 1.0 /
1.6 (1.31 / 1.42 / 1.52 before), padding 8 / 12 / 14 % (8 / 12 / 13), work 1.12 / 1.19 / 1.28 (1.12 / 1.19 / 1.29).

`drift` says how far the lengths that meet in a step are from a random draw of the data set: 1 is one. Packed groups are
one. Padded ones cannot be: low padding wants one length in a group, and even work wants groups of one cost, which goes
with length. `mixes_lengths` gives up the second, and a step is then nearer to a random draw than if the data set were
sorted offline and its groups shuffled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from odb_runs import BUDGET, draw_label_tokens, draw_lengths

from orch.odb.budget import TokenBudget
from orch.odb.grouping import form_groups

RUNS = Path(__file__).with_name("odb_runs.py")
NUM_RANKS = 8
WINDOW = {"buffer_size": 256, "num_workers": 1, "prefetch_factor": 256, "no_warmup": True}
DEFAULTS: dict[str, Any] = {"num_workers": 4}
README = {"num_workers": 4, "prefetch_factor": 64}
VARIANTS = ("ours, local", "ours, global, mixed", "ours, global, packed")
Batches = list[list[list[int]]]


def play(run: str, package: str, python: str, arguments: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Runs `odb_runs.py` in a process of its own."""
    command = [python, str(RUNS), run, "--package", package, "--arguments", json.dumps(arguments)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def oracle_steps(lengths: np.ndarray, num_ranks: int) -> int:
    """Micro-steps if the whole data set were sorted beforehand."""
    return -(-len(form_groups(lengths, TokenBudget(BUDGET, "padded"))) // num_ranks)


def quality(
    batches: list[list[tuple[list[int], float]]], lengths: np.ndarray, layout: str = "padded"
) -> dict[str, float]:
    """Figures of an epoch from the batches of each rank."""
    tokens = TokenBudget(BUDGET, layout).tokens
    groups: Batches = [[ids for ids, _ in rank] for rank in batches]
    counted = sorted(i for rank in groups for ids in rank for i in ids)
    num_steps = max(map(len, groups))
    work = np.array([[tokens(lengths[ids]) if ids else 0 for ids in rank] for rank in groups])
    real = sum(int(lengths[ids].sum()) for rank in groups for ids in rank)
    return {
        "num_steps": num_steps,
        "steps_over_oracle": num_steps / oracle_steps(lengths, len(groups)),
        "padding": 1 - real / work.sum(),
        "fill": real / (len(groups) * num_steps * BUDGET),
        "max_over_mean_work": float(work.max(axis=0).sum() / work.mean(axis=0).sum()),
        "mean_of_max_over_mean": float((work.max(axis=0) / work.mean(axis=0)).mean()),
        "drift": drift(groups, lengths),
        "samples_missing_or_repeated": len(set(range(len(lengths))) ^ set(counted)) + len(counted) - len(set(counted)),
        **gradient_errors(batches, lengths),
    }


def drift(groups: Batches, lengths: np.ndarray) -> float:
    """Spread of the steps' mean log length (by tokens) over that of steps of as many tokens drawn at random.

    1 is random; a data set sorted by length has the largest.
    """
    steps = [lengths[[i for rank in groups for i in rank[step]]] for step in range(len(groups[0]))]
    order = np.random.default_rng(0).permutation(lengths)
    ends = np.searchsorted(np.cumsum(order), np.cumsum([step.sum() for step in steps])[:-1])
    drawn = np.split(order, ends)
    ours, random = ([np.average(np.log(s), weights=s) for s in cut if len(s)] for cut in (steps, drawn))
    return float(np.std(ours) / np.std(random))


def sorted_steps(lengths: np.ndarray, num_ranks: int, *, shuffled: bool) -> Batches:
    """The groups of each rank if the whole data set is sorted and cut, in order or with the groups shuffled."""
    groups = form_groups(lengths, TokenBudget(BUDGET, "padded"))
    order = np.random.default_rng(0).permutation(len(groups)) if shuffled else np.arange(len(groups))
    groups = [groups[i] for i in order]
    groups += [groups[0][:0]] * (-len(groups) % num_ranks)
    return [[group.tolist() for group in groups[rank::num_ranks]] for rank in range(num_ranks)]


def gradient_errors(batches: list[list[tuple[list[int], float]]], lengths: np.ndarray) -> dict[str, float]:
    """Relative error of a step's gradient, from random gradients of each sample's mean loss per label token."""
    label_tokens = draw_label_tokens(lengths)
    gradients = np.random.default_rng(2).normal(size=(len(lengths), 16))
    errors = []
    for step in zip(*batches, strict=True):
        everyone = [i for ids, _ in step for i in ids]
        exact = np.average(gradients[everyone], axis=0, weights=label_tokens[everyone])
        means = [np.average(gradients[ids], axis=0, weights=label_tokens[ids]) * scale for ids, scale in step if ids]
        errors.append(np.linalg.norm(np.sum(means, axis=0) / len(step) - exact) / np.linalg.norm(exact))
    return {"gradient_error_median": float(np.median(errors)), "gradient_error_max": float(np.max(errors))}


def fixed_batches(lengths: np.ndarray, batch_size: int, num_ranks: int, order: np.ndarray) -> float:
    """Padded work of the busiest rank, over steps of fixed batches: what synchronous training waits for."""
    step = batch_size * num_ranks
    total = 0.0
    for start in range(0, len(order), step):
        ranks = [order[start:][:step][r * batch_size : (r + 1) * batch_size] for r in range(num_ranks)]
        total += max(len(ids) * lengths[ids].max() if len(ids) else 0 for ids in ranks)
    return total


def online_work(lengths: np.ndarray, layout: str, num_ranks: int, window: int = 256) -> float:
    """Work of the busiest rank over the steps of global grouping, played without processes."""
    from orch.comm.topology import Topology
    from orch.odb.global_grouping import GlobalWindow

    world = GlobalWindow(TokenBudget(BUDGET, layout), Topology(num_ranks))
    next_of_rank, total = [0] * num_ranks, 0.0
    shards = [lengths[rank::num_ranks] for rank in range(num_ranks)]
    while True:
        rows = []
        for rank, shard in enumerate(shards):
            room = window - int(np.count_nonzero(world.rank == rank))
            new = shard[next_of_rank[rank] :][:room]
            ordinals = next_of_rank[rank] + np.arange(len(new))
            rows.append(np.stack([ordinals, new, new, new, new, np.zeros_like(new)], axis=1))
            next_of_rank[rank] += len(new)
        world.add(rows)
        steps = world.plan_steps(all_ended=all(n == len(s) for n, s in zip(next_of_rank, shards, strict=True)))
        if not steps:
            return total
        total += sum(max(world.budget.tokens(world.length[group]) for group in step) for step in steps)
        world.remove(steps)


def mix_lengths(folder: Path, num_samples: int) -> dict[str, np.ndarray]:
    """LLM lengths of each mix of the handed generator, cut at the budget."""
    spec = importlib.util.spec_from_file_location("gen_traces", folder / "traces" / "gen_traces.py")
    assert spec is not None
    assert spec.loader is not None
    traces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(traces)
    return {
        mix: np.minimum([traces.llm_tokens(s) for s in traces.generate(mix, num_samples)], BUDGET).astype(np.int64)
        for mix in traces.MIXES
    }


def compare_mix(lengths: np.ndarray) -> dict[str, float]:
    """Throughput over fixed batches of the largest size that always fits the budget, work on the busiest rank.

    Sorted batches and the offline oracles know all lengths beforehand: GMT is a global sort cut at the budget, BMT a
    sort of blocks of 4096 samples; packing is best fit within 256 samples a rank, at linear cost.
    """
    rng = np.random.default_rng(0)
    order, ascending = rng.permutation(len(lengths)), np.argsort(lengths, kind="stable")
    batch_size = max(1, BUDGET // int(lengths.max()))
    base = fixed_batches(lengths, batch_size, NUM_RANKS, order)
    blocks = [order[start : start + 4096] for start in range(0, len(order), 4096)]
    works = {
        "batch_size_1": fixed_batches(lengths, 1, NUM_RANKS, order),
        "sorted": fixed_batches(lengths, batch_size, NUM_RANKS, ascending),
        "gmt": oracle_steps(lengths, NUM_RANKS) * BUDGET,
        "bmt": sum(oracle_steps(lengths[block], NUM_RANKS) for block in blocks) * BUDGET,
        "odb_padded": online_work(lengths[order], "padded", NUM_RANKS),
        "odb_packed": online_work(lengths[order], "packed", NUM_RANKS),
    }
    return {"fixed_batch_size": batch_size, **{name: float(base / work) for name, work in works.items()}}


def loaders(released: str | None) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Name, package, interpreter and further keywords of each loader that is compared."""
    ours = [
        ("ours, global", "ours", sys.executable, {"grouping": "global"}),
        ("ours, global, mixed", "ours", sys.executable, {"grouping": "global", "mixes_lengths": True}),
        ("ours, global, packed", "ours", sys.executable, {"grouping": "global", "layout": "packed"}),
        ("ours, local", "ours", sys.executable, {"grouping": "local"}),
    ]
    return ours + ([("released 0.1.2", "released", released, {})] if released else [])


def measure_quality(cvs: Sequence[float], num_samples: int, released: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, package, python, extra in loaders(released):
        for settings, arguments in (("window 256", WINDOW), ("defaults", DEFAULTS)):
            if settings == "defaults" and name in VARIANTS[1:]:
                continue
            for cv in cvs:
                title = f"{name}; {settings}; CV {cv}"
                try:
                    run = play("quality", package, python, {**arguments, **extra}, num_samples=num_samples, cv=cv)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"{title} failed: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                layout = extra.get("layout", "padded")
                found[title] = quality(run["batches"], draw_lengths(num_samples, cv), layout)
                print(title, found[title], file=sys.stderr)
    for cv in cvs:
        lengths = draw_lengths(num_samples, cv)
        for shuffled in (False, True):
            rank_groups = sorted_steps(lengths, NUM_RANKS, shuffled=shuffled)
            batches = [[(ids, 0.0) for ids in rank] for rank in rank_groups]
            figures = quality(batches, lengths) | {"gradient_error_median": np.nan, "gradient_error_max": np.nan}
            found[f"offline sort{', groups shuffled' if shuffled else ''}; CV {cv}"] = figures
    return found


def measure_cost(num_samples: int, released: str | None, repeats: int) -> dict[str, float]:
    """CPU microseconds a sample, the least of a few interleaved runs, 2 workers."""
    found: dict[str, float] = {}
    for _ in range(repeats):
        plain = {"batch_size": 16, "num_workers": 2}
        runs = [("plain, batches of 16", "plain", sys.executable, plain)]
        runs += [(n, p, py, {"num_workers": 2, "prefetch_factor": 64}) for n, p, py, _ in loaders(released)]
        for name, package, python, arguments in runs:
            if name not in VARIANTS:
                cost = play("cost", package, python, arguments, num_samples=num_samples)["us_per_sample"]
                found[name] = min(cost, found.get(name, cost))
    return found


def measure_overlap(num_samples: int, released: str | None) -> dict[str, float]:
    runs = [("plain, batches of 16", "plain", sys.executable, {"batch_size": 16, "num_workers": 4})]
    runs += [(n, p, py, README) for n, p, py, _ in loaders(released) if n not in VARIANTS]
    return {
        name: play("overlap", package, python, arguments, num_samples=num_samples)["efficiency"]
        for name, package, python, arguments in runs
    }


def print_table(title: str, rows: dict[str, Any]) -> None:
    print(f"\n## {title}\n")
    cells = {name: row if isinstance(row, dict) else {"value": row} for name, row in rows.items()}
    columns = list(next(iter(cells.values())))
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name, row in cells.items():
        print(f"| {name} | " + " | ".join(f"{row[column]:.4g}" for column in columns) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one spread of lengths, small epochs, no released package")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--released", help="interpreter of an environment with online-dynamic-batching")
    options = parser.parse_args()
    released = None if options.quick else options.released
    result: dict[str, Any] = {
        "quality": measure_quality(
            [1.0] if options.quick else [0.5, 1.0, 1.6], 6000 if options.quick else 24000, released
        ),
        "cpu_us_per_sample": measure_cost(2000 if options.quick else 8000, released, 1 if options.quick else 3),
        "overlap": measure_overlap(4000 if options.quick else 12000, released),
    }
    print_table(f"Filling batches: {NUM_RANKS} ranks, budget {BUDGET}, lognormal lengths", result["quality"])
    print_table("CPU microseconds a sample", result["cpu_us_per_sample"])
    print_table("Share of the time that the trainer trains", result["overlap"])
    if folder := os.environ.get("ORCH_DATA"):
        mixes = mix_lengths(Path(folder), 2000 if options.quick else 20000)
        result["mixes"] = {mix: compare_mix(lengths) for mix, lengths in mixes.items()}
        print_table("Throughput over fixed batches, by work on the busiest rank", result["mixes"])
    else:
        print("\nThe mixes need the environment variable ORCH_DATA.")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
