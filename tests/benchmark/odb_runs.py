"""Runs of a loader that `bench_odb.py` measures: ours, the released `online-dynamic-batching`, or a plain DataLoader.

Started as a program by the interpreter of the environment that holds the package; prints one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

BUDGET = 16384
MEAN_LENGTH = 600


def draw_lengths(num_samples: int, cv: float, seed: int = 0) -> np.ndarray:
    """Lognormal lengths of mean 600 and the given coefficient of variation, clipped to [16, 16384]."""
    sigma2 = np.log(1 + cv * cv)
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN_LENGTH) - sigma2 / 2, np.sqrt(sigma2), num_samples)
    return np.clip(drawn, 16, BUDGET).astype(np.int64)


def draw_label_tokens(lengths: np.ndarray, seed: int = 1) -> np.ndarray:
    """Masked prompts: between 5 % and 95 % of a sample is trained on."""
    return np.maximum(1, lengths * np.random.default_rng(seed).uniform(0.05, 0.95, len(lengths))).astype(np.int64)


class Samples(Dataset):
    """Token sequences of given lengths, masked in front; `work_ms` stands for reading and preprocessing."""

    def __init__(self, lengths: np.ndarray, dtype: torch.dtype = torch.uint8, work_ms: float = 0.0) -> None:
        self.lengths, self.label_tokens = lengths, draw_label_tokens(lengths)
        self.dtype, self.work_ms = dtype, work_ms
        self.is_lean = dtype == torch.uint8

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = int(self.lengths[index])
        if self.work_ms:
            time.sleep(self.work_ms / 1000)
        labels = torch.ones(length, dtype=torch.int8 if self.is_lean else self.dtype)
        labels[: length - int(self.label_tokens[index])] = -100
        sample = {"input_ids": torch.zeros(length, dtype=self.dtype), "labels": labels, "index": torch.tensor([index])}
        return sample if self.is_lean else {**sample, "attention_mask": torch.ones_like(labels)}


def collate_indices(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Which samples a batch holds; the released package yields nothing unless there are `input_ids` too."""
    index = torch.cat([sample["index"] for sample in samples])
    return {"input_ids": index[:, None], "index": index}


def collate_padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One collate function for all three, so that only loaders differ."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {"index": torch.cat([sample["index"] for sample in samples])}
    for key in ("input_ids", "labels", "attention_mask"):
        rows = torch.zeros(len(samples), longest, dtype=samples[0][key].dtype)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample[key])] = sample[key]
        batch[key] = rows
    return batch


def make_loader(package: str, dataset: Dataset, collate: Any, **arguments: Any) -> Any:
    if package == "plain":
        return DataLoader(dataset, collate_fn=collate, **arguments)
    if package == "released":
        if dist.is_initialized():
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
            arguments["sampler"] = range(rank, len(dataset), num_ranks)
        arguments["multiprocessing_context"] = "fork"
        for name in ("grouping", "layout", "mixes_lengths"):
            arguments.pop(name, None)
    return odb_of(package).ODBDataLoader(
        dataset, token_budget=BUDGET, collate_fn=collate, loss_scaling="exact", **arguments
    )


def odb_of(package: str) -> Any:
    return importlib.import_module("odb" if package == "released" else "orch.odb")


def read_epoch(package: str, lengths: np.ndarray, arguments: dict[str, Any]) -> list[tuple[list[int], float]]:
    """On each rank: the samples of each batch that count, and its loss scale."""
    loader = make_loader(package, Samples(lengths), collate_indices, **arguments)
    batches = []
    for batch in loader:
        info = odb_of(package).pop_step_info(batch, loss_scaling="exact")
        counts = getattr(info, "num_samples", 1) > 0
        batches.append((batch["index"].tolist() if counts else [], float(info.loss_scale)))
    return batches


def run_quality(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.ranks import run_ranks

    lengths = draw_lengths(options.num_samples, options.cv)
    arguments: dict[str, Any] = json.loads(options.arguments)
    batches = run_ranks(read_epoch, options.num_ranks, options.package, lengths, arguments, timeout_s=570)
    return {"batches": batches}


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def run_cost(options: argparse.Namespace) -> dict[str, Any]:
    """CPU time for each sample of an epoch, workers included, for tensors of int64."""
    dataset = Samples(draw_lengths(options.num_samples, options.cv), torch.int64)
    loader = make_loader(options.package, dataset, collate_padded, **json.loads(options.arguments))
    started, seen = cpu_seconds(), 0
    for batch in loader:
        seen += len(batch["index"])
    del loader
    wait_for_children()
    return {"us_per_sample": 1e6 * (cpu_seconds() - started) / seen}


def wait_for_children() -> None:
    """CPU time of children counts once they have ended."""
    import multiprocessing

    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)


def steps_of(loader: Any) -> Iterator[int]:
    for batch in loader:
        yield len(batch["index"])


def run_overlap(options: argparse.Namespace) -> dict[str, Any]:
    """Share of the time that a trainer of 1.25 ms a sample trains, if 4 workers take 1 ms a sample together."""
    dataset = Samples(draw_lengths(options.num_samples, options.cv), work_ms=4.0)
    loader = make_loader(options.package, dataset, collate_indices, **json.loads(options.arguments))
    seen, trained_s, started = 0, 0.0, 0.0
    for num in steps_of(loader):
        seen += num
        time.sleep(0.00125 * num)
        if seen > options.num_samples // 4 and not started:
            started, trained_s = time.monotonic(), 0.0
        trained_s += 0.00125 * num if started else 0.0
        if seen > options.num_samples * 7 // 8:
            break
    return {"efficiency": trained_s / (time.monotonic() - started)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=["quality", "cost", "overlap"])
    parser.add_argument("--package", choices=["ours", "released", "plain"], required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--cv", type=float, default=1.0)
    parser.add_argument("--arguments", default="{}", help="keywords of the loader, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = {"quality": run_quality, "cost": run_cost, "overlap": run_overlap}[options.run]
    print("RESULT " + json.dumps(run(options)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
