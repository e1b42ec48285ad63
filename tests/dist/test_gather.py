"""Ragged gather of integers with the status of every rank."""

from __future__ import annotations

import pickle
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from orch.comm.collective_log import CollectiveLog
from orch.comm.gather import (
    MAX_MESSAGE_BYTES,
    RankFailedError,
    Status,
    gather,
    gather_ragged,
    gather_status,
)
from orch.comm.groups import destroy_group, get_global_ranks, get_rank, get_world_size, new_cpu_group
from tests.ranks import run_ranks


def _values_of(rank: int, sizes: list[int]) -> np.ndarray:
    return np.arange(sizes[rank], dtype=np.int64) * (2**40) - rank


@pytest.mark.parametrize("sizes", [[3, 0], [0, 0], [1, 7, 0, 2]])
def test_gathers_vectors_of_any_length(sizes):
    def fn():
        with CollectiveLog() as log:
            gathered = gather_ragged(_values_of(dist.get_rank(), sizes), new_cpu_group())
        return gathered, log.count()

    for gathered, num_collectives in run_ranks(fn, len(sizes)):
        assert num_collectives == (2 if any(sizes) else 1)
        for rank, values in enumerate(gathered):
            assert values.dtype == np.int64
            np.testing.assert_array_equal(values, _values_of(rank, sizes))


def test_status_travels_with_values():
    def fn():
        rank = dist.get_rank()
        gathered = gather(np.full(rank, 7), Status.ENDED if rank else Status.OK)
        everybody = gather(np.empty(0, np.int64), Status.ENDED)
        return gathered.statuses, gathered.all_ended, everybody.all_ended

    assert run_ranks(fn, 2) == [([Status.OK, Status.ENDED], False, True)] * 2


def test_all_ranks_raise_the_same_error_naming_the_failing_rank():
    message = "sample 'a/b.png': unlesbar \N{SNOWMAN}"

    def fn():
        try:
            if dist.get_rank() == 1:
                gather_status(Status.FAILED, message)
            else:
                gather_ragged(np.arange(5))
        except RankFailedError as error:
            return pickle.loads(pickle.dumps(error)), str(error)

    outcomes = run_ranks(fn, 3)
    assert len({text for _, text in outcomes}) == 1
    for error, text in outcomes:
        assert (error.rank, error.message) == (1, message)
        assert text == f"Rank 1 failed: {message}"


def test_several_failures_and_a_message_longer_than_travels():
    def fn():
        with pytest.raises(RankFailedError) as caught:
            gather_status(Status.FAILED if dist.get_rank() else Status.OK, "x" * 10**6)
        return caught.value.rank, caught.value.also_failed, len(caught.value.message)

    assert run_ranks(fn, 3) == [(1, (2,), MAX_MESSAGE_BYTES)] * 3


def test_data_parallel_subgroups_gather_on_their_own():
    def fn():
        rank = dist.get_rank()
        parents = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = new_cpu_group(parents[rank % 2])
        again = new_cpu_group(parents[rank % 2])
        values = [int(row[0]) for row in gather_ragged(np.array([rank]), group)]
        also = [int(row[0]) for row in gather_ragged(np.array([rank + 10]), again)]
        try:
            gather_status(Status.FAILED if rank == 3 else Status.OK, "no", group)
            failed = None
        except RankFailedError as error:
            failed = error.rank
        destroy_group(again)
        return values, also, get_rank(group), get_world_size(group), get_global_ranks(group), failed

    evens, odds = [0, 2], [1, 3]
    assert run_ranks(fn, 4) == [
        (evens, [10, 12], 0, 2, evens, None),
        (odds, [11, 13], 0, 2, odds, 3),
        (evens, [10, 12], 1, 2, evens, None),
        (odds, [11, 13], 1, 2, odds, 3),
    ]


def test_group_times_out():
    def fn():
        group = new_cpu_group(timeout_s=1.0)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                gather_ragged(np.arange(2), group)
        dist.monitored_barrier(timeout=timedelta(seconds=20))

    run_ranks(fn, 2, timeout_s=30)


def test_world_of_one_needs_no_group():
    assert new_cpu_group() is None
    assert (get_rank(), get_world_size(), get_global_ranks()) == (0, 1, [0])
    (values,) = gather_ragged(np.array([3, 1]))
    assert values.tolist() == [3, 1]
    assert gather_status(Status.ENDED) == [Status.ENDED]
    with pytest.raises(RankFailedError, match="Rank 0 failed: oh"):
        gather_status(Status.FAILED, "oh")


@pytest.mark.parametrize("values", [np.zeros((2, 2), np.int64), np.array([0.5])])
def test_refuses_what_is_no_vector_of_integers(values):
    with pytest.raises(ValueError, match="`values` must be a vector of integers, but is"):
        gather_ragged(values)


def test_refuses_a_timeout_of_zero():
    with pytest.raises(ValueError, match="`timeout_s` must be a number of seconds above 0, .* but is 0 instead"):
        new_cpu_group(timeout_s=0)
