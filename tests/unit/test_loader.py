"""The loader on one rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from orch import odb
from orch.resume import ResumePoint
from tests.dist.test_odb import Tokens, read_groups, sample_ids


class Counting(IterableDataset):
    """A stream whose samples say which epoch it is."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"input_ids": torch.full((9,), self.epoch)} for _ in range(30))


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_a_stream_is_told_the_epoch(persistent_workers: bool) -> None:
    loader = odb.ODBDataLoader(Counting(), token_budget=100, num_workers=1, persistent_workers=persistent_workers)
    for epoch in (0, 1, 7):
        if epoch == 7:
            loader.set_epoch(7)
        assert {i for group in read_groups(loader) for i in group} == {epoch}


def test_large_samples_are_read_ahead_in_small_chunks_and_fill_a_small_window() -> None:
    class Pictures(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "pixels": torch.zeros(100_000, dtype=torch.uint8)}

    loader = odb.ODBDataLoader(Pictures(80), token_budget=300, num_workers=1, buffer_bytes=1_000_000)
    groups = loader.groups()
    next(groups)
    assert loader._feed.sampler is not None
    assert loader._feed.sampler.chunk_size == 2
    held = loader._position.record.held
    assert len(held) <= 10
    groups.close()


def test_spawned_workers_and_pinned_memory() -> None:
    loader = odb.ODBDataLoader(
        Tokens(60),
        token_budget=500,
        num_workers=1,
        multiprocessing_context="spawn",
        pin_memory=True,
        prefetch_factor=64,
    )
    seen = Counter(int(row[0]) for batch in loader for row in batch["input_ids"])
    assert seen == Counter(range(60))


def test_samples_over_budget_go_alone_with_one_warning() -> None:
    loader = odb.ODBDataLoader(Tokens(60), token_budget=80)
    longer = sum(len(Tokens(60)[i]["input_ids"]) > 80 for i in range(60))
    with pytest.warns(UserWarning, match=f"{longer} samples of this epoch were longer than the token budget") as caught:
        sizes = [odb.pop_step_info(batch).num_samples for batch in loader if batch["input_ids"].numel() > 80]
    assert sizes == [1] * longer
    assert len(caught) == 1


def test_the_length_of_a_loader_is_near_before_and_exact_after_an_epoch() -> None:
    loader = odb.ODBDataLoader(Tokens(1000), token_budget=800)
    estimate = len(loader)
    exact = sum(1 for _ in loader)
    assert abs(estimate - exact) < 0.3 * exact
    assert len(loader) == exact
    with pytest.raises(TypeError, match="no length"):
        len(odb.ODBDataLoader(iter([]), token_budget=10))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"token_budget": 0}, "`token_budget` must be a whole number of at least 1, but is 0"),
        ({"token_budget": 20.5}, "`token_budget` must be a whole number of at least 1, but is 20.5"),
        ({"max_samples": 1.5}, "`max_samples` must be a whole number of at least 1, but is 1.5"),
        ({"max_samples": True}, "`max_samples` must be a whole number of at least 1, but is True"),
        ({"accumulation_steps": 1.5}, "`accumulation_steps` must be a whole number of at least 1, but is 1.5"),
        ({"accumulation_steps": True}, "`accumulation_steps` must be a whole number of at least 1, but is True"),
        ({"max_length": 0}, "`max_length` must be a whole number of at least 1, but is 0"),
        ({"max_length": 9.5}, "`max_length` must be a whole number of at least 1, but is 9.5"),
        ({"join": "no"}, "`join` must be True or False, but is 'no'"),
        ({"join_mode": "no"}, "`join` must be True or False, but is 'no'"),
        ({"shuffle": "no"}, "`shuffle` must be True or False, but is 'no'"),
        ({"mixes_lengths": "no"}, "`mixes_lengths` must be True or False, but is 'no'"),
        ({"shuffle": np.array([1, 2])}, "`shuffle` must be True or False, but is array"),
        ({"buffer_size": 0}, "`buffer_size` must be a whole number of at least 1, but is 0"),
        ({"buffer_bytes": 0}, "`buffer_bytes` must be a whole number of at least 1, but is 0"),
        ({"num_workers": True}, "`num_workers` must be a whole number of at least 0, but is True"),
        ({"prefetch_factor": -1}, "`prefetch_factor` must be a whole number of at least 1, but is -1"),
        ({"prefetch_factor": 2.5}, "`prefetch_factor` must be a whole number of at least 1, but is 2.5"),
        ({"seed": -1}, "`seed` must be a whole number from 0 to 9223372036854775807, but is -1"),
        ({"seed": 2**63}, "`seed` must be a whole number from 0 to 9223372036854775807, but is 9223372036854775808"),
        ({"seed": None}, "`seed` must be a whole number from 0 to 9223372036854775807, but is None"),
        (
            {"group": torch.distributed.GroupMember.NON_GROUP_MEMBER},
            "`group` must hold rank 0, which calls this, but is",
        ),
        ({"group": "dp"}, r"`group` must be a process group or one axis of a mesh, .* but is 'dp' instead"),
        ({"batch_size": 4}, "batch_size"),
        ({"batch_size": True}, "`batch_size` must be 1 or None, since the budget decides, but is True"),
        ({"drop_last": True}, "drop_last"),
        ({"drop_last": "no"}, "`drop_last` must be True or False, but is 'no'"),
        ({"pin_memory": "yes"}, "`pin_memory` must be True or False, but is 'yes'"),
        ({"lost_after_s": "3"}, "`lost_after_s` must be a number of seconds above 0, at most 1e.09, but is '3'"),
        ({"lost_after_s": -1}, "`lost_after_s` must be a number of seconds above 0, at most 1e.09, but is -1"),
        ({"topology": 2}, "`topology` must be an `orch.Topology`, such as .* but is 2 instead"),
        ({"rank": "0", "world_size": "1"}, "must be those of `group`, 0 of 1, or 0 of 1, but are '0' of '1' instead"),
        ({"grouping": "none"}, "grouping"),
        ({"loss_scaling": "mean"}, "loss_scaling"),
        ({"rank": 1}, "together"),
        ({"rank": 1, "world_size": 4}, "0 of 1"),
        ({"shuffle": True, "sampler": range(3)}, "shuffle"),
        ({"over_length": "cut"}, "over_length"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"config": odb.ODBConfig(100), "loss_scaling": "none"}, "`loss_scaling` must be that of `config`, 'exact'"),
        ({"config": odb.ODBConfig(100), "join": False}, "`join` must be that of `config`, True, but is False"),
        ({"config": odb.ODBConfig(100, join=False), "join_mode": True}, "`join_mode` must be `join`, False"),
        ({"config": odb.ODBConfig(100, buffer_size=9), "buffer_size": 7}, "`buffer_size` must be that of `config`, 9"),
        ({"join": True, "join_mode": False}, "`join_mode` must be `join`, True, but is False"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        odb.ODBDataLoader(Tokens(10), **{"token_budget": 100, **arguments})


def test_numpy_integers_choose_seed_and_epoch() -> None:
    loaders = [odb.ODBDataLoader(Tokens(10), token_budget=100, shuffle=True, seed=kind(7)) for kind in (int, np.int32)]
    for loader, epoch in zip(loaders, (2, np.int64(2)), strict=True):
        with pytest.raises(ValueError, match=r"`epoch` must be a whole number from 0 to .* but is 1.5 instead"):
            loader.set_epoch(1.5)  # type: ignore[arg-type]
        loader.set_epoch(epoch)
    first, second = (json.dumps(loader.state_dict()) for loader in loaders)
    assert first == second
    assert read_groups(loaders[0]) == read_groups(loaders[1])


@pytest.mark.parametrize("indices", [np.arange(9), torch.arange(9)])
def test_states_can_be_written_whatever_a_sampler_gives(indices: Any) -> None:
    loader = odb.ODBDataLoader(Tokens(10), token_budget=100, sampler=indices)
    first = sample_ids(next(iter(loader.groups())))
    resumed = odb.ODBDataLoader(Tokens(10), token_budget=100, sampler=indices)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert sorted(first + [number for group in read_groups(resumed) for number in group]) == list(range(9))


def test_a_config_may_be_repeated_and_leaves_open_what_it_does_not_say() -> None:
    config = odb.ODBConfig(100, loss_scaling="off", join=False)
    loader = odb.ODBDataLoader(
        Tokens(10), config=config, token_budget=100, loss_scaling=False, join=False, join_mode=False, buffer_size=7
    )
    assert (loader.loss_scaling, loader.join, loader.window_size.num_samples) == ("none", False, 7)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_samples_with_other_keys_are_named(layout: Any) -> None:
    samples: list[dict[str, Any]] = [{"input_ids": torch.full((4,), i), "id": f"page {i}"} for i in range(3)]
    for others in ([1], [0, 2]):
        some = [{**sample, "pixels": torch.ones(2)} if i in others else sample for i, sample in enumerate(samples)]
        lacking, having = (", ".join(f"'page {i}'" for i in range(3) if (i in others) == has) for has in (False, True))
        with pytest.raises(ValueError, match=f"'pixels' is in samples? {having} and not in samples? {lacking} instead"):
            list(odb.ODBDataLoader(some, token_budget=100, layout=layout))
    nameless = [{"input_ids": torch.ones(4), **({"pixels": 1} if i == 7 else {})} for i in range(20)]
    match = "is in sample number 7 and not in samples number 0, number 1, number 2, number 3, 15 more instead"
    with pytest.raises(ValueError, match=match):
        list(odb.ODBDataLoader(nameless, token_budget=100, layout=layout))


def test_a_packed_row_needs_no_attention_mask_of_any_sample() -> None:
    samples = [{"input_ids": torch.ones(4)}, {"input_ids": torch.ones(4), "attention_mask": torch.ones(4)}]
    for order in (samples, samples[::-1]):
        (batch,) = odb.ODBDataLoader(order, token_budget=8, layout="packed")
        assert "attention_mask" not in batch
        assert batch["input_ids"].shape == (1, 8)


def test_a_sample_that_is_skipped_at_the_resume_takes_its_rank_along() -> None:
    class Sometimes(Tokens):
        def __init__(self, skipped: set[int]) -> None:
            super().__init__(60)
            self.skipped = skipped

        def __getitem__(self, index: int) -> Any:
            return None if index in self.skipped else super().__getitem__(index)

    loader = odb.ODBDataLoader(Sometimes(set()), token_budget=300, buffer_size=30)
    groups = loader.groups("global")
    next(groups)
    state = loader.state_dict()
    loader.close()
    left = [index for group in state["groups"] for index in group]
    assert [list(map(len, state[name])) for name in ("groups", "ranks")] == [list(map(len, state["groups"]))] * 2
    resumed = odb.ODBDataLoader(Sometimes({left[1]}), token_budget=300, buffer_size=30)
    resumed.load_state_dict(state)
    rest = list(resumed.groups("global"))
    assert sorted(sample_ids(rest[0])) == sorted(set(state["groups"][0]) - {left[1]})
    assert all(len(group.ranks) == len(group) for group in rest)


def test_an_epoch_set_between_epochs_is_what_the_state_says() -> None:
    def make_loader() -> odb.ODBDataLoader:
        return odb.ODBDataLoader(Tokens(60), token_budget=300, shuffle=True, buffer_size=16)

    def check_epoch_set(loader: odb.ODBDataLoader, epoch: int) -> None:
        loader.set_epoch(epoch)
        state, resumed = loader.state_dict(), make_loader()
        assert [state[name] for name in ("epoch", "num_consumed", "num_rounds", "groups")] == [epoch, 0, 0, []]
        resumed.load_state_dict(state)
        assert read_groups(resumed) == read_groups(loader)

    loader = make_loader()
    check_epoch_set(loader, 3)
    check_epoch_set(loader, 7)
    for _ in loader:
        break
    assert loader.state_dict()["epoch"] == 8
    assert loader.state_dict()["num_rounds"] == 1
    check_epoch_set(loader, 1)


def test_an_epoch_set_within_another_is_the_next() -> None:
    loader = odb.ODBDataLoader(Tokens(60), token_budget=300)
    for _ in loader:
        loader.set_epoch(5)
        assert loader.state_dict()["epoch"] == 0
        assert loader.state_dict()["num_rounds"] > 0
    assert loader.state_dict()["epoch"] == 5
    groups = loader.groups()
    next(groups)
    loader.close()
    assert next(groups, None) is None
    assert loader.state_dict()["epoch"] == 5
    assert loader.state_dict()["num_rounds"] == 1
    held = loader.groups()
    next(held)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(9)
    assert next(held)
    assert (loader.state_dict()["epoch"], loader.state_dict()["num_rounds"]) == (9, 0)


def test_an_iterator_says_that_its_loader_was_iterated_anew() -> None:
    loader = odb.ODBDataLoader(Tokens(60), token_budget=300, buffer_size=16)
    batches = iter(loader)
    next(batches)
    next(iter(loader))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="one iterator at a time, but was iterated anew before the epoch of"):
            next(batches)


def test_an_iterator_that_has_ended_or_is_given_up_stays_quiet() -> None:
    loader = odb.ODBDataLoader(Tokens(60), token_budget=300, buffer_size=16)
    ended, all_ids = loader.groups(), []
    for group in ended:
        all_ids += sample_ids(group)
    closed = loader.groups()
    next(closed)
    closed.close()
    for _ in loader.groups():
        break
    assert sorted(i for group in read_groups(loader) for i in group) == sorted(all_ids)
    assert next(ended, None) is next(closed, None) is None


@pytest.mark.parametrize("state", [None, [], "x"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"A state must be what `state_dict` gave, a dict, but is (NoneType|list|str)"):
        odb.ODBDataLoader(Tokens(4), token_budget=9).load_state_dict(state)
    with pytest.raises(ValueError, match=r"A state must be what `state_dict` gave, a dict, but is (NoneType|list|str)"):
        ResumePoint.from_dict(state)
    with pytest.raises(ValueError, match=r"A state must have \['loader', 'peaks'\], but has \['step', 'version'\]"):
        ResumePoint.from_dict({"version": 1, "step": 3})
