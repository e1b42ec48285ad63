"""Where the time of one step goes on each rank, before and after balancing: a trace and a picture of its timeline.

    pip install 'orch-mllm[examples,trace]'
    torchrun --nproc-per-node 4 examples/trace_step.py --out traces

`traces/none-rank0.json` and the like open in Perfetto or chrome://tracing; `traces/timeline.png` shows them together.
Below what a rank trains lies what its background thread prepares meanwhile: the step after the one that lies ready.
"""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ablate import Recorded, record
from omni.tokenizer import train_tokenizer
from tiny_omni import tiny_thinker_config
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import _ExperimentalConfig, profile, record_function
from training import make_model, make_parser

import orch

BALANCES = ("none", "post")
COLOURS = {
    "orch.encode.": "tab:blue",
    "orch.exchange.": "tab:red",
    "orch.merge": "tab:purple",
    "orch.gather": "tab:orange",
    "orch.plan": "tab:brown",
    "LLM": "tab:green",
    "backward": "0.8",
}
NUM_AHEAD = 2  # With `prefetch=1`, one step lies ready and one is being prepared.


class Bar(NamedTuple):
    """A range: its name, start and length in milliseconds, and whether it ran in the background thread."""

    name: str
    start: float
    length: float
    in_background: bool = False


def trace_step(engine: Any, loader: Any, num_steps: int, path: Path) -> list[Bar]:
    """Profiles the last of so many steps, and what is prepared meanwhile, and writes the trace.

    Returns:
        The ranges that began within the step, which starts at 0.
    """
    batches = iter(loader)
    for _ in range(num_steps - 1):
        engine(**next(batches)).loss.backward()
        engine.zero_grad()
    dist.barrier()
    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        with contextlib.closing(batches):  # The background thread ends what it prepares.
            with record_function("step"):
                loss = engine(**next(batches)).loss
                with record_function("backward"):
                    loss.backward()
    engine.zero_grad()
    profiler.export_chrome_trace(str(path))
    events = list(profiler.events() or [])
    (step,) = [event for event in events if event.name == "step"]
    start = step.time_range.start
    bars = [
        Bar(
            event.name,
            (event.time_range.start - start) / 1e3,
            event.time_range.elapsed_us() / 1e3,
            event.thread != step.thread,
        )
        for event in events
        if (event.name == "backward" or event.name.startswith("orch.")) and event.time_range.start < step.time_range.end
    ]
    return _with_llm(bars)


def _with_llm(bars: list[Bar]) -> list[Bar]:
    """Adds what lies between the last range of the forward and the backward: the LLM."""
    (backward,) = [bar.start for bar in bars if bar.name == "backward"]
    begin = max(bar.start + bar.length for bar in bars if bar.start < backward and not bar.in_background)
    return [*bars, Bar("LLM", begin, backward - begin)]


def draw(folder: Path, num_ranks: int) -> None:
    """One panel for each balance; for each rank a line of what it trains and one of what it prepares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(BALANCES), 1, sharex=True, figsize=(12, 1.5 + 0.9 * num_ranks * len(BALANCES)))
    for axis, balance in zip(axes, BALANCES, strict=True):
        for rank in range(num_ranks):
            for bar in map(Bar._make, json.loads((folder / f"{balance}-rank{rank}.bars.json").read_text())):
                colour = next(colour for prefix, colour in COLOURS.items() if bar.name.startswith(prefix))
                is_backward = bar.name == "backward"  # its exchanges lie within it
                place, height = (0.3, 0.2) if bar.in_background else (-0.12, 0.55 if is_backward else 0.35)
                where = {"left": bar.start, "height": height, "zorder": 1 if is_backward else 2}
                axis.barh(rank + place, bar.length, color=colour, **where)
        axis.set(title=f'balance="{balance}"', yticks=range(num_ranks), ylabel="rank")
        axis.invert_yaxis()
    axes[-1].set_xlabel("ms (lower line of a rank: prepared in the background)")
    labels = [Patch(color=colour, label=name.removeprefix("orch.").rstrip(".")) for name, colour in COLOURS.items()]
    figure.legend(handles=labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.savefig(folder / "timeline.png", dpi=110)


def run(args: Namespace) -> None:
    """Replays the same groups under each balance."""
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    config = tiny_thinker_config(tokenizer.vocab_size)
    more = Namespace(**{**vars(args), "steps": args.steps + NUM_AHEAD})
    groups = Recorded(record(more, tokenizer, config), args.layout)
    engine = DistributedDataParallel(make_model(args, config, torch.device("cpu")))
    topology = orch.Topology(dist.get_world_size(), args.ranks_per_node) if args.ranks_per_node else None
    for balance in BALANCES:
        loader = orch.orchestrate(groups, engine, balance=balance, topology=topology, prefetch=1)
        name = f"{balance}-rank{dist.get_rank()}"
        bars = trace_step(engine, loader, args.steps, args.out / f"{name}.json")
        (args.out / f"{name}.bars.json").write_text(json.dumps(bars) + "\n")
    dist.barrier()
    if dist.get_rank() == 0:
        draw(args.out, dist.get_world_size())
        print(f"Wrote {args.out / 'timeline.png'} and the trace of each rank.")


def main() -> None:
    """Every rank runs this."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("traces"), help="folder for traces and picture")
    parser.set_defaults(steps=3, samples=300, token_budget=2048)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
