"""A lost rank is named by the others, whatever became of it, and nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

from orch.comm.gather import RankFailedError
from orch.comm.groups import new_cpu_group
from orch.comm.heartbeats import describe_ranks
from orch.comm.liveness import Liveness, LivenessConfig
from orch.comm.lost_peers import PeerLostError, PeerWatch
from tests.ranks import run_ranks

QUICK = LivenessConfig(interval_s=0.1, suspect_after_s=1.0, lost_after_s=1.0, end_after_s=1.0)
PATIENT = LivenessConfig(interval_s=0.1, suspect_after_s=1.0, lost_after_s=1.0, end_after_s=20.0)


def _train(liveness: Liveness, fate, *, group=None, num_steps: int = 3) -> None:
    """A loop of collectives; on the last rank, `fate` strikes in step 1."""
    for step in range(num_steps):
        liveness.note("encode", step=step, stage="vision")
        if dist.get_rank() == dist.get_world_size() - 1 and step == 1:
            time.sleep(0.3)
            fate()
        with liveness.guard("exchange", step=step, stage="vision"):
            dist.all_reduce(torch.ones(1), group=group)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise KeyError("sample 17")


def test_a_killed_rank_is_named_with_what_it_did_last():
    def fn():
        _train(Liveness.start(PATIENT), _kill)

    *others, killed = run_ranks(fn, 3, expect_failure=True, timeout_s=40)
    assert killed.exit_code == -signal.SIGKILL
    for outcome in others:
        assert not outcome.hung
        assert outcome.seconds < 20
        assert "PeerLostError" in outcome.traceback
        assert f"rank {outcome.rank} waited in step 1, stage vision, exchange, but rank 2 is lost" in outcome.traceback
        assert "last in: step 1, stage vision, encode" in outcome.traceback


def test_an_exception_in_a_ranks_own_code_is_told_to_the_others():
    def fn():
        _train(Liveness.start(QUICK), _fail)

    *others, failing = run_ranks(fn, 3, expect_failure=True, timeout_s=40)
    assert "KeyError: 'sample 17'" in failing.stderr
    for outcome in others:
        assert outcome.seconds < 20
        assert "rank 2 failed in step 1, stage vision, encode: KeyError: 'sample 17'" in outcome.traceback


def test_a_stopped_rank_is_named_when_the_collective_times_out():
    def fn():
        _train(Liveness.start(PATIENT), _stop, group=new_cpu_group(timeout_s=2.0))

    *others, stopped = run_ranks(fn, 3, expect_failure=True, timeout_s=40)
    assert stopped.hung
    for outcome in others:
        assert outcome.seconds < 20
        assert "rank 2 is lost" in outcome.traceback


@pytest.mark.parametrize("fate", [_stop, _fail])
def test_a_rank_stuck_in_somebody_elses_collective_says_why_and_ends(fate):
    """The failing rank's connections stay open, so the collective itself would wait for its timeout."""

    def fn():
        liveness = Liveness.start(QUICK)
        try:
            for step in range(3):
                liveness.note("train", step=step)
                if dist.get_rank() == 1 and step == 1:
                    fate()
                dist.all_reduce(torch.ones(1))
        except KeyError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            time.sleep(4)

    waiting, _ = run_ranks(fn, 2, expect_failure=True, timeout_s=15, collective_timeout_s=600)
    assert waiting.exit_code == 1
    assert not waiting.hung
    expected = "rank 1 failed in step 1, train: KeyError" if fate is _fail else "rank 1 has been silent for"
    assert waiting.stderr.count(expected) == 2
    assert "orch: rank 0 waits in step 1, train" in waiting.stderr
    assert "ends now, because" in waiting.stderr


def test_ranks_that_do_not_watch_the_lost_one_are_told(monkeypatch):
    monkeypatch.setattr("orch.comm.liveness._NUM_WATCHED", 1)

    def fn():
        _train(Liveness.start(QUICK), _stop)

    *others, stopped = run_ranks(fn, 4, expect_failure=True, timeout_s=20, collective_timeout_s=600)
    assert stopped.hung
    for outcome in others:
        assert outcome.exit_code == 1
        assert not outcome.hung
        assert "rank 3 has been silent for" in outcome.stderr
        assert "last in: step 1, stage vision, encode" in outcome.stderr


def test_without_a_limit_the_monitor_only_speaks():
    def fn():
        liveness = Liveness.start(LivenessConfig(0.1, 1.0, 1.0, end_after_s=None))
        liveness.note("train", step=4)
        if dist.get_rank() == 1:
            _kill()
        time.sleep(4)
        liveness.stop()
        return "went on"

    waiting, _ = run_ranks(fn, 2, expect_failure=True, timeout_s=30)
    assert waiting.value == "went on"
    assert waiting.stderr.count("rank 1 has been silent for") == 1


def test_slow_ranks_and_ranks_that_left_are_not_lost():
    def fn():
        liveness = Liveness.start(QUICK)
        rank = dist.get_rank()
        liveness.note("checkpoint", step=7)
        if rank == 2:
            liveness.stop()
            time.sleep(5)
            return []
        time.sleep(4 if rank == 0 else 2.5)
        missing = liveness.missing_ranks() if rank == 0 else []
        liveness.stop()
        return missing

    outcomes = run_ranks(fn, 3, expect_failure=True, timeout_s=30)
    assert [outcome.value for outcome in outcomes] == [[], [], []]
    assert not any("orch:" in outcome.stderr for outcome in outcomes)


def test_a_collective_that_times_out_among_the_living_says_what_each_does():
    def fn():
        liveness, group = Liveness.start(QUICK), new_cpu_group(timeout_s=1.0)
        if dist.get_rank() == 1:
            liveness.note("encode", step=2, stage="audio")
            time.sleep(4)
            return ""
        with pytest.raises(PeerLostError) as caught:
            with liveness.guard("exchange", step=2, stage="vision"):
                dist.all_reduce(torch.ones(1), group=group)
        assert caught.value.ranks == ()
        return str(caught.value)

    text = run_ranks(fn, 2, timeout_s=30)[0]
    assert "no rank is missing" in text
    assert "rank 1: step 2, stage audio, encode" in text


def test_background_threads_are_spoken_of_but_are_no_progress():
    liveness = Liveness.start(QUICK)
    liveness.note("train", step=1)
    since = liveness._since

    def gather():
        liveness.note("gather", step=2)

    thread = threading.Thread(target=gather)
    thread.start()
    thread.join()
    assert liveness.doing == "step 1, train; in the background step 2, gather"
    assert liveness._since == since

    autograd = threading.Thread(target=lambda: liveness.note("exchange gradients", step=1, training=True))
    autograd.start()
    autograd.join()
    assert liveness.doing == "step 1, exchange gradients; in the background step 2, gather"


def test_guard_lets_other_errors_pass():
    liveness = Liveness.start(QUICK)
    for error in (ValueError("x"), RankFailedError(3, "no"), torch.OutOfMemoryError("x")):
        with pytest.raises(type(error)), liveness.guard("gather"):
            raise error


def test_a_world_of_one_needs_no_group():
    hook = sys.excepthook
    liveness = Liveness.start()
    liveness.note("train", step=1)
    liveness.post_failure("nothing")
    assert liveness.missing_ranks() == []
    assert isinstance(liveness.explain(RuntimeError("oh")), PeerLostError)
    liveness.stop()
    assert sys.excepthook is hook


TCP = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from orch.comm.liveness import Liveness, LivenessConfig
rank, port, fate = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=timedelta(seconds=8)
)
liveness = Liveness.start(LivenessConfig(0.1, 1.0, 1.0, 2.0))
for step in range(2):
    liveness.note("train", step=step)
    if step == 1 and rank == 0:
        if fate == "raise":
            time.sleep(0.3)
            raise KeyError("sample 17")
        if fate != "none":
            time.sleep(0.3)
            os.kill(os.getpid(), getattr(signal, fate))
    dist.all_reduce(torch.ones(1))
liveness.note("done", idle=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_the_rank_that_hosts_the_store_is_named_when_it_is_lost(fate, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", str(_free_port()), fate])

    def fn():
        exec(compile(TCP, "train.py", "exec"), {})

    _, *others = run_ranks(fn, 3, expect_failure=True, timeout_s=40, init_process_group=False)
    for outcome in others:
        assert not outcome.hung
        assert outcome.exit_code == 1
        assert "rank 0 is lost" in outcome.stderr


@pytest.mark.parametrize("fate", ["none", "raise"])
def test_whole_interpreters_end_at_exit(tmp_path, fate):
    """The excepthook, the exit handler, and no hang at exit; rank 0, which fails, hosts the store."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TCP))
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, script, port, fate],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(3)
    ]
    try:
        texts = {rank: ranks[rank].communicate(timeout=45)[1] for rank in (1, 2)}
        codes = [ranks[rank].returncode for rank in (1, 2)]
        ranks[0].wait(timeout=10)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    if fate == "none":
        assert codes == [0, 0], texts
        assert "orch:" not in texts[1] + texts[2]
        return
    assert 0 not in codes
    for text in texts.values():
        assert "rank 0 failed in step 1, train: KeyError: 'sample 17'" in text, text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_error_survives_pickling():
    error = PeerLostError(0, "step 1", (2,), "rank 2 is lost")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks) == (str(error), (2,))


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([4, 2], "ranks 2, 4"), ([7, 8], "ranks 7-8")]
)
def test_ranks_in_words(ranks, words):
    assert describe_ranks(ranks) == words


def test_a_rank_never_heard_of_is_missing():
    watch = PeerWatch(0, 2)
    watch.update([None, None])
    time.sleep(0.02)
    watch.update([None, None])
    assert watch.missing(0.01) == [1]
    assert "has never been heard of" in watch.describe([1])


@pytest.mark.parametrize(
    "wrong", [{"interval_s": 0}, {"lost_after_s": 1.0}, {"suspect_after_s": 0.1}, {"end_after_s": 0}]
)
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
        LivenessConfig(**wrong)
