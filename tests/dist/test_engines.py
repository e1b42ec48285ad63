"""Engines and what people do with them: gradients equal those of one process, in every step of a run."""

import functools
import importlib.util
import itertools
import shutil
from dataclasses import dataclass
from itertools import chain

import engines
import pytest
import torch

import train_omni
from training import make_parser, train

import orch
from orch import odb
from orch.comm.collective_log import CollectiveLog
from orch.comm.topology import Topology
from tests.dist.test_gradients import AUDIO, BOTH, IMAGE, TEXT, Groups, draw
from tests.omni import largest_error, reference_gradients, small_model
from tests.ranks import run_ranks

NUM_RANKS = 3
# What each rank draws, step by step. An engine that records or prefetches sees all of them in one run.
STEPS = [
    [[TEXT, IMAGE, BOTH], [AUDIO], [BOTH, TEXT]],
    [[IMAGE, IMAGE, TEXT], [TEXT], [AUDIO, AUDIO]],  # a rank without images, one without audio, one with neither
    [[BOTH, IMAGE], [], [AUDIO]],  # a rank without samples
    [[TEXT], [TEXT, TEXT], [TEXT]],
    [[IMAGE], [AUDIO, BOTH, BOTH], [TEXT]],
]
NUM_SAMPLES = 35
ACCUMULATE = 3  # the second step of accumulation is short: 3 + 2
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ZERO = [pytest.param(f"zero{n}", marks=pytest.mark.skipif(not DEEPSPEED, reason="no DeepSpeed")) for n in (1, 2, 3)]
ENGINES = ["ddp", "fsdp2", *ZERO]


def freeze(*modules):
    for module in modules:
        module.requires_grad_(False)


def train_projections_only(model):
    """As LoRA does: few trained weights, in the LLM and in one tower, behind much that is frozen."""
    freeze(model)
    for block in (*model.model.language_model.layers, model.model.visual.blocks[-1]):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                module.requires_grad_(True)


def compile_towers(model):
    for tower in (model.model.visual, model.model.audio_tower):
        tower.compile(backend="eager", dynamic=True)


def compile_blocks(model, backend="eager"):
    for block in (*model.model.visual.blocks, *model.model.audio_tower.layers):
        block.compile(backend=backend, dynamic=True)


MODES = {
    "plain": lambda model: None,
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "frozen encoders": lambda model: freeze(model.model.visual, model.model.audio_tower),
    "frozen LLM": lambda model: freeze(model.model.language_model, model.lm_head),
    "one tower trained": lambda model: freeze(model.model.language_model, model.lm_head, model.model.audio_tower),
    "projections only": train_projections_only,
    "compiled encoders": compile_towers,
    "compiled blocks": compile_blocks,
    "compiled blocks, inductor": functools.partial(compile_blocks, backend="inductor"),
}
BACKWARD = {"frozen encoders": set(), "one tower trained": {"vision"}, "projections only": {"vision"}}


@dataclass(frozen=True)
class Case:
    mode: str = "plain"
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    all_sharded: bool = True  # FSDP2: encoders are units of their own; ZeRO-3: small parameters are sharded too

    @property
    def tolerance(self):
        return 5e-2 if self.dtype == torch.bfloat16 else 1e-5

    @property
    def limit_s(self):
        """Ranks compile for minutes, and for different lengths of time."""
        return 500 if self.mode.startswith("compiled") else 250


def options_of_run(engine_name, accumulate, *more):
    """What `wrap` takes, for an engine by name."""
    options = ["--engine", engine_name, "--accumulate", str(accumulate), *more]
    return make_parser("", train_omni.ENGINES).parse_args(options)


def build(engine_name, case):
    model = small_model(case.dtype)
    MODES[case.mode](model)
    options = {}
    if case.all_sharded:
        towers = [model.model.visual, model.model.audio_tower]
        options = {"fsdp2": {"units": towers}, "zero3": {"stage3_param_persistence_threshold": 0}}.get(engine_name, {})
    return model, train_omni.wrap(model, options_of_run(engine_name, case.accumulate, "--lr", "0"), **options)


def full_gradient(parameter, engine):
    if hasattr(engine.module, "zero_optimization"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def run_case(engine_name, case, references):
    """The largest error of each step, and the exchanges of the run by label."""
    model, engine = build(engine_name, case)
    groups = draw(model.config, STEPS_OF_RANKS)[torch.distributed.get_rank()]
    loader = orch.orchestrate(
        Groups(groups),
        engine.module,
        accumulate=case.accumulate,
        topology=Topology(NUM_RANKS, 2),
        exchange="flat",
        timeout_s=case.limit_s,
    )
    errors = []
    with CollectiveLog() as log:
        for batch in loader:
            is_last = batch["orch"].is_last
            engine.forward_backward(batch, is_last)
            if is_last:
                trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
                gradients = {name: full_gradient(p, engine).float() for name, p in trained}
                expected = references[case.accumulate][len(errors)]
                errors.append(largest_error(gradients, {name: expected[name] for name in gradients}))
                engine.step()
    return errors, [entry.label for entry in log.entries if entry.label.startswith(("vision", "audio"))]


STEPS_OF_RANKS = [list(rank) for rank in zip(*STEPS, strict=True)]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if DeepSpeed is here already."""
    if DEEPSPEED:
        engines.prepare_deepspeed()
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@pytest.fixture(scope="module")
def references():
    """The gradients of each step by one process, for steps of one and of several micro-steps."""
    groups = draw(small_model(staged=False).config, STEPS_OF_RANKS)
    micro_steps = [list(chain(*ranks)) for ranks in zip(*groups, strict=True)]
    steps = {k: [list(chain(*micro_steps[i : i + k])) for i in range(0, len(STEPS), k)] for k in (1, ACCUMULATE)}
    return {k: [reference_gradients(samples, torch.float32)[1] for samples in steps[k]] for k in steps}


def check(engine_name, cases, references):
    limit_s = 20 + max(case.limit_s for case in cases)
    results = run_ranks(
        lambda: [run_case(engine_name, case, references) for case in cases], NUM_RANKS, timeout_s=limit_s
    )
    for case, (errors, labels), *others in zip(cases, *results, strict=True):
        assert len(errors) == -(-len(STEPS) // case.accumulate)
        assert all(error < case.tolerance for error in errors), (case, errors)
        assert all(other == labels for _, other in others), case
        for stage in ("vision", "audio"):  # each exchange has its inverse once, where a gradient flows
            assert labels.count(stage) > 1
            trained = stage in BACKWARD.get(case.mode, ("vision", "audio"))
            assert labels.count(f"{stage}.backward") == labels.count(stage) * trained, (case, labels)


FAST = [
    Case("checkpointing", accumulate=ACCUMULATE),
    Case("frozen encoders"),
    Case("frozen LLM"),
    Case("projections only"),
    Case("checkpointing", torch.bfloat16),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients(engine, references):
    check(engine, FAST, references)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_every_case(engine, mode, references):
    if mode == "compiled encoders" and engine == "zero3":
        pytest.skip("the hooks that DeepSpeed puts into a tower are compiled along, which takes minutes")
    if mode.endswith("inductor") and shutil.which("g++") is None:
        pytest.skip("torch.compile's backend inductor needs g++")
    if mode.startswith("compiled"):  # takes a minute for each case
        check(engine, [Case(mode)], references)
        return
    sharded = (True, False) if engine in ("fsdp2", "zero3") else (True,)
    grid = itertools.product((torch.float32, torch.bfloat16), (1, ACCUMULATE), sharded)
    check(engine, [Case(mode, *choice) for choice in grid], references)


class Run:
    """A model, its engine and its loader, trained step by step."""

    def __init__(self, engine_name, accumulate):
        model = small_model(torch.float32)
        self.engine = train_omni.wrap(model, options_of_run(engine_name, accumulate, "--lr", "1e-2"))
        kinds = [BOTH, TEXT, IMAGE, AUDIO, TEXT, IMAGE, AUDIO] * (NUM_SAMPLES // 7)
        samples = draw(model.config, [[kinds]])[0][0]
        loader = odb.ODBDataLoader(samples, token_budget=50, layout="packed", shuffle=True)
        self.loader = orch.orchestrate(loader, self.engine.module, accumulate=accumulate, timeout_s=50)

    def train(self, num_steps=None):
        """The loss of each step over all ranks, and the samples that this rank trained on."""
        losses, names, loss = [], [], 0.0
        for batch in self.loader:
            micro_step = batch["orch"]
            loss += micro_step.mean_loss(self.engine.forward_backward(batch, micro_step.is_last))
            names += [sample["id"] for sample in micro_step.samples]
            if micro_step.is_last:
                self.engine.step()
                total = torch.tensor(loss, dtype=torch.float64)
                torch.distributed.all_reduce(total)
                losses, loss = [*losses, total.item()], 0.0
                if len(losses) == num_steps:
                    break
        return losses, names


def resume(engine_name, accumulate, folder):
    """The loss curve of a run of two epochs, and that of one which stops after some steps and is resumed twice."""
    whole = Run(engine_name, accumulate)
    expected = [whole.train() for _ in range(2)]
    resumed, state = [], None
    for num_steps in (2, 1, None, None):
        run = Run(engine_name, accumulate)
        if state is not None:
            run.engine.load(folder)
            run.loader.load_state_dict(state)
        resumed.append(run.train(num_steps))
        run.engine.save(folder)
        state = run.loader.state_dict()
    return expected, resumed


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_run_resumes_its_loss_curve(engine, tmp_path):
    results = run_ranks(resume, 2, engine, 2, tmp_path, timeout_s=200)
    for (first, second), resumed in results:
        pieces = [losses for losses, _ in resumed]
        assert [len(piece) for piece in pieces[:2]] == [2, 1]
        assert list(chain(*pieces[:3])) == pytest.approx(first[0], rel=1e-5)
        assert pieces[3] == pytest.approx(second[0], rel=1e-5)
        assert max(first[0]) - min(first[0]) > 0.01  # far above the tolerance: other weights would show
    names = chain(*(names for _, resumed in results for _, names in resumed[:3]))
    assert sorted(names) == sorted(f"s{i}" for i in range(NUM_SAMPLES))


def train_recorded(engine_name, *options):
    """The loss of each step under a script's wrap, and the rows that this rank trained on in each micro-step."""
    rows = []

    def wrap(model, args):
        engine = train_omni.WRAPS[engine_name](model, args)
        forward_backward = engine.forward_backward

        def record(batch, is_last):
            rows.append([int(sample["row"]) for sample in batch["orch"].samples])
            return forward_backward(batch, is_last)

        engine.forward_backward = record
        return engine

    return train(options_of_run(engine_name, 2, *options), wrap)["loss"], rows


def test_the_scripts_train_the_same_samples_to_the_same_losses():
    """The wraps of `train_ddp.py`, `train_fsdp2.py` and `train_deepspeed.py`, the last with each stage of ZeRO."""
    names = [name for name in train_omni.ENGINES if DEEPSPEED or not name.startswith("zero")]
    options = "--steps 3 --samples 80 --max-pixels 12544 --token-budget 192 --num-workers 0".split()
    results = run_ranks(lambda: [train_recorded(name, *options) for name in names], 2, timeout_s=200)
    for (losses, rows), *others in results:
        assert len(losses) == 3
        assert losses[-1] < losses[0]
        assert len(rows) == 6
        for other_losses, other_rows in others:
            assert other_rows == rows
            assert other_losses == pytest.approx(losses, rel=1e-6)  # measured: equal bit for bit
    trained = [row for (_, rows), *_ in results for row in chain(*rows)]
    assert len(trained) == len(set(trained)) > 6
