"""Runs that are legal, or wrong, in ways that are easily overlooked."""

import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import orch
from orch import odb
from orch.comm.all_to_all import exchange_many
from orch.comm.gather import RankFailedError
from orch.comm.groups import get_rank, get_world_size
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.topology import Topology
from orch.cost import PackedCost
from tests.models import Groups as ModelGroups
from tests.models import make_model
from tests.models import make_sample as make_model_sample
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


@pytest.mark.parametrize(
    ("groups", "accumulate", "steps"),
    [
        ([[0], [], [1], [2]], 1, [0, 1, 2]),
        ([[0], [1], [], [], [2], [3]], 2, [0, 0, 1, 1]),
        ([[], [], [0], []], 1, [0]),
        ([[], []], 1, []),
    ],
)
def test_a_step_without_any_sample_is_passed_over(groups, accumulate, steps):
    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        own = [[make_sample(model.config, 100 * rank + i) for i in group] for group in groups]
        loader = orch.orchestrate(own, model, accumulate=accumulate, topology=Topology(2), timeout_s=30)
        found = []
        for batch in loader:
            model(**batch).loss.backward()
            found.append((batch["orch"].step, [sample["id"] for sample in batch["orch"].samples]))
        return found

    ranks = run_ranks(run, 2)
    for found in ranks:
        assert [step for step, _ in found] == steps
    trained = sorted(name for found in ranks for _, names in found for name in names)
    assert trained == sorted(f"s{100 * rank + i}" for rank in range(2) for group in groups for i in group)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_rank_that_skips_its_first_batch_alone_is_found(prefetch):
    """The others leave their last batch out, so that all run as many: each exchange would be of two steps."""

    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        samples = [
            [make_sample(model.config, 100 * i + 10 * rank + k, grids=[(4, 4)]) for k in range(2)] for i in range(8)
        ]
        loader = orch.orchestrate(samples, model, topology=Topology(2), prefetch=prefetch, timeout_s=20)
        for number, batch in enumerate(loader):
            if number == 0 and rank == 0:
                continue
            if number == 7 and rank == 1:
                break
            model(**batch).loss.backward()

    for outcome in run_ranks(run, 2, expect_failure=True, timeout_s=60):
        assert outcome.failed
        assert re.search(r"ranks did not run the model on \[1, 0\] of their batches", outcome.traceback), (
            outcome.traceback
        )


@pytest.mark.parametrize(("prefetch", "looks_ahead", "accumulate"), [(1, 1, 1), (0, 1, 1), (2, 3, 2)])
def test_a_loop_that_looks_ahead_and_a_rank_that_is_late_have_skipped_nothing(prefetch, looks_ahead, accumulate):
    """Without buffers to broadcast, nothing holds the ranks of DDP in step but gradients."""

    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        engine = torch.nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=True, broadcast_buffers=False
        )
        samples = [[make_sample(model.config, 10 * i + rank)] for i in range(8)]
        options = {"prefetch": prefetch, "accumulate": accumulate, "topology": Topology(2), "timeout_s": 30}
        loader = iter(orch.orchestrate(samples, engine, **options))
        held, num_run = list(itertools.islice(loader, looks_ahead)), 0
        while held:
            held += itertools.islice(loader, 1)
            time.sleep(0.1 * rank)
            engine(**held.pop(0)).loss.backward()
            num_run += 1
        return num_run

    assert run_ranks(run, 2, timeout_s=60) == [8, 8]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_to_break_after_the_last_batch_is_to_come_to_the_end(prefetch):
    def run():
        model, rank, num_run = small_model(torch.float32), dist.get_rank(), []
        samples = [[make_sample(model.config, 10 * i + rank)] for i in range(4)]
        loader = orch.orchestrate(samples, model, topology=Topology(2), prefetch=prefetch, timeout_s=20)
        for _ in range(2):
            num_run.append(0)
            for batch in loader:
                model(**batch).loss.backward()
                num_run[-1] += 1
                if rank == 0 and num_run[-1] == 4:
                    break
        return num_run

    assert run_ranks(run, 2, timeout_s=60) == [[4, 4], [4, 4]]


@pytest.mark.parametrize(("prefetch", "accumulate"), [(0, 1), (0, 3), (1, 3)])
@pytest.mark.parametrize("way", ["break", "raise"])
def test_a_rank_that_leaves_alone_is_named_soon_wherever_it_stands(prefetch, accumulate, way):
    """In the midst of a step too, and where no thread prepares."""

    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        samples = [[make_sample(model.config, 10 * i + rank)] for i in range(9)]
        loader = orch.orchestrate(
            samples, model, topology=Topology(2), prefetch=prefetch, accumulate=accumulate, timeout_s=40
        )
        start = time.monotonic()
        try:
            for number, batch in enumerate(loader):
                if rank == 0 and number == 4:
                    if way == "break":
                        break
                    raise OSError("disk")
                model(**batch).loss.backward()
        except OSError:
            return "left"
        except RuntimeError as error:
            assert time.monotonic() - start < 20
            return str(error)
        return "left"

    left, told = run_ranks(run, 2, timeout_s=60)
    assert left == "left"
    assert told.startswith("Ranks [0] stopped iterating before step")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_that_cannot_begin_on_one_rank_ends_all_with_its_reason(prefetch):
    class Groups:
        def __iter__(self):
            if dist.get_rank() == 0:
                raise OSError("no such shard")
            return iter([[make_sample(small_model(torch.float32).config, i)] for i in range(3)])

    def run():
        model = small_model(torch.float32)
        loader = orch.orchestrate(Groups(), model, topology=Topology(2), prefetch=prefetch, timeout_s=20)
        with pytest.raises(RankFailedError, match="Rank 0 failed: OSError: no such shard"):
            list(loader)
        return True

    assert run_ranks(run, 2, timeout_s=60) == [True, True]


def test_slack_keeps_samples_where_they_are():
    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        own = [[make_sample(model.config, 10 * rank + i, num_text=20) for i in range(5 - 2 * rank)]]
        found = []
        for slack in (0.0, 0.5):
            (batch,) = orch.orchestrate(own, model, slack=slack, topology=Topology(2), timeout_s=20)
            found.append([sample["id"] for sample in batch["orch"].samples])
        with pytest.raises(ValueError, match="`slack` must be a number from 0 to 1, but is -1 instead"):
            orch.orchestrate(own, model, slack=-1, topology=Topology(2), timeout_s=20)
        return found

    (tight, loose), (other_tight, other_loose) = run_ranks(run, 2, timeout_s=60)
    assert (loose, other_loose) == (["s0", "s1", "s2", "s3", "s4"], ["s10", "s11", "s12"])
    assert (len(tight), len(other_tight)) == (4, 4)


def test_ranks_that_all_skip_the_same_batches_go_on():
    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        samples = [[make_sample(model.config, 10 * i + rank)] for i in range(8)]
        loader = orch.orchestrate(samples, model, topology=Topology(2), timeout_s=20)
        losses = [model(**batch).loss.item() for number, batch in enumerate(loader) if number not in (0, 3)]
        return len(losses)

    alone = small_model(torch.float32)  # a heartbeat that began before there were ranks is none for them
    orch.orchestrate([[make_sample(alone.config, 0)]], alone, topology=Topology(1))
    assert run_ranks(run, 2, timeout_s=60) == [6, 6]


def test_calls_that_would_train_wrongly_under_ddp_are_told():
    """Rank 1 has no picture, and is told of a lost plan like rank 0, which has."""

    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        engine = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        groups = [[make_sample(model.config, 10 * i + rank, grids=[(4, 4)] * (1 - rank))] for i in range(4)]
        loader = iter(orch.orchestrate(groups, engine, balance="none", topology=Topology(2), timeout_s=20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine(**next(loader)).loss.backward()
        batch = next(loader)
        with pytest.warns(UserWarning, match="not the DistributedDataParallel around it"):
            model(**batch).loss.backward()
        batch = next(loader)
        with torch.no_grad():
            model(**batch)
        batch = next(loader)
        with pytest.raises(ValueError, match="`orch` must be among the arguments of the model, since the batch of step 3"):
            engine(input_ids=batch["input_ids"], labels=batch["labels"])

    run_ranks(run, 2, timeout_s=60)


@pytest.mark.parametrize("coefficient", [0.0, 100.0])
def test_the_loss_of_a_router_is_part_of_the_loss(coefficient):
    model = make_model("qwen3_vl_moe", "packed")
    text = model.config.text_config
    text.output_router_logits, text.router_aux_loss_coef = True, coefficient
    sample = make_model_sample("qwen3_vl_moe", 0, [], num_text=20)
    (batch,) = orch.orchestrate(ModelGroups([[sample]]), model)
    loss = model(**batch).loss
    plain = model(input_ids=sample["input_ids"][None], labels=sample["labels"][None], use_cache=False).loss
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)


UINT8, BFLOAT16, INT64 = torch.uint8, torch.bfloat16, torch.int64


@pytest.mark.parametrize(
    ("source", "target", "num_rows"),
    [([0, 0, 1, 1], [1, 0, 1, 0], [1, 1, 1, 1]), ([0, 0], [0, 1], [2, 1]), ([0, 1], [0, 0], [2, 1])],
)
@pytest.mark.parametrize(
    "kinds",
    [
        [(UINT8, 3), (torch.float32, 2)],
        [(BFLOAT16, 5), (torch.float32, 2)],
        [(torch.float32, 5), (INT64, 2)],
        [(INT64, 0)],
    ],
    ids=str,
)
def test_rows_of_mixed_dtypes_arrive_where_few_or_none_do(source, target, num_rows, kinds):
    def run():
        rank = dist.get_rank()
        move = Rearrangement(Layout(torch.tensor(source).numpy(), 2), Layout(torch.tensor(target).numpy(), 2))
        exchange = Exchange.of(move, rank, torch.tensor(num_rows).numpy())
        first = [sum(num_rows[:item]) for item in range(len(num_rows))]
        rows = [list(range(first[i], first[i] + num_rows[i])) for i in range(len(num_rows))]
        here = [row for i in range(len(rows)) if source[i] == rank for row in rows[i]]
        then = [row for i in range(len(rows)) if target[i] == rank for row in rows[i]]
        tensors = [torch.tensor(here).to(dtype).reshape(-1, 1).expand(-1, width) for dtype, width in kinds]
        found = exchange_many(tensors, exchange, dist.group.WORLD)
        expected = [torch.tensor(then).to(dtype).reshape(-1, 1).expand(-1, width) for dtype, width in kinds]
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    assert run_ranks(run, 2) == [True, True]


def test_a_rank_may_leave_a_loader_that_it_never_iterated(tmp_path):
    """Rank 0 is done at once; rank 1 works on, for longer than the limits, and is left alone."""
    script = tmp_path / "idle.py"
    script.write_text(
        "import sys, time, torch, torch.distributed as dist, orch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.omni import make_sample, small_model\n"
        "dist.init_process_group('gloo')\n"
        "model, rank = small_model(torch.float32), dist.get_rank()\n"
        "groups = [[make_sample(model.config, rank)]]\n"
        "for timeout_s in (2, 3):\n"
        "    orch.orchestrate(groups, model, topology=orch.Topology(2), timeout_s=timeout_s)\n"
        "time.sleep(9 * rank)\n"
        "print('rank', rank, 'is done', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("is done") == 2
    assert time.monotonic() - start > 9


def test_costs_of_a_stage_that_does_not_exist_are_refused():
    costs = {"vison": PackedCost()}
    with pytest.raises(ValueError, match=r"must be of the stages \['audio', 'vision', 'llm'\], but has \['vison'\]"):
        orch.orchestrate([], small_model(torch.float32), costs=costs)


def test_a_model_that_returns_a_tuple_is_told_to_return_a_dict():
    model = small_model(torch.float32)
    loader = orch.orchestrate([[make_sample(model.config, 0)]], model, topology=Topology(1))
    for batch in loader:
        with pytest.raises(TypeError, match="must return a dict with `logits`, but returned a tuple instead"):
            model(**batch, return_dict=False)


@pytest.mark.parametrize("case", ["of one rank", "uneven"])
def test_ranks_may_be_in_unequal_numbers_of_groups(case):
    """torch names groups by the number of those that a rank is in, so that ranks could miss each other.

    A group made afterwards by its ranks alone must find them in equally many, too.
    """

    def run():
        rank = dist.get_rank()
        alone = dist.new_group([0]) if case == "of one rank" else None
        group = None if case == "of one rank" else dist.new_group([0, 1, 2])
        topology = Topology(4, 2) if group is None else Topology(3, 2)
        if case == "uneven" and rank == 3:
            return 1
        model = small_model(torch.float32)
        groups = [[make_sample(model.config, rank)]]
        loader = orch.orchestrate(groups, model, topology=topology, group=group, timeout_s=20)
        for batch in loader:
            model(**batch).loss.backward()
        later = dist.new_group(list(range(topology.num_ranks)), use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=later)
        return len(loader.report.steps) * (alone is not None or case == "uneven")

    assert run_ranks(run, 4, timeout_s=50) == [1, 1, 1, 1]


def test_ranks_at_different_steps_are_told_so():
    def run():
        model, rank = small_model(torch.float32), dist.get_rank()
        groups = ResumableGroups([[make_sample(model.config, 10 * i + rank)] for i in range(4)])
        loader = orch.orchestrate(groups, model, topology=Topology(2), timeout_s=20)
        if rank == 1:
            loader.load_state_dict({"version": 1, "step": 2, "peaks": {}, "loader": None})
        with pytest.raises(ValueError, match=r"must go on at the same step, but are at steps \[0, 2\] instead"):
            list(loader)

    run_ranks(run, 2)


class ResumableGroups(list):
    def load_state_dict(self, state):
        pass


def test_towers_of_another_dtype_on_one_rank_are_refused():
    def run():
        rank = dist.get_rank()
        model = small_model(torch.bfloat16 if rank else torch.float16)
        loader = orch.orchestrate([[make_sample(model.config, rank)]], model, topology=Topology(2), timeout_s=20)
        with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 instead, in .* dtypes"):
            list(loader)

    run_ranks(run, 2)


PADDED = {"attention_mask": torch.tensor([0, 1, 1, 1, 1, 1, 1, 1])}


@pytest.mark.parametrize(
    ("group_of", "message"),
    [
        (lambda sample: None, "must yield lists of samples, but yields None instead"),
        (lambda sample: [None], "dicts with names as keys, but one is a NoneType: 'None' instead"),
        (lambda sample: {"input_ids": sample["input_ids"][None]}, "but one is a str: 'input_ids' instead"),
        (lambda sample: [{**sample, 7: 1}], "but one is a dict with the keys"),
        (lambda sample: [{**sample, **PADDED}], "Sample 's0': `attention_mask` must be all ones"),
        (
            lambda sample: [{**sample, "input_ids": sample["input_ids"] > 0}],
            "Sample 's0': `input_ids` must be a vector",
        ),
        (lambda sample: [{**sample, "labels": None}], "Sample 's0': `labels` must be a tensor or an array of numbers"),
        (lambda sample: [{**sample, "labels": "abc"}], "but is a str: 'abc' instead"),
        (lambda sample: [{**sample, "attention_mask": None}], "Sample 's0': `attention_mask` must be a tensor or an"),
        (
            lambda sample: [{**sample, "input_ids": sample["input_ids"] * 1j}],
            "Sample 's0': `input_ids` must be a vector",
        ),
    ],
)
def test_groups_and_samples_of_other_kinds_are_refused(group_of, message):
    model = small_model(torch.float32)
    groups = [[make_sample(model.config, 1)], group_of(make_sample(model.config, 0))]
    loader = orch.orchestrate(groups, model, topology=Topology(1))
    with pytest.raises(RankFailedError, match=re.escape(message)):
        list(loader)


@pytest.mark.parametrize("key", ["labels", "input_ids"])
def test_tokens_of_any_integers_train(key):
    model, losses = small_model(torch.float32), []
    for kind in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"):
        sample = make_sample(model.config, 0, grids=[(2, 4)])
        if kind.startswith("u"):
            sample["labels"] = sample["input_ids"].clone()
        expected = dict(sample)
        for tokens in (sample[key].numpy().astype(kind), torch.from_numpy(sample[key].numpy().astype(kind))):
            groups = [[expected], [{**sample, key: tokens}]]
            loader = orch.orchestrate(groups, model, topology=Topology(1), prefetch=0)
            losses.append([model(**batch).loss.item() for batch in loader])
    for expected, found in losses:
        assert found == expected > 0


def test_a_list_of_tokens_is_refused_by_name():
    model = small_model(torch.float32)
    sample = make_sample(model.config, 0)
    loader = orch.orchestrate([[{**sample, "labels": sample["labels"].tolist()}]], model, topology=Topology(1))
    with pytest.raises(RankFailedError, match="Sample 's0': `labels` must be a tensor, .* but is list instead"):
        list(loader)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"balance": "pst"}, "`balance` must be one of"),
        ({"exchange": "flt"}, "`exchange` must be one of"),
        ({"topology": Topology(3)}, "`topology` must have 1 ranks, but has 3 instead"),
        ({"topology": "x"}, "`topology` must be an `orch.Topology`, such as .*, but is 'x' instead"),
        ({"slack": True}, "`slack` must be a number from 0 to 1, but is True instead"),
        *(
            ({"timeout_s": value}, f"`timeout_s` must be a number of seconds above 0, at most .* but is {value!r} instead")
            for value in (float("inf"), 1e10, "5", None, 0, True)
        ),
        ({"prefetch": -1}, "`prefetch` must be a whole number of at least 0, but is -1 instead"),
        ({"prefetch": 1.5}, "`prefetch` must be a whole number of at least 0, but is 1.5 instead"),
        ({"prefetch": True}, "`prefetch` must be a whole number of at least 0, but is True instead"),
        ({"accumulate": 1.5}, "`accumulate` must be a whole number of at least 1, but is 1.5 instead"),
        ({"accumulate": True}, "`accumulate` must be a whole number of at least 1, but is True instead"),
        ({"max_tokens": True}, "`max_tokens` must be a whole number of at least 1, but is True instead"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        orch.orchestrate([], small_model(torch.float32), **choice)


def check_that_the_iteration_before_does_not_disturb(end_first, prefetch):
    """Every sample once, though an iterator of before is freed, closed or advanced while the newer one is under way."""
    model, rank, num_ranks = small_model(torch.float32), get_rank(), get_world_size()
    groups = [[make_sample(model.config, 10 * i + rank)] for i in range(6)]
    loader = orch.orchestrate(groups, model, topology=Topology(num_ranks), prefetch=prefetch, timeout_s=20)
    first = iter(loader)
    model(**next(first))
    second = iter(loader)
    trained = [next(second)]
    model(**trained[0])
    time.sleep(0.2)  # what is ready by then must not be handed out either
    if end_first == "next":
        with pytest.raises(RuntimeError, match="has ended, since its loader was iterated anew"):
            next(first)
    elif end_first == "close":
        first.close()
    del first
    for batch in second:
        model(**batch)
        trained.append(batch)
    return [sample["id"] for batch in trained for sample in batch["orch"].samples]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_iteration_is_not_disturbed_by_the_one_before(num_ranks):
    cases = [(end_first, prefetch) for end_first in ("next", "close", "del") for prefetch in (0, 1, 3)]

    def run():
        return [check_that_the_iteration_before_does_not_disturb(*case) for case in cases]

    ranks = [run()] if num_ranks == 1 else run_ranks(run, num_ranks, timeout_s=90)
    every = sorted(f"s{10 * i + rank}" for i in range(6) for rank in range(num_ranks))
    for found in zip(*ranks, strict=True):
        assert sorted(name for names in found for name in names) == every


def test_a_model_without_stages_is_told_of_its_encoders():
    with pytest.warns(UserWarning, match="No encoder of the model is a stage"):
        orch.orchestrate([], small_model(torch.float32, staged=False), topology=Topology(1))


def test_steps_of_an_epoch_are_numbered_from_0_whatever_was_resumed_before():
    model = small_model(torch.float32)
    samples = [make_sample(model.config, i) for i in range(9)]

    def make():
        return orch.orchestrate(odb.ODBDataLoader(samples, token_budget=24, layout="packed"), model, topology=Topology(1))

    def steps(loader):
        return [batch["orch"].step for batch in loader]

    saving, ended, left = make(), make(), make()
    states = [saving.state_dict() for _ in saving]
    ended.load_state_dict(states[-1])
    every = list(range(len(states)))
    assert (steps(ended), steps(ended)) == ([], every)
    left.load_state_dict(states[0])
    left.set_epoch(0)
    assert left.state_dict() == states[0]
    left.set_epoch(5)
    assert left.state_dict()["step"] == 0
    assert steps(left) == every


@pytest.mark.parametrize("num_batches", [2, 99])
def test_a_state_between_epochs_is_of_the_epoch_that_was_set(num_batches):
    model = small_model(torch.float32)
    samples = [make_sample(model.config, i) for i in range(12)]

    def make():
        loader = odb.ODBDataLoader(samples, token_budget=20, layout="packed", shuffle=True)
        return orch.orchestrate(loader, model, topology=Topology(1))

    def train(loader, num_batches=99):
        found = []
        for batch in itertools.islice(loader, num_batches):
            model(**batch)
            found += [sample["id"] for sample in batch["orch"].samples]
        return found

    loader, resumed = make(), make()
    first = train(loader, num_batches)
    loader.set_epoch(7)
    resumed.load_state_dict(loader.state_dict())
    assert first != train(loader) == train(resumed)
