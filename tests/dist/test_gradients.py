"""The gradients of any balance, layout, engine and kind of step equal those of one process over the same samples."""

import functools
import importlib.util
from dataclasses import dataclass
from itertools import chain, product

import pytest
import torch
from engines import make_optimizer, prepare_deepspeed
from torch.nn.parallel import DistributedDataParallel

import orch
from orch import odb
from orch.comm.topology import Topology
from tests.omni import largest_error, make_sample, reference_gradients, small_model
from tests.ranks import run_ranks
from tests.zero import wrap_zero


TEXT, IMAGE, AUDIO, BOTH = (
    lambda config, seed: make_sample(config, seed, num_text=6 + seed % 5),
    lambda config, seed: make_sample(config, seed, grids=[(4, 4 + 2 * (seed % 3)), (2, 2)]),
    lambda config, seed: make_sample(config, seed, frames=[9 + 7 * (seed % 4)]),
    lambda config, seed: make_sample(config, seed, grids=[(2, 6)], frames=[12, 31]),
)
PICTURE = functools.partial(make_sample, grids=[(2, 4)])
# For each kind of step what each rank draws in one micro-step.
STEPS = {
    "mixed": [[[TEXT, IMAGE, BOTH]], [[AUDIO, TEXT]], [[BOTH]], [[IMAGE, AUDIO, TEXT, TEXT]]],
    "a rank encodes no image": [[[IMAGE, IMAGE]], [[AUDIO]], [[TEXT, IMAGE]], [[TEXT]]],
    "no media on a rank": [[[BOTH, IMAGE]], [[TEXT, TEXT]], [[AUDIO]], [[BOTH]]],
    "all text": [[[TEXT, TEXT]], [[TEXT]], [[TEXT]], [[TEXT, TEXT, TEXT]]],
    "images only": [[[IMAGE]], [[IMAGE, IMAGE]], [[IMAGE]], [[IMAGE]]],
    "a rank has no sample": [[[BOTH, TEXT]], [[]], [[AUDIO]], [[]]],
    "one rank has all": [[[BOTH, TEXT, IMAGE, AUDIO, TEXT]], [[]], [[]], [[]]],
    "fewer samples than ranks": [[[IMAGE]], [[]], [[]], [[]]],
    "one picture, one recording": [[[TEXT, PICTURE]], [[AUDIO]], [[TEXT]], [[TEXT]]],
}
# And in several micro-steps.
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


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The model is so small that threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


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
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = small_model(case.dtype, case.layout)
    ddp = DistributedDataParallel(model) if case.engine == "ddp" else None
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


@functools.cache
def reference_of(kind, num_ranks, accumulate, dtype):
    """What each rank draws, and loss and gradients of one process over all of it."""
    groups = draw(small_model(staged=False).config, micro_steps(kind, num_ranks, accumulate))
    return groups, *reference_gradients(list(chain(*chain(*groups))), dtype)


def micro_steps(kind, num_ranks, accumulate):
    """The kinds of samples of each micro-step of each rank: steps of one micro-step are repeated."""
    if kind in ACCUMULATED:
        return ACCUMULATED[kind][:num_ranks]
    return [groups * accumulate for groups in STEPS[kind][:num_ranks]]


def errors_of(case, groups, expected_loss, expected):
    """The errors of gradients and loss of one step."""
    gradients, loss = run_step(case, groups)
    return largest_error(gradients, expected), abs(loss - expected_loss) / max(expected_loss, 1e-9)


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

    @property
    def tolerance(self):
        if self.dtype == torch.float64:
            return 1e-9 if self.engine == "ddp" else 1e-6  # DeepSpeed gives its gradients in single precision
        return 1e-5


def check(steps, num_ranks):
    """Runs steps, each a kind and a case, on one set of ranks."""
    steps = [(kind, case, reference_of(kind, num_ranks, case.accumulate, case.dtype)) for kind, case in steps]

    def run():
        return [errors_of(case, *reference) for _, case, reference in steps]

    for errors in run_ranks(run, num_ranks, timeout_s=270):
        found = zip(steps, errors, strict=True)
        wrong = [(kind, case, e) for (kind, case, _), e in found if not all(error < case.tolerance for error in e)]
        assert not wrong


BALANCES = ["none", "pre", "llm", "post"]
GRID = [(balance, layout) for balance in BALANCES for layout in ("packed", "padded")]
VARIANTS = list(product((2, 4), (torch.float64, torch.float32), (1, 3)))


def steps_of(engine, num_ranks, dtype, times=1):
    """Steps in which, over all calls, each kind meets each balance and layout `times` times.

    From one balance and layout to the next each kind moves on to the next variant, so that each variant is run with
    each balance and layout, and each kind in each variant. The second time it is in the variant that differs in ranks,
    precision and accumulation.
    """
    for (number, kind), (place, (balance, layout)) in product(enumerate([*STEPS, *ACCUMULATED]), enumerate(GRID)):
        index = (number + place) % len(VARIANTS)
        for variant in (VARIANTS[index], VARIANTS[-1 - index])[:times]:
            if variant[:2] == (num_ranks, dtype):
                accumulate = 3 if kind in ACCUMULATED else variant[2]
                yield kind, Case(engine, balance, layout, accumulate, dtype, ranks_per_node=num_ranks // 2)


DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
NUM_RANKS = pytest.mark.parametrize("num_ranks", [2, 4])


@DTYPES
@NUM_RANKS
def test_ddp(num_ranks, dtype):
    check(list(steps_of("ddp", num_ranks, dtype, times=2)), num_ranks)


def test_all_gather_exchange():
    check([("mixed", Case("ddp", "post", exchange="all_gather"))], 4)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_groups_over_all_ranks(layout):
    """An epoch of a loader, as one step: groups that lie apart from their ranks, and ranks without a sample."""

    def run():
        samples = draw(small_model(staged=False).config, [[[BOTH, TEXT, IMAGE, AUDIO] * 4]])[0][0]
        expected_loss, expected = reference_gradients(samples)
        errors = []
        for balance in BALANCES:
            model = small_model(layout=layout)
            ddp, rank = DistributedDataParallel(model), torch.distributed.get_rank()
            mine = [range(8), range(8, 16), (), ()][rank]
            loader = odb.ODBDataLoader(samples, token_budget=60, layout=layout, sampler=mine, buffer_size=4)
            loader = orch.orchestrate(loader, ddp, balance=balance, accumulate=100, timeout_s=50)
            gradients, loss = accumulate_gradients(NoSync(ddp, loader), model, loader)
            errors.append((largest_error(gradients, expected), abs(loss - expected_loss) / expected_loss))
        return errors

    for errors in run_ranks(run, 4, timeout_s=180):
        assert all(error < 1e-9 for error in chain(*errors))


zero2 = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@zero2
@DTYPES
@NUM_RANKS
def test_zero2(num_ranks, dtype):
    prepare_deepspeed()  # forked ranks start quickly if it is here already
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    check(list(steps_of("zero2", num_ranks, dtype)), num_ranks)


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_every_kind_and_every_variant_of_a_step_is_among_those_tried(engine):
    steps = [(n, s) for n, dtype in product((2, 4), (torch.float64, torch.float32)) for s in steps_of(engine, n, dtype)]
    of_grid = {place: set() for place in GRID}
    for num_ranks, (kind, case) in steps:
        of_grid[case.balance, case.layout] |= {kind, (num_ranks, case.dtype, case.accumulate)}
    assert all(found == {*STEPS, *ACCUMULATED, *VARIANTS} for found in of_grid.values())
    assert {(kind, case.accumulate) for _, (kind, case) in steps} == {
        *product(STEPS, (1, 3)),
        *product(ACCUMULATED, [3]),
    }
