"""What the training scripts share: options, data, model, loop, checkpoints and report.

A script adds how its engine wraps the model, and calls `main`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
from checks import OPTIONS_FILE, at_least, check_run, loader_file
from engines import Engine
from omni.dataset import OmniDataset
from omni.generator import GeneratedDataset, Mix
from omni.images import PatchGrid
from omni.preprocess import Preprocessing
from omni.tokenizer import train_tokenizer
from reporting import ProgressBar, print_tables
from tiny_omni import build_thinker, tiny_thinker_config
from torch import nn

import orch
from orch import odb
from orch.comm.gather import Status, gather_ragged, gather_status
from orch.encoders.packing import use_packed_attention
from orch.report import mean_and_max

Wrap = Callable[[nn.Module, Namespace], Engine]

PRINTED_ONLY = ("gather_ms", "exchange_ms")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def make_parser(description: str, engines: Sequence[str] = ("ddp",)) -> ArgumentParser:
    """The options of a run under one of these engines, the first if none is chosen."""
    parser = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="JSON or JSONL records; without it the project's own generated data")
    add("--engine", choices=engines, default=engines[0])
    if any(name.startswith("zero") for name in engines):
        add("--engine-config", type=Path, help="DeepSpeed's JSON: its ZeRO options and gradient clipping")
    add("--balance", choices=["none", "pre", "llm", "post"], default="post")
    add("--layout", choices=["packed", "padded"], default="packed", help="how samples lie in the LLM's batch")
    add("--exchange", choices=["auto", "flat", "node_wise", "all_gather"], default="auto")
    add("--token-budget", type=at_least(1), default=2048, help="tokens of a rank's group")
    add("--ranks-per-node", type=at_least(1), help="plays nodes of so many ranks; default: the hosts that there are")
    add("--steps", type=at_least(1), help="stop after so many optimizer steps, of this run alone at --resume")
    add("--epochs", type=at_least(1), default=1)
    add("--accumulate", type=at_least(1), default=1, help="micro-steps of an optimizer step")
    add("--samples", type=at_least(1), default=2000, help="size of the generated data set")
    add("--lr", type=float, default=2e-3)
    add("--seed", type=at_least(0), default=0)
    add("--dtype", choices=list(DTYPES), default="float32")
    add("--max-length", type=at_least(1), default=4096, help="tokens of a sample; media are never cut")
    add("--max-pixels", type=at_least(1), default=256 * 256, help="of a picture; larger ones are scaled down")
    add("--num-workers", type=at_least(0), default=1)
    add("--strict", action="store_true", help="stop at a record that cannot be used")
    add("--prepend-placeholders", action="store_true", help="media without a placeholder go to the front")
    add("--save", type=Path, help="folder for a checkpoint, written where the run ends")
    add("--resume", type=Path, help="goes on where a run of the same options and ranks was saved")
    add("--report", type=Path, help="write the figures of the run as JSON")
    add("--local_rank", "--local-rank", type=int, help="set by the deepspeed launcher")
    return parser


def make_dataset(args: Namespace, tokenizer: Any, config: Any) -> Any:
    """Records from a file, or the project's own data."""
    grid = PatchGrid(patch_size=config.vision_config.patch_size, max_pixels=args.max_pixels)
    preprocessing = Preprocessing(grid=grid, max_length=args.max_length, num_mel_bins=config.audio_config.num_mel_bins)
    if args.data is None:
        return GeneratedDataset(tokenizer, preprocessing, Mix(num_samples=args.samples, seed=args.seed))
    policy = "prepend" if args.prepend_placeholders else "reject"
    return OmniDataset(args.data, tokenizer, preprocessing, strict=args.strict, images_without_placeholder=policy)


def make_loader(args: Namespace, tokenizer: Any, config: Any) -> odb.ODBDataLoader:
    """The loader of the data, which forms groups up to the token budget."""
    warnings.filterwarnings("ignore", r"Keys \['row'\] of samples")  # `train` reads it of the plan
    return odb.ODBDataLoader(
        make_dataset(args, tokenizer, config),
        token_budget=args.token_budget,
        layout=args.layout,
        num_workers=args.num_workers,
        shuffle=True,
        seed=args.seed,
    )


def make_model(args: Namespace, config: Any, device: torch.device) -> Any:
    """The model, its two towers made stages."""
    model = build_thinker(config, dtype=DTYPES[args.dtype], seed=args.seed).to(device)
    if args.layout == "packed":
        use_packed_attention(model)
    orch.stage(model.model.visual, "vision")
    orch.stage(model.model.audio_tower, "audio")
    return model


def train(args: Namespace, wrap: Wrap) -> dict[str, Any]:
    """Trains under the engine that `wrap` makes of the model, and returns the report.

    Raises:
        RankFailedError: On all ranks alike, before anything is trained, if `check_run` refuses the options.
    """
    lasting_options = check_run(args)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    tokenizer = train_tokenizer()
    config = tiny_thinker_config(tokenizer.vocab_size)
    model = make_model(args, config, device)
    engine = wrap(model, args)

    loader = make_loader(args, tokenizer, config)
    topology = orch.Topology(dist.get_world_size(), args.ranks_per_node) if args.ranks_per_node else None
    batches = orch.orchestrate(
        loader,
        engine.module,
        balance=args.balance,
        accumulate=args.accumulate,
        topology=topology,
        exchange=args.exchange,
    )
    if args.resume is not None:
        engine.load(args.resume)
        batches.load_state_dict(json.loads(loader_file(args.resume).read_text()))

    losses, step_ms, trained, skipped = [], [], [], []
    num_tokens, begin = 0, time.perf_counter()
    with ProgressBar(args.steps, len(batches) * args.epochs // args.accumulate) as progress:
        for epoch in range(loader.epoch, args.epochs):
            batches.set_epoch(epoch)
            start, step_loss = time.perf_counter(), 0.0
            for batch in batches:
                micro_step = batch["orch"]
                loss = engine.forward_backward(batch, micro_step.is_last)
                step_loss += micro_step.mean_loss(loss)
                trained += [int(sample["row"]) for sample in micro_step.samples]
                num_tokens += batch["input_ids"].numel()
                if micro_step.is_last:
                    engine.step()
                    losses.append(_sum_over_ranks(step_loss))
                    step_ms.append(1e3 * (time.perf_counter() - start))
                    progress.advance(losses[-1], num_tokens / (time.perf_counter() - begin), batches.report)
                    start, step_loss = time.perf_counter(), 0.0
                    if len(losses) == args.steps:
                        break
            skipped += loader.skipped
            if len(losses) == args.steps:
                break
    if args.save is not None:
        _save(engine, args.save, lasting_options, batches.state_dict())
    return _report(batches, losses, step_ms, trained, skipped, num_tokens / (time.perf_counter() - begin))


def _save(engine: Engine, folder: Path, options: dict[str, Any], state: dict[str, Any]) -> None:
    """Saves a checkpoint: the options last, since without them it is none, whatever of an older one is left."""
    (folder / OPTIONS_FILE).unlink(missing_ok=True)
    gather_status(Status.OK, label="save")
    engine.save(folder)
    loader_file(folder).write_text(json.dumps(state))
    gather_status(Status.OK, label="saved")
    (folder / OPTIONS_FILE).write_text(json.dumps(options))


def _report(
    batches: orch.OrchestratedLoader,
    losses: list[float],
    step_ms: list[float],
    trained: list[int],
    skipped: list[tuple[Any, str]],
    tokens_per_s: float,
) -> dict[str, Any]:
    """The figures of the run, over all ranks."""
    for _, reason in skipped:
        print(f"rank {dist.get_rank()} skipped {reason}", file=sys.stderr)
    everyone = np.concatenate(gather_ragged(np.array(trained, dtype=np.int64)))
    return {
        "loss": losses,
        "samples_trained": len(everyone),
        "samples_unique": len(np.unique(everyone)),
        "samples_skipped": int(_sum_over_ranks(len(skipped))),
        **batches.report.summary(),
        "step_ms": mean_and_max(step_ms),
        "tokens_per_s": _sum_over_ranks(tokens_per_s),
    }


def _sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total.cuda() if torch.cuda.is_available() else total)
    return total.item()


def main(wrap: Wrap, engines: Sequence[str], doc: str | None) -> None:
    """Trains and reports; every rank runs this.

    Args:
        wrap: Makes the engine.
        engines: The names that `--engine` takes.
        doc: The script's docstring, whose first line describes it.
    """
    args = make_parser((doc or "").splitlines()[0], engines).parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    report = train(args, wrap)
    if dist.get_rank() == 0:
        print_tables(report)
        if args.report is not None:
            written = {key: value for key, value in report.items() if key not in PRINTED_ONLY}
            args.report.write_text(json.dumps(written, indent=1) + "\n")
    dist.destroy_process_group()
