"""What the examples print: a progress bar while they train, and tables at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from orch.report import Report


class ProgressBar:
    """Steps, loss, tokens per second and each stage's imbalance before -> after; on rank 0 alone.

    Args:
        num_steps: Steps of the run, if it was limited.
        estimate: Steps that the data are estimated to last.
    """

    def __init__(self, num_steps: int | None, estimate: int) -> None:
        self._bar = tqdm(total=num_steps or estimate, disable=dist.get_rank() != 0, unit="step", dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, loss: float, tokens_per_s: float, report: Report) -> None:
        """Shows one more step; tokens per second are this rank's."""
        stages = " ".join(
            f"{name} {stage.imbalance_before:.2f}->{stage.imbalance_after:.2f}"
            for name, stage in report.steps[-1].stages.items()
        )
        self._bar.total = max(self._bar.total, self._bar.n + 1)
        self._bar.set_postfix_str(f"loss {loss:.3f} {tokens_per_s * dist.get_world_size():,.0f} tok/s {stages}")
        self._bar.update()


def print_tables(report: Mapping[str, Any]) -> None:
    """Prints a run's figures: per stage, then the rest."""
    console = Console(width=140)
    table = Table(title="Stages: imbalance is the largest load of a rank over the mean")
    columns = ("stage", "items", "before", "after", "least possible", "largest batch", "MB intra-node", "MB inter-node")
    for column in columns:
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, stage in report["stages"].items():
        table.add_row(
            name,
            f"{stage['num_items']:,}",
            *(_mean_and_worst(stage[key]) for key in ("imbalance_before", "imbalance_after", "bound")),
            f"{stage['largest_batch_before']:,} -> {stage['largest_batch_after']:,}",
            *(f"{stage['bytes'][where] / 1e6:,.1f}" for where in ("intra_node", "inter_node")),
        )
    console.print(table)
    rest = Table(title="Time, mean (worst)", show_header=False)
    for label, key in _TIMES.items():
        rest.add_row(label, f"{report[key]['mean']:,.1f} ({report[key]['max']:,.1f}) ms")
    console.print(rest)
    if report["loss"]:
        console.print(f"loss {report['loss'][0]:.4f} -> {report['loss'][-1]:.4f} in {len(report['loss'])} steps")
    console.print(
        f"{report['samples_trained']:,} samples trained, {report['samples_unique']:,} of them different, "
        f"{report['samples_skipped']:,} skipped; {report['tokens_per_s']:,.0f} tokens/s"
    )


_TIMES = {
    "optimizer step": "step_ms",
    "planning": "plan_ms",
    "gathering lengths": "gather_ms",
    "moving raw items": "exchange_ms",
    "training waited for data or plan": "wait_ms",
}


def _mean_and_worst(figures: Mapping[str, float]) -> str:
    return f"{figures['mean']:.3f} ({figures['max']:.3f})"


def print_ablation(result: Mapping[str, Any]) -> None:
    """Prints the comparison of variants on the same steps."""
    stages = list(result["variants"]["none"]["stages"])
    table = Table(title=f"{result['num_steps']} recorded steps, {result['num_repeats']} times each")
    table.add_column("variant")
    headings = ["CPU ms of the slowest rank", "wall ms", "tokens/s, none = 1", "share of possible gain"]
    headings += ["work of all ranks", *(f"{name} imbalance (least)" for name in stages)]
    headings += [f"{name} largest" for name in stages]
    for heading in [*headings, "MB a step intra-node", "MB a step inter-node"]:
        table.add_column(heading, justify="right")
    for name, row in result["variants"].items():
        table.add_row(
            name,
            _median_and_interval(row["cpu_ms"]),
            _median_and_interval(row["wall_ms"]),
            f"{row['speed']:.3f}",
            f"{row['share_of_possible_gain']:.2f}",
            f"{row['work']:.3f}",
            *(_after_and_least(row["stages"][stage]) for stage in stages),
            *(f"{row['stages'][stage]['largest_batch_after']:,}" for stage in stages),
            *(f"{row['bytes_per_step'][where] / 1e6:.2f}" for where in ("intra_node", "inter_node")),
        )
    ideal = result["perfect balance"]
    table.add_row(
        "perfect balance", _median_and_interval(ideal["cpu_ms"]), "", f"{ideal['speed']:.3f}", "1.00", "1.000"
    )
    Console(width=200).print(table)


def _after_and_least(stage: Mapping[str, Any]) -> str:
    return f"{stage['imbalance_after']['mean']:.3f} ({stage['bound']['mean']:.3f})"


def _median_and_interval(figures: Mapping[str, float]) -> str:
    return f"{figures['median']:.0f} [{figures['low']:.0f}, {figures['high']:.0f}]"
