"""The gradients of any balance, layout, engine and kind of step equal those of one process over the same samples."""

import importlib.util
from dataclasses import dataclass
from itertools import chain

import pytest
import torch

import orch
from orch import odb
from orch.comm.topology import Topology
from tests.omni import largest_error, make_sample, reference_gradients, small_model
from tests.ranks import run_ranks

TEXT, IMAGE, AUDIO, BOTH = (
    lambda config, seed: make_sample(config, seed, num_text=6 + seed % 5),
    lambda config, seed: make_sample(config, seed, grids=[(4, 4 + 2 * (seed % 3)), (2, 2)]),
    lambda config, seed: make_sample(config, seed, frames=[9 + 7 * (seed % 4)]),
    lambda config, seed: make_sample(config, seed, grids=[(2, 6)], frames=[12, 31]),
)
# For each kind of step what each rank draws, micro-step by micro-step; a short list repeats.
STEPS = {
    "mixed": [[[TEXT, IMAGE, BOTH]], [[AUDIO, TEXT]], [[BOTH]], [[IMAGE, AUDIO, TEXT, TEXT]]],
    "a rank encodes no image": [[[IMAGE, IMAGE]], [[AUDIO]], [[TEXT, IMAGE]], [[TEXT]]],
    "no media on a rank": [[[BOTH, IMAGE]], [[TEXT, TEXT]], [[AUDIO]], [[BOTH]]],
    "all text": [[[TEXT, TEXT]], [[TEXT]], [[TEXT]], [[TEXT, TEXT, TEXT]]],
    "images only": [[[IMAGE]], [[IMAGE, IMAGE]], [[IMAGE]], [[IMAGE]]],
    "a rank has no sample": [[[BOTH, TEXT]], [[]], [[AUDIO]], [[]]],
    "one rank has all": [[[BOTH, TEXT, IMAGE, AUDIO, TEXT]], [[]], [[]], [[]]],
    "fewer samples than ranks": [[[IMAGE]], [[]], [[]], [[]]],
}
ACCUMULATED = {
    "three micro-steps": [
        [[TEXT, IMAGE], [BOTH], [AUDIO, TEXT]],
        [[AUDIO], [TEXT], [IMAGE, BOTH]],
        [[TEXT], [TEXT, TEXT], [BOTH]],
        [[IMAGE], [AUDIO], [TEXT]],
    ],
    "a short last step": [[[TEXT, IMAGE], [BOTH]], [[AUDIO], [TEXT]], [[BOTH]], [[TEXT], [IMAGE]]],
    "idle micro-steps": [[[TEXT], [], [IMAGE]], [[], [], [BOTH]], [[AUDIO], [TEXT], []], [[], [TEXT], []]],
}


class Groups:
    """A loader of given groups."""

    def __init__(self, groups):
        self._groups = groups

    def groups(self):
        return iter(self._groups)


def draw(config, kinds):
    """Each rank's groups of samples, from the kinds of each."""
    seeds = iter(range(1000))
    return [[[kind(config, next(seeds)) for kind in group] for group in rank] for rank in kinds]


def accumulate_gradients(engine, model, loader):
    """Runs one step; the engine's gradients in full, and the step's mean token loss."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        micro_step = batch["orch"]
        loss = engine(**batch).loss
        if hasattr(engine, "step"):
            engine.backward(loss)
        else:
            loss.backward()
        total += loss.item() / micro_step.loss_scale if micro_step.loss_scale else 0.0
        num_tokens = micro_step.num_label_tokens
    torch.distributed.all_reduce(total)
    return _full_gradients(engine, model), total.item() / max(num_tokens, 1)


def _full_gradients(engine, model):
    if not hasattr(engine, "step"):
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}


def run_step(case, groups):
    """Gradients and loss of one step as the engine has them."""
    from engines import make_optimizer, wrap_ddp, wrap_zero

    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = small_model(case.dtype, case.layout)
    ddp = wrap_ddp(model) if case.engine == "ddp" else None
    engine = ddp or wrap_zero(model, make_optimizer(model, 1e-3), case.accumulate)
    loader = orch.orchestrate(
        Groups(groups[rank]),
        engine,
        balance=case.balance,
        layout=case.layout,
        accumulate=case.accumulate,
        topology=Topology(num_ranks, case.ranks_per_node),
        exchange=case.exchange,
        timeout_s=50,
    )
    return accumulate_gradients(NoSync(ddp, loader) if ddp else engine, model, loader)


def errors_of_cases(kinds, cases):
    """For each case the errors of gradients and loss against one process."""
    num_ranks = torch.distributed.get_world_size()
    groups = draw(small_model(staged=False).config, kinds[:num_ranks])
    samples = list(chain(*chain(*groups)))
    dtype = cases[0].dtype
    expected_loss, expected = reference_gradients(samples, dtype)
    errors = {}
    for case in cases:
        gradients, loss = run_step(case, groups)
        errors[case] = largest_error(gradients, expected), abs(loss - expected_loss) / max(expected_loss, 1e-9)
    return errors


class NoSync:
    """DDP that reduces at the last micro-step only, as users of `no_sync` do."""

    def __init__(self, ddp, loader):
        self._ddp, self._loader = ddp, loader

    def __call__(self, **batch):
        self._ddp.require_backward_grad_sync = self._loader.sync_gradients
        return self._ddp(**batch)


@dataclass(frozen=True)
class Case:
    engine: str
    balance: str
    layout: str = "packed"
    accumulate: int = 1
    dtype: torch.dtype = torch.float64
    ranks_per_node: int = 2
    exchange: str = "flat"


def check(kinds, num_ranks, cases, tolerance):
    for errors in run_ranks(lambda: errors_of_cases(kinds, cases), num_ranks, timeout_s=180):
        assert list(errors) == cases
        wrong = {case: error for case, error in errors.items() if not max(error) < tolerance}
        assert not wrong


BALANCES = ["none", "pre", "llm", "post"]
GRID = [(balance, layout) for balance in BALANCES for layout in ("packed", "padded")]


@pytest.mark.parametrize("kind", list(STEPS))
def test_ddp(kind):
    check(STEPS[kind], 4, [Case("ddp", balance, layout) for balance, layout in GRID], 1e-9)


@pytest.mark.parametrize("kind", list(ACCUMULATED))
def test_ddp_with_accumulation(kind):
    check(ACCUMULATED[kind], 4, [Case("ddp", balance, layout, 3) for balance, layout in GRID], 1e-9)


def test_ddp_of_two_ranks_in_single_precision():
    cases = [Case("ddp", balance, layout, dtype=torch.float32, ranks_per_node=1) for balance, layout in GRID]
    check(STEPS["mixed"], 2, cases, 1e-5)


def test_all_gather_exchange():
    check(STEPS["mixed"], 4, [Case("ddp", "post", exchange="all_gather")], 1e-9)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_groups_over_all_ranks(layout):
    """An epoch of a loader, as one step: groups that lie apart from their ranks, and ranks without a sample."""

    def run():
        from engines import wrap_ddp

        samples = draw(small_model(staged=False).config, [[[BOTH, TEXT, IMAGE, AUDIO] * 4]])[0][0]
        expected_loss, expected = reference_gradients(samples)
        errors = []
        for balance in BALANCES:
            model = small_model(layout=layout)
            ddp, rank = wrap_ddp(model), torch.distributed.get_rank()
            mine = [range(8), range(8, 16), (), ()][rank]
            loader = odb.ODBDataLoader(samples, token_budget=60, layout=layout, sampler=mine, buffer_size=4)
            loader = orch.orchestrate(loader, ddp, balance=balance, accumulate=100, timeout_s=50)
            gradients, loss = accumulate_gradients(NoSync(ddp, loader), model, loader)
            errors.append((largest_error(gradients, expected), abs(loss - expected_loss) / expected_loss))
        return errors

    for errors in run_ranks(run, 4, timeout_s=180):
        assert max(map(max, errors)) < 1e-9


zero2 = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@zero2
@pytest.mark.parametrize("kind", list(STEPS))
def test_zero2(kind):
    grid = GRID if kind == "mixed" else [("post", "packed"), ("none", "packed")]
    check(STEPS[kind], 4, [Case("zero2", balance, layout, dtype=torch.float32) for balance, layout in grid], 1e-5)


@zero2
@pytest.mark.parametrize("kind", list(ACCUMULATED))
def test_zero2_with_accumulation(kind):
    cases = [Case("zero2", balance, layout, 3, torch.float32, 1) for balance, layout in GRID]
    check(ACCUMULATED[kind], 2, cases, 1e-5)
