"""Groups over all ranks: samples travel to the rank of their group; a loader goes on where it was interrupted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orch import odb
from tests.dist.test_odb import Tokens, check_epoch, read_groups, sample_ids
from tests.ranks import run_ranks


class Rich(Tokens):
    """Samples of every kind of value that may travel."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            **super().__getitem__(index),
            "pixels": np.full((index % 3, 4), index, dtype=np.float32),
            "name": f"sample {index} é",
            "half": torch.full((2, 2), index, dtype=torch.bfloat16),
            "nested": {"list": [index, None, 0.5, torch.tensor(index)], "pair": (True, "x")},
        }


def collect(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"samples": samples}


def describe(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    return type(value)(map(describe, value)) if isinstance(value, (list, tuple)) else value


def read_batches(loader: odb.ODBDataLoader, num_batches: int | None = None) -> list[list[int]]:
    groups = []
    for batch in loader:
        info = odb.pop_step_info(batch)
        groups.append([] if info.is_idle else sample_ids(batch["samples"]))
        if len(groups) == num_batches:
            break
    return groups


def test_samples_arrive_as_they_were() -> None:
    cases = [("packed", 0), ("packed", 2), ("padded", 0), ("padded", 2)]

    def read(layout: str, num_workers: int) -> list[tuple[int, bool, Any]]:
        loader = odb.ODBDataLoader(
            Rich(200),
            token_budget=500,
            layout=layout,
            shuffle=True,
            buffer_size=48,
            collate_fn=collect,
            num_workers=num_workers,
        )
        mine = set(loader.order.indices(0))
        samples = [sample for batch in loader for sample in batch["samples"]]
        indices = [int(sample["input_ids"][0]) for sample in samples]
        return [(i, i in mine, describe(sample)) for i, sample in zip(indices, samples, strict=True)]

    for results in zip(*run_ranks(lambda: [read(*case) for case in cases], 3), strict=True):
        seen = [entry for result in results for entry in result]
        assert Counter(index for index, _, _ in seen) == Counter(range(200))
        assert not all(at_home for _, at_home, _ in seen)
        assert all(content == describe(Rich(200)[index]) for index, _, content in seen)


def test_packed_groups_leave_most_samples_at_home() -> None:
    def work() -> tuple[int, int]:
        loader = odb.ODBDataLoader(
            Tokens(2000), token_budget=1000, layout="packed", shuffle=True, buffer_size=100, collate_fn=collect
        )
        mine = set(loader.order.indices(0))
        seen = [i for group in read_batches(loader) for i in group]
        return len(seen), sum(i in mine for i in seen)

    results = run_ranks(work, 4)
    assert sum(total for total, _ in results) == 2000
    assert sum(home for _, home in results) > 0.75 * 2000


def test_the_samples_of_an_orchestrated_step_stay_at_home() -> None:
    cases = [(layout, num_workers) for layout in ("packed", "padded") for num_workers in (0, 2)]

    def work(layout: str, num_workers: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        options = {"layout": layout, "num_workers": num_workers, "collate_fn": collect}
        loader = odb.ODBDataLoader(Rich(300), token_budget=500, shuffle=True, buffer_size=40, **options)
        mine = set(loader.order.indices(0))
        moved = read_batches(loader)
        loader.set_epoch(0)
        groups = list(loader.groups("global"))
        assert {i for group in groups for i in sample_ids(group)} <= mine
        return [sample_ids(group) for group in groups], [list(group.ranks) for group in groups], moved

    for results in zip(*run_ranks(lambda: [work(*case) for case in cases], 3), strict=True):
        check_epoch([groups for groups, _, _ in results], 300)
        for rank, (_, _, moved) in enumerate(results):
            for step, group in enumerate(moved):
                pairs = [pair for ids, ranks, _ in results for pair in zip(ids[step], ranks[step], strict=True)]
                assert sorted(i for i, group_rank in pairs if group_rank == rank) == sorted(group)


def test_what_cannot_travel_is_named() -> None:
    class Opaque(Tokens):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "picture": object()}

    def work() -> str:
        loader = odb.ODBDataLoader(Opaque(20), token_budget=500, collate_fn=collect)
        with pytest.raises(Exception, match="cannot travel") as caught:
            next(iter(loader))
        alone = odb.ODBDataLoader(Opaque(20), token_budget=500, collate_fn=collect, grouping="local")
        assert sum(len(batch["samples"]) for batch in alone) == 10
        return str(caught.value)

    messages = run_ranks(work, 2)
    assert "`picture` must be a tensor" in messages[0]
    assert "object" in messages[0]


def make(grouping: str, shuffle: bool = True) -> odb.ODBDataLoader:
    return odb.ODBDataLoader(
        Tokens(150), token_budget=400, buffer_size=24, shuffle=shuffle, seed=5, grouping=grouping, collate_fn=collect
    )


@pytest.mark.parametrize("grouping", ["local", "global"])
def test_an_interrupted_epoch_goes_on_exactly(grouping: str) -> None:
    def work() -> None:
        whole, again = make(grouping), make(grouping)
        first_epoch = read_batches(whole)
        second_epoch = read_batches(whole)
        for stop_at in range(len(first_epoch)):
            broken, resumed = make(grouping), again
            before = read_batches(broken, stop_at) if stop_at else []
            resumed.load_state_dict(broken.state_dict())
            assert resumed.state_dict() == broken.state_dict()
            broken.close()
            assert before + read_batches(resumed) == first_epoch, stop_at
            if stop_at % 4 == 0:
                assert read_batches(resumed) == second_epoch

    run_ranks(work, 2)


@pytest.mark.parametrize("grouping", ["local", "global"])
def test_an_epoch_survives_any_number_of_interruptions(grouping: str) -> None:
    def work() -> list[list[int]]:
        expected, groups, state = read_batches(make(grouping)), [], None
        while len(groups) < len(expected):
            loader = make(grouping)
            if state is not None:
                loader.load_state_dict(state)
            groups += read_batches(loader, 2)
            state = loader.state_dict()
            loader.close()
        assert groups == expected
        return groups

    check_epoch(run_ranks(work, 3), 150)


def test_a_state_is_refused_elsewhere() -> None:
    def load(state: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            make("global").load_state_dict(state)

    def save_and_load() -> dict[str, Any]:
        loader = make("global")
        read_batches(loader, 3)
        state = loader.state_dict()
        loader.close()
        load({**state, "rank": 1 - state["rank"]}, "`rank` of a saved state")
        load({**state, "num_samples": 7}, "`num_samples` of a saved state")
        return state

    states = run_ranks(save_and_load, 2)
    run_ranks(lambda: load(states[dist.get_rank() % 2], "`num_ranks` of a saved state must be 3"), 3)


def test_a_state_is_refused_for_a_stream() -> None:
    loader = odb.ODBDataLoader(iter([]), token_budget=10)
    with pytest.raises(TypeError, match="map-style"):
        loader.state_dict()


def test_all_groups_are_read_with_local_grouping_too() -> None:
    def work() -> list[list[int]]:
        return read_groups(odb.ODBDataLoader(Tokens(90), token_budget=300, grouping="local"))

    check_epoch(run_ranks(work, 2), 90)
