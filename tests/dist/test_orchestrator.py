"""The orchestrated loader among ranks: collectives, several loaders, early ends, uneven ends, agreement."""

import re
import sys
import time
from itertools import chain

import pytest
import torch
import torch.distributed as dist

import orch
from orch import odb, setup
from orch.comm.collective_log import CollectiveLog
from orch.comm.topology import Topology
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


class Groups:
    """A loader of given groups, which may be iterated again."""

    def __init__(self, groups):
        self._groups = groups

    def groups(self):
        return iter(self._groups)


def samples_of_rank(config, rank, num_samples=3):
    kinds = [{"grids": [(4, 2 * (1 + rank))]}, {"frames": [15 + 10 * rank]}, {}, {"grids": [(2, 2)], "frames": [9]}]
    return [
        make_sample(config, 10 * rank + i, num_text=6 + 5 * ((rank + i) % 3), **kinds[(rank + i) % 4])
        for i in range(num_samples)
    ]


def make(num_groups=1, *, exchange="flat", dtype=torch.float32, **kwargs):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = small_model(dtype)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    groups = [samples_of_rank(model.config, rank + num_ranks * i) for i in range(num_groups)]
    kwargs = {"topology": Topology(num_ranks, 2), "timeout_s": 30, **kwargs}
    return model, ddp, groups, orch.orchestrate(Groups(groups), ddp, exchange=exchange, **kwargs)


def trained_ids(loader):
    return [sample["id"] for batch in loader for sample in batch["orch"].samples]


@pytest.mark.parametrize("exchange", ["flat", "all_gather"])
def test_encoder_outputs_take_one_exchange_a_stage_and_direction(exchange):
    def run():
        _, ddp, _, loader = make(exchange=exchange, balance="post")
        (batch,) = list(loader)
        assert all(stage.moves for stage in batch["orch"].stages.values())
        with CollectiveLog() as log:
            loss = ddp(**batch).loss
            forward = [entry.label for entry in log.entries]
            loss.backward()
        return forward, [entry.label for entry in log.entries][len(forward) :], {entry.kind for entry in log.entries}

    kind = "all_to_all" if exchange == "flat" else "all_gather"
    for forward, backward, kinds in run_ranks(run, 4):
        assert forward == ["audio", "vision"]
        assert backward == ["vision.backward", "audio.backward"]
        assert kinds == {kind}


def test_rows_of_a_stage_travel_while_the_next_one_computes():
    def run():
        _, ddp, _, loader = make(balance="post", exchange="flat", prefetch=0)
        with torch.profiler.profile() as profile:
            (batch,) = loader
            ddp(**batch).loss.backward()
        ranges = [event for event in profile.events() if event.name.startswith("orch.")]
        ranges.sort(key=lambda event: event.time_range.start)
        return [event.name.removeprefix("orch.") for event in ranges]

    for names in run_ranks(run, 4):
        assert {"gather", "plan", "exchange.raw", "merge"} <= set(names)
        assert [name for name in names if "audio" in name or "vision" in name] == [
            "encode.audio",
            "exchange.audio",
            "encode.vision",
            "exchange.vision",
            "exchange.audio.wait",
            "exchange.vision.wait",
            "exchange.vision.backward",
            "exchange.audio.backward",
            "exchange.vision.backward.wait",
            "exchange.audio.backward.wait",
        ]


def test_preparing_a_micro_step_takes_one_raw_exchange():
    def run():
        _, _, _, loader = make(balance="post", prefetch=0)
        with CollectiveLog() as log:
            list(loader)
        return [entry.label for entry in log.entries]

    for labels in run_ranks(run, 2):
        assert labels.count("parcels") == 1
        assert [label for label in labels if not label.endswith(".header")] == ["lengths", "plan", "parcels", "lengths"]


def test_preparation_runs_ahead_by_its_bound_and_no_further():
    """While a batch is held, `prefetch` batches lie ready and one is in the background thread's hands."""

    def run():
        num_planned = []
        for prefetch in (1, 2):
            _, _, _, loader = make(num_groups=8, balance="post", prefetch=prefetch)
            counts = []
            for _ in zip(range(2), loader, strict=False):
                bound, deadline = len(counts) + 1 + prefetch + 1, time.monotonic() + 20
                while len(loader.report.plan_ms) < bound and time.monotonic() < deadline:
                    time.sleep(0.01)
                time.sleep(0.5)
                counts.append(len(loader.report.plan_ms))
            num_planned.append(counts)
        return num_planned

    for num_planned in run_ranks(run, 2):
        assert num_planned == [[3, 4], [4, 5]]


def test_a_training_and_an_evaluation_loader_live_side_by_side():
    def run():
        model, ddp, groups, training = make(num_groups=3)
        evaluation = orch.orchestrate(Groups(groups[:1]), ddp, balance="none", timeout_s=30)
        plain_batch = {"input_ids": groups[0][0]["input_ids"][None], "attention_mask": torch.ones(1, 1).long()}
        plain_batch = {"input_ids": torch.tensor([[20, 21, 22]]), "attention_mask": torch.ones(1, 3).long()}
        alone = model(**plain_batch).logits
        evaluated = []
        for batch in training:
            ddp(**batch).loss.backward()
            with torch.no_grad():
                evaluated += [ddp(**other).loss.item() for other in evaluation]
                assert torch.equal(model(**plain_batch).logits, alone)
        return evaluated, len(training.report.steps), len(evaluation.report.steps)

    for evaluated, num_trained, num_evaluated in run_ranks(run, 2):
        assert len(set(evaluated)) == 1
        assert (num_trained, num_evaluated) == (3, 3)


def test_leaving_the_loop_early_and_starting_anew():
    def run():
        _, _, _, loader = make(num_groups=5)
        seen = []
        for _ in range(3):
            for batch in loader:
                seen.append([sample["id"] for sample in batch["orch"].samples])
                if len(seen) % 2 == 0:
                    break
        return seen, trained_ids(loader)

    results = run_ranks(run, 2)
    for seen, _ in results:
        assert len(seen) == 6
        assert seen[:2] == seen[2:4] == seen[4:]
    assert len({name for _, ids in results for name in ids}) == sum(len(ids) for _, ids in results) == 30


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_with_unequal_numbers_of_groups_end_together(accumulate):
    def run():
        rank = dist.get_rank()
        model = small_model(torch.float32)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        groups = [samples_of_rank(model.config, 10 * rank + i, 2) for i in range((3, 0, 4)[rank])]
        loader = orch.orchestrate(Groups(groups), ddp, accumulate=accumulate, timeout_s=30)
        ids, num_batches = [], 0
        for batch in loader:
            ddp(**batch).loss.backward()
            ids += [sample["id"] for sample in batch["orch"].samples]
            num_batches += 1
        return ids, num_batches

    results = run_ranks(run, 3)
    assert {num_batches for _, num_batches in results} == {4}
    ids = [name for names, _ in results for name in names]
    assert len(ids) == len(set(ids)) == 14


def test_a_loader_without_any_sample_yields_nothing():
    def run():
        model = small_model(torch.float32)
        return list(orch.orchestrate(Groups([]), model, timeout_s=30))

    assert run_ranks(run, 2) == [[], []]


def test_the_state_is_that_of_the_step_taken_not_of_the_batches_ahead():
    def run():
        samples = list(chain(*(samples_of_rank(small_model().config, i) for i in range(8))))
        model = small_model(torch.float32)

        def anew():
            groups = odb.ODBDataLoader(samples, token_budget=40, layout="packed")
            return orch.orchestrate(groups, model, accumulate=2, prefetch=3, timeout_s=30)

        loader, seen, states, refused = anew(), [], [], 0
        for batch in loader:
            seen.append(batch["orch"])
            if loader.sync_gradients:
                states.append((len(seen), loader.state_dict()))
            else:
                with pytest.raises(RuntimeError, match="where an optimizer step ends"):
                    loader.state_dict()
                refused += 1
        for place, state in [*states[:: max(1, len(states) // 3)], states[-1]]:
            resumed = anew()
            resumed.load_state_dict(state)
            rest = [(m.step, m.index, m.samples) for m in (batch["orch"] for batch in resumed)]
            assert rest == [(m.step, m.index, m.samples) for m in seen[place:]]
        return len(states), refused

    for num_steps, refused in run_ranks(run, 2):
        assert num_steps >= 4
        assert refused >= num_steps - 1


def test_a_loader_without_a_state_says_so():
    def run():
        _, _, _, loader = make()
        list(loader)
        with pytest.raises(TypeError, match="`loader` must have `state_dict` to be resumed, but Groups has none"):
            loader.state_dict()
        with pytest.raises(ValueError, match="`version` of a state must be 1, but is None"):
            loader.load_state_dict({})

    run_ranks(run, 2)


def test_ranks_that_train_different_parts_are_refused():
    def run():
        rank = dist.get_rank()
        model = small_model(torch.float32)
        model.model.visual.requires_grad_(rank == 0)
        loader = orch.orchestrate(Groups([samples_of_rank(model.config, rank)]), model, timeout_s=30)
        with pytest.raises(ValueError, match=r"ranks \[1\] differ from rank 0 instead, in .* trained parts"):
            list(loader)

    run_ranks(run, 2)


def test_two_runs_are_bit_identical():
    def run():
        _, ddp, _, loader = make(num_groups=3, balance="post")
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        losses = []
        for batch in loader:
            loss = ddp(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, second = run_ranks(run, 4), run_ranks(run, 4)
    assert first == second
    assert len(set(first[0])) == 3


def _one_stage(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "small_model", _small_model_of_one_stage)


def _small_model_of_one_stage(dtype):
    model = small_model_of_two_stages(dtype, staged=False)
    orch.stage(model.model.audio_tower, "audio")  # what it freezes DDP would find to differ, if it were the other
    return model


small_model_of_two_stages = small_model


class Wordless:
    def __repr__(self):
        raise ArithmeticError


DIFFERENT = {
    "balance": lambda monkeypatch: {"balance": "none"},
    "token cap": lambda monkeypatch: {"max_tokens": 500},
    "number of stages": _one_stage,
    "code version": lambda monkeypatch: monkeypatch.setattr(setup, "__version__", "0.0.9"),
    "accumulation": lambda monkeypatch: {"accumulate": 2},
    "exchange": lambda monkeypatch: {"exchange": "node_wise"},
    "topology": lambda monkeypatch: {"topology": None},
    "unknown balance": lambda monkeypatch: {"balance": "pst"},
    "unknown exchange": lambda monkeypatch: {"exchange": "flt"},
    "topology of other ranks": lambda monkeypatch: {"topology": Topology(3)},
    "prefetch": lambda monkeypatch: {"prefetch": -1},
    "string of a number": lambda monkeypatch: {"prefetch": "1"},
    "float of a number": lambda monkeypatch: {"prefetch": 1.0},
    "string of nothing": lambda monkeypatch: {"dispatcher": "None"},
    "no words": lambda monkeypatch: {"costs": {"llm": Wordless()}},
    "too long a number": lambda monkeypatch: {"max_tokens": 10**5000},
}


def test_ranks_that_are_set_up_differently_are_told_so():
    def run():
        said = {}
        for name, choose in DIFFERENT.items():
            with pytest.MonkeyPatch.context() as monkeypatch:
                choice = choose(monkeypatch) if dist.get_rank() == 1 else {}
                with pytest.raises(ValueError, match="must be set up alike on all ranks") as caught:
                    make(**(choice or {}))
                said[name] = str(caught.value)
        for name, value in (("balance", "pst"), ("exchange", "flt"), ("topology", Topology(3))):
            with pytest.raises(ValueError, match=f"`{name}` must (be one of|have 2 ranks)"):
                make(**{"exchange": "flat", name: value})
        return said

    first, second = run_ranks(run, 2)
    assert first == second
    assert "but `max_tokens` is None on rank 0 and 500 on rank 1 instead." in first["token cap"]
    assert re.search(r"but the version of orch is \S+ on rank 0 and 0.0.9 on rank 1 instead", first["code version"])
    assert " on rank 0 and {'audio': 'QwenOmniAudioAdapter'} on rank 1 instead." in first["number of stages"]
    assert "but the adapter of each stage is {" in first["number of stages"]
    assert "but `prefetch` is 1 on rank 0 and '1' on rank 1 instead." in first["string of a number"]
    assert "but `prefetch` is 1 on rank 0 and 1.0 on rank 1 instead." in first["float of a number"]
    assert "{'llm': Wordless without words (ArithmeticError)} on rank 1" in first["no words"]


def test_a_rank_that_stops_alone_ends_the_others_with_its_name():
    def run():
        _, _, _, loader = make(num_groups=6)
        try:
            for index, _ in enumerate(loader):
                if dist.get_rank() == 1 and index == 1:
                    break
        except RuntimeError as error:
            return str(error)
        return "ended"

    first, second = run_ranks(run, 2)
    assert "Ranks [1] stopped iterating before step" in first
    assert second == "ended"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"note": object()}, "`note` must be a tensor, an array of numbers, a number or a string, but is object"),
        ({"labels": None}, "`labels` must be among the keys"),
        ({"input_ids": torch.tensor([20, 21])}, "must hold a placeholder for each of the 2 rows of stage 'vision'"),
    ],
)
def test_bad_samples_stop_every_rank_naming_the_sample(change, message):
    def run():
        model = small_model(torch.float32)
        sample = make_sample(model.config, 7, grids=[(2, 4)]) | change
        sample = {key: value for key, value in sample.items() if value is not None}
        if "input_ids" in change:
            sample["labels"] = sample["input_ids"]
        groups = [[sample if dist.get_rank() == 1 else make_sample(model.config, 3)]]
        try:
            list(orch.orchestrate(Groups(groups), model, timeout_s=30))
        except RuntimeError as error:
            return str(error)

    for text in run_ranks(run, 2):
        assert "Rank 1 failed" in text
        assert "Sample 's7'" in text
        assert message in text
