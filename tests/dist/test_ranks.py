"""The launcher itself: results, failures, limits, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def test_returns_each_ranks_value_in_order():
    def fn(offset):
        total = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(total)
        return dist.get_rank(), int(total), int(os.environ["WORLD_SIZE"]), torch.get_num_threads()

    assert run_ranks(fn, 3, 10) == [(rank, 33, 3, 1) for rank in range(3)]


def test_large_results_do_not_block():
    assert [len(value) for value in run_ranks(lambda: b"x" * 4_000_000, 2)] == [4_000_000] * 2


def test_raises_the_first_failing_ranks_traceback_and_names_the_hung():
    def fn():
        if dist.get_rank() == 1:
            raise KeyError("no such sample")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)Ranks \[0\] hung.*Rank 1 failed first:.*KeyError: 'no such sample'"):
        run_ranks(fn, 2, timeout_s=30)
    assert time.monotonic() - started < 15


def test_kills_everybody_at_the_limit():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Ranks \[0, 1\] hung"):
        run_ranks(lambda: time.sleep(60), 2, timeout_s=1)
    assert time.monotonic() - started < 10


def test_outcomes_of_a_killed_a_stopped_a_failing_and_a_good_rank():
    def fn():
        rank = dist.get_rank()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:
            raise ValueError("bad")
        time.sleep(0.5)
        return "fine"

    killed, stopped, failing, good = run_ranks(fn, 4, expect_failure=True, timeout_s=30)
    assert killed.exit_code == -signal.SIGKILL
    assert killed.failed
    assert not killed.hung
    assert stopped.hung
    assert stopped.seconds < 20
    assert failing.exit_code == 1
    assert "ValueError: bad" in failing.traceback
    assert "ValueError: bad" in failing.stderr
    assert good.value == "fine"
    assert not good.failed


def test_leaves_no_orphans():
    marker = f"{os.getpid()}.25"

    def fn():
        subprocess.Popen(["sleep", marker])
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(fn, 2, expect_failure=True, timeout_s=20)
    time.sleep(0.2)
    assert marker not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_without_a_process_group():
    assert run_ranks(dist.is_initialized, 2, init_process_group=False) == [False, False]
