"""The loader over several ranks: equal counts, every sample once, the gradients of one process."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from orch import odb
from orch.odb import peers
from tests.ranks import run_ranks


class Tokens(Dataset):
    """Samples of 10 to 99 tokens that say which they are."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 10 + (index * 37) % 90
        labels = torch.arange(length)
        labels[: 1 + index % 9] = -100
        return {"input_ids": torch.full((length,), index), "labels": labels}


def sample_ids(group: list[dict[str, Any]]) -> list[int]:
    return [int(sample["input_ids"][0]) for sample in group]


def read_groups(loader: odb.ODBDataLoader) -> list[list[int]]:
    return [sample_ids(group) for group in loader.groups()]


def check_epoch(groups_of_rank: list[list[list[int]]], num_samples: int) -> None:
    assert len({len(groups) for groups in groups_of_rank}) == 1, [len(groups) for groups in groups_of_rank]
    seen = Counter(i for groups in groups_of_rank for group in groups for i in group)
    assert seen == Counter(range(num_samples))


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, [(205, 0), (0, 0)]), (3, [(200, 2)]), (4, [(3, 0)])])
def test_every_sample_once_and_equal_counts(num_ranks: int, cases: list[tuple[int, int]]) -> None:
    """Cases of samples and workers, in both layouts, for two epochs."""
    cases_of_layouts = [(layout, *case) for layout in ("packed", "padded") for case in cases]

    def read(layout: str, num_samples: int, num_workers: int) -> list[list[list[int]]]:
        loader = odb.ODBDataLoader(
            Tokens(num_samples), token_budget=400, layout=layout, shuffle=True, num_workers=num_workers, buffer_size=32
        )
        return [read_groups(loader) for _ in range(2)]

    ranks = run_ranks(lambda: [read(*case) for case in cases_of_layouts], num_ranks)
    for (_, num_samples, _), results in zip(cases_of_layouts, zip(*ranks, strict=True), strict=True):
        for epoch in range(2):
            check_epoch([result[epoch] for result in results], num_samples)
        assert num_samples < 100 or results[0][0] != results[0][1]


def test_groups_keep_the_budget_and_do_not_depend_on_arrival() -> None:
    class Slow(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.02 * (index % 5 == dist.get_rank()))
            return super().__getitem__(index)

    def work() -> tuple[list[list[int]], list[list[int]], int]:
        make = lambda data, workers: odb.ODBDataLoader(  # noqa: E731
            data, token_budget=400, layout="padded", shuffle=True, seed=3, num_workers=workers, buffer_size=40
        )
        longest = max(
            len(group) * max(len(sample["input_ids"]) for sample in group)
            for group in make(Tokens(120), 0).groups()
            if group
        )
        return read_groups(make(Tokens(120), 0)), read_groups(make(Slow(120), 3)), longest

    for fast, slow, longest in run_ranks(work, 2):
        assert fast == slow
        assert longest <= 400


def test_uneven_shards_end_together() -> None:
    num_samples = [67, 104, 0]

    def read(grouping: str) -> tuple[list[int], list[float], list[int], int]:
        rank = dist.get_rank()
        start = sum(num_samples[:rank])
        loader = odb.ODBDataLoader(
            Tokens(sum(num_samples)),
            token_budget=400,
            buffer_size=20,
            grouping=grouping,
            sampler=range(start, start + num_samples[rank]),
        )
        seen, scales, shapes, totals = [], [], [], 0
        for batch in loader:
            info = odb.pop_step_info(batch)
            scales.append(float(info.loss_scale))
            shapes.append(len(batch["input_ids"]))
            totals += info.all_samples_this_step
            if not info.is_idle:
                seen += [int(row[0]) for row in batch["input_ids"]]
        return seen, scales, shapes, totals

    local, together = zip(*run_ranks(lambda: (read("local"), read("global")), 3), strict=True)
    for results in (local, together):
        assert sorted(i for result in results for i in result[0]) == list(range(171))
        assert {len(result[1]) for result in results} == {len(results[0][1])}
        assert {result[3] for result in results} == {171}
    assert set(local[2][1]) == {0.0}, "the rank without samples runs a lent one, which does not count"
    assert set(local[2][2]) == {1}
    assert all(scale > 0 for result in together for scale in result[1])


def loss_of(batch: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """A model's mean loss over label tokens."""
    mask = batch["labels"] != -100
    values = torch.sin(batch["input_ids"].double() * weight[0] + batch["labels"].double() * weight[1])
    return (values * mask).sum() / mask.sum()


def gradients_of_steps(accumulation_steps: int, grouping: str) -> list[tuple[list[int], torch.Tensor]]:
    """This rank's samples of each optimizer step, and its gradient: averaged over ranks, added over micro-steps."""
    steps, ids, gradient = [], [], torch.zeros(2, dtype=torch.float64)
    loader = odb.ODBDataLoader(
        Tokens(131),
        token_budget=400,
        buffer_size=16,
        shuffle=True,
        accumulation_steps=accumulation_steps,
        grouping=grouping,
    )
    for batch in loader:
        info = odb.pop_step_info(batch)
        weight = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
        (loss_of(batch, weight) * info.loss_scale).backward()
        gradient += weight.grad / dist.get_world_size()
        if not info.is_idle:
            ids += [int(row[0]) for row in batch["input_ids"]]
        if info.is_last_micro_step:
            dist.all_reduce(gradient)
            steps.append((ids, gradient))
            ids, gradient = [], torch.zeros(2, dtype=torch.float64)
    assert not ids
    return steps


def test_gradients_equal_one_process() -> None:
    cases = list(itertools.product([1, 3], ["local", "global"]))
    for results in zip(*run_ranks(lambda: [gradients_of_steps(*case) for case in cases], 3), strict=True):
        assert sum(len(step[0]) for result in results for step in result) == 131
        for step in range(len(results[0])):
            samples = [Tokens(131)[i] for result in results for i in result[step][0]]
            weight = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
            count = sum(int((sample["labels"] != -100).sum()) for sample in samples)
            for sample in samples:
                share = int((sample["labels"] != -100).sum()) / count
                (loss_of(sample, weight) * share).backward()
            assert torch.allclose(weight.grad, results[0][step][1], rtol=1e-12, atol=1e-12)


def test_a_loader_runs_beside_collectives_of_the_training_thread() -> None:
    def work() -> list[list[int]]:
        loader = odb.ODBDataLoader(Tokens(300), token_budget=300, buffer_size=24, num_workers=1)
        evaluation = odb.ODBDataLoader(Tokens(40), token_budget=300, buffer_size=8)
        groups = []
        for step, group in enumerate(loader.groups()):
            dist.all_reduce(torch.ones(1))
            groups.append(sample_ids(group))
            if step == 4:
                check = [odb.pop_step_info(batch).num_samples for batch in evaluation]
                total = torch.tensor(sum(check))
                dist.all_reduce(total)
                assert int(total) == 40
        return groups

    check_epoch(run_ranks(work, 3), 300)


def test_breaking_off_together_leaves_a_loader_that_starts_anew() -> None:
    def work() -> list[list[int]]:
        loader = odb.ODBDataLoader(
            Tokens(300), token_budget=300, buffer_size=24, num_workers=2, persistent_workers=True
        )
        for _ in range(3):
            for step, _ in enumerate(loader):
                if step == 5:
                    break
        return read_groups(loader)

    check_epoch(run_ranks(work, 2), 300)


def test_one_rank_that_stops_early_is_named_by_the_other() -> None:
    def work() -> str:
        loader = odb.ODBDataLoader(Tokens(400), token_budget=300, buffer_size=24)
        groups = loader.groups()
        try:
            for step, _ in enumerate(groups):
                if dist.get_rank() == 1 and step == 2:
                    groups.close()
                    break
        except RuntimeError as error:
            return str(error)
        finally:
            loader.close()
        return ""

    messages = run_ranks(work, 2)
    assert messages[1] == ""
    assert "Rank 1 stopped iterating" in messages[0]


def test_a_rank_that_leaves_alone_and_goes_on_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waits for it in a collective of the loop's body."""
    monkeypatch.setattr(peers, "PATIENCE", 0.25)

    def work() -> None:
        loader = odb.ODBDataLoader(Tokens(400), token_budget=300, buffer_size=24, lost_after_s=8)
        for _ in range(2):
            for step, _ in enumerate(loader):
                dist.all_reduce(torch.ones(1))
                if dist.get_rank() == 0 and step == 2:
                    time.sleep(1.0)  # what was begun is ready: the other's thread is in no round, and does not learn
                    break

    first, second = run_ranks(work, 2, expect_failure=True, timeout_s=30, collective_timeout_s=600)
    assert "Rank 0 left an epoch of the loader that other ranks are still in after 2 s" in first.traceback
    assert not first.hung
    assert not second.hung


def test_rejected_samples_are_dropped_and_listed() -> None:
    class Rejecting(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any] | None:
            if index % 10 == 3:
                return None
            if index % 10 == 4:
                raise odb.SkipSample(f"picture {index} is broken")
            return super().__getitem__(index)

    def work() -> tuple[list[list[int]], list[tuple[int, str]]]:
        loader = odb.ODBDataLoader(Rejecting(100), token_budget=300, num_workers=2, max_length=95)
        return read_groups(loader), loader.skipped

    results = run_ranks(work, 2)
    too_long = {i for i in range(100) if 10 + (i * 37) % 90 > 95}
    kept = {i for i in range(100) if i % 10 not in (3, 4)} - too_long
    assert sorted(i for groups, _ in results for group in groups for i in group) == sorted(kept)
    skipped = dict(entry for _, entries in results for entry in entries)
    assert set(skipped) == set(range(100)) - kept
    assert skipped[14] == "picture 14 is broken"
    assert "above `max_length`" in skipped[min(too_long)]


@pytest.mark.parametrize("shard_stream", [True, False])
def test_iterable_data_sets_are_divided_among_ranks_and_workers(shard_stream: bool) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            info = torch.utils.data.get_worker_info()
            num_workers, worker = (info.num_workers, info.id) if info else (1, 0)
            start, stride = worker, num_workers
            if not shard_stream:
                start, stride = worker * dist.get_world_size() + dist.get_rank(), num_workers * dist.get_world_size()
            return (Tokens(101)[i] for i in range(start, 101, stride))

    def work() -> list[list[list[int]]]:
        loader = odb.ODBDataLoader(Stream(), token_budget=300, num_workers=2, buffer_size=16, shard_stream=shard_stream)
        return [read_groups(loader), read_groups(loader)]

    results = run_ranks(work, 2)
    for epoch in range(2):
        check_epoch([result[epoch] for result in results], 101)


def test_a_loader_of_one_rank_alone_needs_no_other() -> None:
    def work() -> int:
        if dist.get_rank() == 1:
            return 0
        loader = odb.ODBDataLoader(Tokens(50), token_budget=300, rank=0, world_size=1)
        return sum(odb.pop_step_info(batch).num_samples for batch in loader)

    assert run_ranks(work, 2) == [50, 0]
