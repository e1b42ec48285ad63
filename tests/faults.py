"""What can strike a rank while it trains, and when; and how the ranks end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import orch
from orch import odb, producer, setup
from orch.comm.all_to_all import METHODS
from orch.comm.liveness import Liveness, LivenessConfig
from orch.comm.topology import Topology
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

LIMIT_S = 60
BLAMED = 1
STEP = 2
QUICK = LivenessConfig(interval_s=0.25, suspect_after_s=2.0, lost_after_s=3.0, end_after_s=3.0)
KINDS = [{"grids": [(4, 4)]}, {"frames": [15]}, {}, {"grids": [(2, 2)], "frames": [9]}]


class Samples:
    """A dataset of small samples; at one of them something happens."""

    def __init__(self, num_samples=96, fault=None, at=None):
        self.config = small_model(torch.float32, staged=False).config
        self.num_samples, self.fault, self.at = num_samples, fault, at

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if index == self.at and not _is_probing():
            self.fault()
        return make_sample(self.config, index, num_text=8, **KINDS[index % 4])


def _is_probing():
    """A length is asked for before training, in the main process; faults here are to strike while training."""
    return sys._getframe(4).f_code.co_name == "probe_lengths"


def kill():
    time.sleep(4 * QUICK.interval_s)  # Real steps last longer than a beat, which says what a rank does.
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    time.sleep(4 * QUICK.interval_s)
    os.kill(os.getpid(), signal.SIGSTOP)


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail():
    raise ArithmeticError("struck")


def interrupt():
    signal.raise_signal(signal.SIGINT)


def hang():
    time.sleep(10 * LIMIT_S)


def train(
    dataset=None,
    strike=None,
    timeout_s=30,
    collate_fn=None,
    folder=None,
    liveness=QUICK,
    skipping=(),
    ranks_per_node=None,
    accumulate=None,
    **options,
):
    """Trains, but for one batch on the ranks `skipping`; node-wise where there are nodes.

    On the blamed rank, `strike(model)` is called before a step, and may hook into the model.
    """
    if liveness is not None:
        setup._heartbeat = lambda _: Liveness.start(liveness)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = small_model(torch.float32)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    options = {"token_budget": 100, "layout": "packed", "buffer_size": 8, **options}
    if options.get("num_workers"):
        options["worker_init_fn"] = _note_worker(folder)
    loader = odb.ODBDataLoader(dataset or Samples(), **options)
    nodes = {} if ranks_per_node is None else {"topology": Topology(dist.get_world_size(), ranks_per_node)}
    choices = {"exchange": "node_wise" if nodes else "auto", "accumulate": accumulate, **nodes}
    batches = orch.orchestrate(loader, ddp, timeout_s=timeout_s, collate_fn=collate_fn, **choices)
    step = 0
    for step, batch in enumerate(batches):
        if strike is not None and dist.get_rank() == BLAMED and step == STEP:
            strike(model)
        if dist.get_rank() in skipping and step == STEP:
            continue
        ddp(**batch).loss.backward()
    return step


def _note_worker(folder):
    """Leaves the worker's id in a file, and takes it out of reach of the launcher, which ends what ranks started."""

    def note(_):
        if folder is not None:
            (Path(folder) / str(os.getpid())).touch()
            os.setpgid(0, 0)

    return note


def check_no_worker_is_left(folder, limit_s=15):
    workers = [int(path.name) for path in Path(folder).iterdir()]
    assert workers
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in workers if _is_alive(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"workers {left} are left"
        time.sleep(0.2)


def _is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def outcomes_of(num_ranks=2, *, struck_down=False, **options):
    """How each rank ended: none may hang, or live on for longer than half a minute.

    But for the rank to blame if it is `struck_down`: killed or stopped as a whole. Returns (rank to blame, others).
    """
    outcomes = run_ranks(lambda: train(**options), num_ranks, expect_failure=True, timeout_s=LIMIT_S)
    others = [outcome for outcome in outcomes if outcome.rank != BLAMED]
    living = others if struck_down else outcomes
    assert all(outcome.failed and not outcome.hung for outcome in living), living
    assert max(outcome.seconds for outcome in living) < QUICK.lost_after_s + 30
    return outcomes[BLAMED], others


def told(outcome):
    return outcome.traceback + outcome.stderr


def before_call(module, name, label=None):
    """Strikes when the module's function of that name is next called, with this label if one is given."""

    def strike_by(fate):
        def strike(model):
            real = getattr(module, name)

            def struck(*arguments, **options):
                if options.get("label") in (None, label):
                    fate()
                return real(*arguments, **options)

            setattr(module, name, struck)

        return strike

    return strike_by


def before_exchange(label, method="flat"):
    """Strikes when the next exchange of this label begins."""

    def strike_by(fate):
        def strike(model):
            start = METHODS[method]
            METHODS[method] = lambda *arguments: fate() if arguments[-1] == label else start(*arguments)

        return strike

    return strike_by


def between_hops(label):
    """Strikes when the next node-wise exchange of this label is about to cross nodes."""

    def strike_by(fate):
        def strike(model):
            start = METHODS["node_wise"]

            def struck(*arguments):
                finish = start(*arguments)
                return fate if arguments[-1] == label else finish

            METHODS["node_wise"] = struck

        return strike

    return strike_by


AT = {
    "between batches": lambda fate: lambda model: fate(),
    "in an encoder": lambda fate: lambda model: model.model.visual.blocks[0].register_forward_hook(lambda *_: fate()),
    "in the LLM": lambda fate: lambda model: _last_layer(model).register_forward_hook(lambda *_: fate()),
    "in the backward": lambda fate: lambda model: _last_layer(model).register_full_backward_hook(lambda *_: fate()),
}


def _last_layer(model):
    return model.model.language_model.layers[-1]


PHASES = {
    "gather": (before_call(producer, "gather", "lengths"), "gather lengths"),
    "plan": (before_call(producer, "plan_step"), "plan"),
    "raw exchange": (before_exchange("parcels"), "exchange raw items"),
    "exchange of rows": (before_exchange("vision"), "stage vision, exchange rows"),
    "exchange of gradients": (before_exchange("vision.backward"), "stage vision, exchange gradients of rows"),
}

NODE_WISE_PHASES = {
    "before rows cross nodes": (between_hops("vision"), "exchange rows"),
    "before gradients move": (before_exchange("vision.backward", "node_wise"), "exchange gradients of rows"),
}
