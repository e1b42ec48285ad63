"""Whatever strikes one rank, every rank ends soon, with a message that names the rank and the sample to blame."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orch.orchestrator import DEFAULT_TIMEOUT_S
from tests.faults import (
    AT,
    BLAMED,
    LIMIT_S,
    NODE_WISE_PHASES,
    PHASES,
    QUICK,
    STEP,
    Samples,
    check_no_worker_is_left,
    fail,
    hang,
    interrupt,
    kill,
    outcomes_of,
    run_out_of_memory,
    stop,
    told,
    train,
)
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


def test_without_a_fault_all_ranks_train(tmp_path):
    assert min(run_ranks(lambda: train(num_workers=1, folder=tmp_path, liveness=None), 2)) > STEP
    check_no_worker_is_left(tmp_path)


@pytest.mark.parametrize(("moment", "num_ranks"), [("between batches", 3), ("in the LLM", 2), ("in the backward", 2)])
def test_a_killed_rank(moment, num_ranks, tmp_path):
    num_workers = num_ranks - 2
    options = {"num_workers": num_workers, "folder": tmp_path}
    killed, others = outcomes_of(num_ranks, struck_down=True, strike=AT[moment](kill), **options)
    assert killed.exit_code == -signal.SIGKILL
    for outcome in others:
        assert "rank 1 is lost" in told(outcome)
        assert f"last in: step {STEP}, train on samples 's" in told(outcome)
    if num_workers:
        check_no_worker_is_left(tmp_path)


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_killed_in_any_phase(phase):
    strike, doing = PHASES[phase]
    killed, (other,) = outcomes_of(struck_down=True, strike=strike(kill))
    assert killed.exit_code == -signal.SIGKILL
    assert re.search(r"rank 0 waited in .*step \d, .*but rank 1 is lost", told(other))
    assert re.search(rf"rank 1 has been silent for .*last in: .*\bstep \d, {doing}\b", told(other))


@pytest.mark.parametrize("phase", NODE_WISE_PHASES)
def test_a_rank_killed_in_a_node_wise_exchange(phase):
    """Two nodes of two: the ranks that wait for one that waits for the killed one name it too."""
    strike, doing = NODE_WISE_PHASES[phase]
    killed, others = outcomes_of(4, struck_down=True, strike=strike(kill), ranks_per_node=2)
    assert killed.exit_code == -signal.SIGKILL
    for other in others:
        assert re.search(rf"rank {other.rank} wait(ed|s) in .*step \d, ", told(other))
        assert re.search(rf"rank 1 has been silent for .*last in: step {STEP}, stage vision, {doing}\b", told(other))


@pytest.mark.parametrize("moment", ["in an encoder", "in the LLM", "in the backward"])
def test_an_exception_in_a_ranks_model_or_loop(moment):
    fate, said = (run_out_of_memory, "OutOfMemoryError: CUDA") if moment == "in an encoder" else (fail, "Arithmetic")
    failed, others = outcomes_of(strike=AT[moment](fate))
    assert said in failed.traceback
    where = f"step {STEP}, stage vision, encode" if moment == "in an encoder" else f"step {STEP}, train on samples 's"
    for outcome in others:
        assert f"rank 1 failed in {where}" in told(outcome)
        assert said in told(outcome)


def test_a_rank_whose_model_skips_a_stage():
    def skip(model):
        model.model.get_image_features = lambda *_, **__: None

    skipping, others = outcomes_of(strike=skip)
    for outcome in (skipping, *others):
        assert re.search(r"step \d: the model's forward did not use .*: stages \['vision'\]", told(outcome), re.I)
    assert "rank 1 failed in step" in told(others[0])


@pytest.mark.parametrize("num_skipping", [1, 2])
def test_ranks_whose_loop_skips_a_batch(num_skipping):
    outcomes = run_ranks(lambda: train(skipping=range(2)[-num_skipping:]), 2, expect_failure=True, timeout_s=LIMIT_S)
    if num_skipping == 2:
        assert not any(outcome.failed for outcome in outcomes), outcomes
        return
    other, skipping = outcomes
    said = f"Rank 1 did not run the model on its batch of step {STEP}, micro-step 0"
    assert said in skipping.traceback
    assert re.search(rf"rank 1 failed in step {STEP}, skip a batch.*: RuntimeError: {said}", told(other))
    assert re.search(rf"rank 0 wait.* in step {STEP}, ", told(other))
    assert max(outcome.seconds for outcome in outcomes) < QUICK.lost_after_s + 30


def test_an_interrupted_rank_ends_the_others():
    interrupted, others = outcomes_of(strike=AT["between batches"](interrupt))
    assert "KeyboardInterrupt" in interrupted.traceback
    for outcome in others:
        assert f"rank 1 failed in step {STEP}, train on samples 's" in told(outcome)
        assert "KeyboardInterrupt" in told(outcome)


def test_a_stopped_rank_is_named():
    stopped, others = outcomes_of(struck_down=True, strike=AT["between batches"](stop))
    assert stopped.hung
    for outcome in others:
        assert "rank 1 has been silent for" in told(outcome)
        assert f"last in: step {STEP}, train on samples 's" in told(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGSTOP, 50), (signal.SIGKILL, 20)])
def test_with_the_default_limits_every_rank_ends_well_within_a_minute(number, within_s, tmp_path):
    def strike(_):
        time.sleep(2.5)  # longer than a beat
        (tmp_path / "struck").write_text(str(time.monotonic()))
        os.kill(os.getpid(), number)

    started = time.monotonic()
    outcomes = run_ranks(
        lambda: train(strike=strike, liveness=None, timeout_s=DEFAULT_TIMEOUT_S),
        3,
        expect_failure=True,
        timeout_s=120,
        collective_timeout_s=DEFAULT_TIMEOUT_S,
    )
    struck_s = float((tmp_path / "struck").read_text()) - started
    for outcome in outcomes[:BLAMED] + outcomes[BLAMED + 1 :]:
        assert outcome.failed
        assert not outcome.hung
        seconds = outcome.seconds - struck_s
        print(f"rank {outcome.rank} ended {seconds:.1f} s after {number.name} of rank {BLAMED}")
        assert seconds < within_s
        assert f"last in: step {STEP}, train on samples 's" in told(outcome)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_in_the_dataset(num_workers, tmp_path):
    at = 41
    failed, others = outcomes_of(dataset=Samples(fault=fail, at=at), num_workers=num_workers, folder=tmp_path)
    for outcome in (failed, *others):
        assert "Rank 1 failed" in outcome.traceback
        assert f"ArithmeticError: Sample {at} on rank 1: struck" in outcome.traceback
    if num_workers:
        check_no_worker_is_left(tmp_path)


def test_a_killed_worker(tmp_path):
    at = 41
    failed, others = outcomes_of(dataset=Samples(fault=kill, at=at), num_workers=2, folder=tmp_path)
    for outcome in (failed, *others):
        assert "Rank 1 failed" in outcome.traceback
        assert f"ended with exit code -9 while reading sample {at}" in outcome.traceback
    check_no_worker_is_left(tmp_path)


def test_a_dataset_that_hangs():
    dataset = Samples(fault=hang, at=41)
    hung, others = outcomes_of(dataset=dataset, num_workers=1, timeout_s=4)
    for outcome in (hung, *others):
        assert "waited 4 s for a batch" in told(outcome)
        assert re.search(r"ranks? (0-)?1: wait for a batch; in the background step \d, draw", told(outcome))


def test_an_exception_while_a_batch_is_collated():
    failed, others = outcomes_of(collate_fn=_failing_collate)
    for outcome in (failed, *others):
        assert "Rank 1 failed" in outcome.traceback
        assert "of the samples 's" in outcome.traceback
        assert "ArithmeticError: struck" in outcome.traceback


def _failing_collate(samples, parts):
    from orch.encoders.backbone import collator_for

    if dist.get_rank() == BLAMED and any(int(sample["id"][1:]) > 30 for sample in samples):
        fail()
    return collator_for(small_model(torch.float32, staged=False), "packed")(samples, parts)


@pytest.mark.parametrize("accumulate", [1, 6])
def test_a_sample_that_breaks_the_contract_is_named_on_every_rank(accumulate):
    """In the midst of a step too, of which the other ranks take the rest."""
    failed, others = outcomes_of(dataset=Unplaced(), accumulate=accumulate)
    for outcome in (failed, *others):
        assert "Rank 1 failed" in outcome.traceback
        assert "Sample 's41': `input_ids` must hold a placeholder for each" in outcome.traceback


class Unplaced(Samples):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 41:
            sample = make_sample(self.config, index, grids=[(2, 2)])
            sample["input_ids"] = torch.full_like(sample["input_ids"], 20)
        return sample


PROGRAM = """
import sys, torch.distributed as dist
from tests import faults

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
faults.train(strike=faults.AT["between batches"](faults.fail), num_workers=1, folder=sys.argv[3], liveness=None)
"""


def test_interpreters_end_by_themselves(tmp_path):
    """Nothing holds back a process that ends by an exception: no thread, no worker."""
    (tmp_path / "workers").mkdir()
    command = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'examples'}", "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / "store"), str(tmp_path / "workers")]
    processes = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], errors
    assert f"rank 1 failed in step {STEP}, train on samples 's" in errors[0]
    check_no_worker_is_left(tmp_path / "workers")
