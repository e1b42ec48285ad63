"""The loader when a sample, a worker or `collate_fn` fails: all ranks stop, and the culprit is named."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orch import odb
from orch.comm.gather import RankFailedError
from tests.dist.test_odb import Tokens
from tests.ranks import RankOutcome, run_ranks


def failing_epoch(make_loader: Any, face: str) -> None:
    loader = make_loader()
    for batch in loader.groups() if face == "groups" else loader:
        dist.all_reduce(torch.ones(1))
        assert batch is not None


def check_failure(outcomes: list[RankOutcome], culprit: int, words: list[str]) -> None:
    """The culprit ends with its own error, all others with one that names it, and nobody hangs."""
    assert not any(outcome.hung for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.failed
        last = outcome.traceback
        assert (f"rank {culprit}" if outcome.rank == culprit else f"Rank {culprit} failed") in last, last
        assert all(word in last for word in words), last
        assert (RankFailedError.__name__ in last) == (outcome.rank != culprit)


@pytest.mark.parametrize("face", ["groups", "batches"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_data_set_stops_all_ranks(face: str, num_workers: int) -> None:
    class Broken(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 151:
                raise KeyError("no such picture")
            return super().__getitem__(index)

    outcomes = run_ranks(
        failing_epoch,
        3,
        lambda: odb.ODBDataLoader(Broken(300), token_budget=300, buffer_size=16, num_workers=num_workers),
        face,
        expect_failure=True,
    )
    check_failure(outcomes, 151 % 3, ["Sample 151", "no such picture", "KeyError"])


def test_a_sample_without_length_stops_all_ranks() -> None:
    outcomes = run_ranks(
        failing_epoch,
        2,
        lambda: odb.ODBDataLoader(Tokens(90), token_budget=300, length_fn=lambda s: int(s["input_ids"][0]) - 45),
        "groups",
        expect_failure=True,
    )
    assert not any(outcome.hung for outcome in outcomes)
    assert "Sample 0 on rank 0: The length of a sample must be at least 1, but is -45 instead." in outcomes[0].traceback


def test_an_exception_of_collate_stops_all_ranks() -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        if any(int(sample["input_ids"][0]) == 77 for sample in samples):
            raise ZeroDivisionError("cannot join these")
        return {"n": len(samples)}

    outcomes = run_ranks(
        failing_epoch,
        2,
        lambda: odb.ODBDataLoader(Tokens(200), token_budget=300, buffer_size=16, collate_fn=collate),
        "batches",
        expect_failure=True,
    )
    culprit = next(outcome.rank for outcome in outcomes if RankFailedError.__name__ not in outcome.traceback)
    check_failure(outcomes, culprit, ["`collate_fn` of samples", "77", "cannot join these", "ZeroDivisionError"])


def test_a_batch_that_takes_no_keys_is_an_error() -> None:
    outcomes = run_ranks(
        failing_epoch,
        2,
        lambda: odb.ODBDataLoader(Tokens(200), token_budget=300, buffer_size=16, collate_fn=list),
        "batches",
        expect_failure=True,
    )
    assert all("`collate_fn` must return a dict" in outcome.traceback for outcome in outcomes)
    assert not any(outcome.hung for outcome in outcomes)


def test_a_killed_worker_stops_all_ranks() -> None:
    class Killing(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 101:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    outcomes = run_ranks(
        failing_epoch,
        2,
        lambda: odb.ODBDataLoader(Killing(300), token_budget=300, buffer_size=16, num_workers=1),
        "batches",
        expect_failure=True,
    )
    check_failure(outcomes, 1, ["Worker 0 ended with exit code -9 while reading sample 101"])
