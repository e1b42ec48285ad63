"""Orchestrated, groups over all ranks: unbalanced, each rank runs just the group that its loader by itself gives it."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import orch
from orch import odb, orchestrator
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

KINDS = ({}, {"grids": [(4, 8)]}, {"frames": [30]}, {"grids": [(2, 6), (2, 2)], "frames": [12, 31]}, {"num_text": 21})
CASES = [("packed", 0, 1), ("packed", 2, 2), ("padded", 0, 2), ("padded", 2, 1)]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


def collect(samples):
    return {"samples": samples}


def make_loader(config, num_samples=80, **options):
    samples = [make_sample(config, i, **KINDS[i % 5]) for i in range(num_samples)]
    options = {"token_budget": 60, "buffer_size": 24, "shuffle": True, "seed": 5, **options}
    return odb.ODBDataLoader(samples, collate_fn=collect, **options)


def own_groups(loader):
    """The ids of the groups that the loader gives this rank by itself."""
    groups = []
    for batch in loader:
        is_idle = odb.pop_step_info(batch).is_idle
        groups.append([] if is_idle else sorted(sample["id"] for sample in batch["samples"]))
    return groups


def orchestrated(loader, model, balance="none", **options):
    return orch.orchestrate(loader, model, balance=balance, timeout_s=30, **options)


def trained_groups(batches):
    """The ids of the samples that this rank runs in each micro-step."""
    return [sorted(sample["id"] for sample in batch["orch"].samples) for batch in batches]


def check_once(groups_of_rank, num_samples):
    assert len({len(groups) for groups in groups_of_rank}) == 1
    seen = Counter(name for groups in groups_of_rank for group in groups for name in group)
    assert seen == Counter(f"s{i}" for i in range(num_samples))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_unbalanced_every_rank_runs_the_groups_of_its_loader(num_ranks):
    def run():
        model, results = small_model(torch.float32), []
        for layout, num_workers, accumulate in CASES:
            options = {"layout": layout, "num_workers": num_workers}
            alone = make_loader(model.config, **options)
            batches = orchestrated(make_loader(model.config, **options), model, accumulate=accumulate)
            for _ in range(2):
                expected, got = own_groups(alone), trained_groups(batches)
                assert got == expected
                results.append(got)
            assert results[-1] != results[-2]
        return results

    for epoch_of_rank in zip(*run_ranks(run, num_ranks, timeout_s=100), strict=True):
        check_once(epoch_of_rank, 80)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_resumed_epoch_goes_on_with_the_same_groups(num_ranks, layout):
    def run():
        model = small_model(torch.float32)
        expected = own_groups(make_loader(model.config, layout=layout))
        batches, states = orchestrated(make_loader(model.config, layout=layout), model, prefetch=2), []
        for batch in batches:
            states.append(batches.state_dict())
            assert sorted(sample["id"] for sample in batch["orch"].samples) == expected[len(states) - 1]
        in_mid_round = [place for place, state in enumerate(states) if state["loader"]["ranks"]]
        for place in in_mid_round[::3] + [len(states) - 2]:
            resumed = orchestrated(make_loader(model.config, layout=layout), model)
            resumed.load_state_dict(states[place])
            rest = trained_groups(resumed)
            assert rest == expected[place + 1 :]
        return len(in_mid_round)

    assert min(run_ranks(run, num_ranks, timeout_s=100)) > 3


def test_a_resume_of_a_resume_reads_the_same_groups():
    def run():
        model, state, groups = small_model(torch.float32), None, []
        expected = own_groups(make_loader(model.config))
        while len(groups) < len(expected):
            loader = make_loader(model.config)
            batches = orchestrated(loader, model)
            if state is not None:
                batches.load_state_dict(state)
            for batch in batches:
                groups.append(sorted(sample["id"] for sample in batch["orch"].samples))
                state = batches.state_dict()
                if len(groups) % 2 == 0:
                    break
            loader.close()
        assert groups == expected

    run_ranks(run, 2, timeout_s=100)


@pytest.mark.parametrize("balance", ["none", "pre", "llm", "post"])
def test_ranks_that_hold_no_sample_of_a_step_get_their_share(balance):
    """Rank 0 reads 40 samples, rank 1 20, rank 2 none; the last step has fewer samples than ranks."""

    def run():
        model, shares = small_model(torch.float32), [range(40), range(40, 61), range(0)]
        options = {"sampler": shares[dist.get_rank()], "layout": "packed", "shuffle": False}
        batches = orchestrated(make_loader(model.config, 61, **options), model, balance, accumulate=2)
        groups = trained_groups(batches)
        if balance == "none":
            assert groups == own_groups(make_loader(model.config, 61, **options))
        return groups

    results = run_ranks(run, 3)
    check_once(results, 61)
    assert all(map(all, zip(*(groups[:-1] for groups in results), strict=True)))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_without_join_all_ranks_stop_together(layout):
    def run():
        model = small_model(torch.float32)
        options = {"layout": layout, "join": False, "num_samples": 61}
        groups = trained_groups(orchestrated(make_loader(model.config, **options), model))
        assert groups == own_groups(make_loader(model.config, **options))
        return groups

    results = run_ranks(run, 3)
    names = [name for groups in results for group in groups for name in group]
    assert 58 < len(names) == len(set(names)) <= 61
    assert len({len(groups) for groups in results}) == 1


def test_an_early_stop_and_a_chosen_epoch():
    def run():
        model = small_model(torch.float32)
        alone = make_loader(model.config)
        batches = orchestrated(make_loader(model.config), model)
        for epoch in (3, 0):
            batches.set_epoch(epoch)
            for index, _ in enumerate(batches):
                if index == 2:
                    break
        alone.set_epoch(7)
        batches.set_epoch(7)
        assert trained_groups(batches) == own_groups(alone)

    run_ranks(run, 2)


def test_an_epoch_set_after_an_early_stop_is_what_the_state_says_though_a_rank_is_late(monkeypatch):
    """The first rank does not wait for the late one, whose batches ahead end with an error that nobody sees."""
    monkeypatch.setattr(orchestrator, "_CLOSE_S", 0.1)

    def run():
        model = torch.nn.parallel.DistributedDataParallel(small_model(torch.float32))
        alone, found = make_loader(model.module.config, shuffle=True), []
        batches = orchestrated(make_loader(model.module.config, shuffle=True), model)
        for index, batch in enumerate(batches):
            model(**batch).loss.backward()
            if index == 2:
                time.sleep(1.5 * dist.get_rank())
                break
        for wait_s in (0, 2):
            time.sleep(wait_s)
            batches.set_epoch(1) if not wait_s else None
            state = batches.state_dict()
            found.append((state["step"], state["loader"]["epoch"], state["loader"]["num_consumed"]))
        alone.set_epoch(1)
        assert trained_groups(batches) == own_groups(alone)
        return found

    assert run_ranks(run, 2) == [[(0, 1, 0)] * 2] * 2


@pytest.mark.parametrize("grouping", ["global", "local"])
def test_ranks_may_leave_an_epoch_one_after_the_other(grouping):
    """Who leaves later still draws ahead, from rounds for which the loader needs the other."""

    def run():
        model, begun = small_model(torch.float32), []
        left, resumed = (
            orchestrated(make_loader(model.config, 40, grouping=grouping, buffer_size=4), model, accumulate=2, prefetch=2)
            for _ in range(2)
        )
        for batch in left:
            begun.append([sample["id"] for sample in batch["orch"].samples])
            if len(begun) == 2:
                time.sleep(0.4 * dist.get_rank())
                break
        resumed.load_state_dict(left.state_dict())
        return begun + trained_groups(resumed), trained_groups(left)

    for epoch_of_rank in zip(*run_ranks(run, 2), strict=True):
        check_once(epoch_of_rank, 40)


def test_local_groups_stay_where_they_were_formed():
    def run(options):
        model = small_model(torch.float32)
        groups = make_loader(model.config, **options).groups("local")
        expected = [sorted(sample["id"] for sample in group) for group in groups]
        batches = orchestrated(make_loader(model.config, **options), model)
        assert trained_groups(batches) == expected
        assert batches.report.summary()["bytes"] == {"intra_node": 0, "inter_node": 0}
        return expected

    check_once(run_ranks(run, 2, {"grouping": "local"}), 80)
    alone = {"rank": 0, "world_size": 1}  # each rank for itself: what its loader calls rank 0 is every rank
    for groups in run_ranks(run, 2, alone):
        check_once([groups], 80)


def test_a_state_of_orchestrated_samples_is_refused_by_a_loader_on_its_own():
    def run():
        model = small_model(torch.float32)
        batches, loader = orchestrated(make_loader(model.config), model), make_loader(model.config)
        next(iter(batches))
        loader.load_state_dict(batches.state_dict()["loader"])
        for way in (iter, odb.ODBDataLoader.groups):
            with pytest.raises(ValueError, match="saved while orchestrated must go on orchestrated"):
                way(loader)
        batches.loader.close()

    run_ranks(run, 2)
