"""Loaders that differ between ranks: all ranks are told alike, before a sample is handed out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset

from orch import odb
from orch.comm.topology import Topology
from tests.dist.test_odb import Tokens, check_epoch, read_groups
from tests.ranks import run_ranks

OTHERS: dict[str, Any] = {
    "seed": 5,
    "shuffle": False,
    "grouping": "local",
    "layout": "packed",
    "token_budget": 301,
    "max_samples": 3,
    "mixes_lengths": True,
    "join": False,
    "accumulation_steps": 2,
    "buffer_size": 17,
    "loss_scaling": "none",
    "topology": Topology(3, 1),
}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([Tokens(60)[i] for i in range(60)])


def make_loader(num_samples: int = 60, **options: Any) -> odb.ODBDataLoader:
    given = {"token_budget": 300, "buffer_size": 16, "shuffle": True, "loss_scaling": "exact", **options}
    return odb.ODBDataLoader(Tokens(num_samples), **given)


def refusal_of(batches: Any) -> str:
    """What an iterator says in place of its first item."""
    try:
        next(iter(batches))
    except ValueError as error:
        return str(error)
    return "nothing"


def only_last(value: Any, otherwise: Any) -> Any:
    """Another value on the last rank."""
    return value if dist.get_rank() == dist.get_world_size() - 1 else otherwise


def check_told(refusals: tuple[str, ...], *words: str) -> None:
    """All ranks say the same, and name the setting and who has what."""
    assert len(set(refusals)) == 1, refusals
    start, end = "`ODBDataLoader` must be set up alike on all ranks, but ", " instead."
    assert refusals[0].startswith(start), refusals[0]
    assert refusals[0].endswith(end), refusals[0]
    assert [word for word in words if word not in refusals[0]] == [], refusals[0]


def test_a_setting_that_differs_is_named_on_all_ranks() -> None:
    def work() -> list[str]:
        refusals = []
        for name, other in OTHERS.items():
            refusals.append(refusal_of(make_loader(**only_last({name: other}, {}))))
        refusals.append(refusal_of(make_loader(only_last(59, 60))))
        loader = make_loader()
        refusals.append(refusal_of(only_last(loader.groups, loader.__iter__)()))
        refusals.append(refusal_of(make_loader(seed=dist.get_rank())))
        for num_workers in (1, only_last(2, 1)):
            stream = odb.ODBDataLoader(Stream(), token_budget=300, num_workers=num_workers)
            refusals.append(refusal_of(stream.groups()))
            stream.close()
        return refusals

    names = [*OTHERS, "length", "way", "rank", "alike", "workers"]
    told = dict(zip(names, zip(*run_ranks(work, 3), strict=True), strict=True))
    for name in OTHERS:
        check_told(told[name], f"`{name}` ", " on ranks [0, 1] and ", " on rank 2")
        assert told[name][0].count(" on rank 2") == 1 + (name == "grouping")  # whose nodes do not matter
    check_told(told["seed"], "but `seed` is 0 on ranks [0, 1] and 5 on rank 2 instead.")
    check_told(told["length"], "the number of samples of `dataset` is 60 on ranks [0, 1] and 59 on rank 2")
    check_told(told["way"], "what is iterated is batches on ranks [0, 1] and groups on rank 2", "`grouping`")
    check_told(told["rank"], "`seed` is 0 on rank 0, 1 on rank 1 and 2 on rank 2 instead.")
    assert told["alike"] == ("nothing",) * 3
    check_told(told["workers"], "`num_workers` (each with its share of a stream) is 1 on ranks [0, 1] and 2 on rank 2")


def test_another_epoch_or_resumed_state_is_named_and_the_loader_goes_on() -> None:
    def states() -> list[dict[str, Any]]:
        """The beginning of an epoch, behind two batches of it, and behind the next round's first."""
        loader = make_loader()
        found, batches = [loader.state_dict()], iter(loader)
        while len(found) < 3:
            next(batches)
            if len(found) == 1 or loader.state_dict()["num_rounds"] > found[-1]["num_rounds"]:
                found.append(loader.state_dict())
        loader.close()
        return found

    def work() -> tuple[list[str], list[list[int]]]:
        refusals, (begin, within, later) = [], states()
        loader = make_loader()
        loader.set_epoch(only_last(3, 2))
        refusals.append(refusal_of(loader.groups()))
        for mine, others in ((within, begin), (later, within), ({**later, "epoch": 1}, later), (within, within)):
            loader = make_loader()
            loader.load_state_dict(only_last(mine, others))
            refusals.append(refusal_of(loader))
            loader.close()
        loader.set_epoch(4)
        return refusals, read_groups(loader)

    ranks = run_ranks(work, 2)
    epoch, alone, rounds, other, alike = zip(*[refusals for refusals, _ in ranks], strict=True)
    check_told(epoch, "but the epoch (`set_epoch`, `load_state_dict`) is 2 on rank 0 and 3 on rank 1 instead.")
    check_told(alone, "the number of rounds behind the loaded state is 0 on rank 0 and 1 on rank 1")
    check_told(rounds, "the number of rounds behind the loaded state is 1 on rank 0 and 2 on rank 1")
    check_told(other, "but the epoch (`set_epoch`, `load_state_dict`) is 0 on rank 0 and 1 on rank 1 instead.")
    assert alike == ("nothing",) * 2
    check_epoch([groups for _, groups in ranks], 60)


@pytest.mark.parametrize("grouping", ["global", "local"])
def test_samplers_of_ranks_may_differ(grouping: Any) -> None:
    """In length too, and one rank by itself is compared with nobody."""

    def work() -> list[list[int]]:
        alone = make_loader(rank=0, world_size=1, seed=dist.get_rank())
        assert sorted(i for group in read_groups(alone) for i in group) == list(range(60))
        mine = range(dist.get_rank() * 40, 40 + dist.get_rank() * 20)
        loader = odb.ODBDataLoader(Tokens(60), token_budget=300, sampler=mine, grouping=grouping)
        check_sampler(odb.ODBDataLoader(Tokens(60), token_budget=300, sampler=DistributedSampler(Tokens(60))))
        return read_groups(loader)

    def check_sampler(loader: odb.ODBDataLoader) -> None:
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert sum(map(len, loader.groups())) == 30

    check_epoch(run_ranks(work, 2), 60)


def test_a_stream_of_one_rank_only_is_named() -> None:
    def work() -> str:
        options: dict[str, Any] = {"token_budget": 300}
        return refusal_of(odb.ODBDataLoader(only_last(Stream(), Tokens(60)), **options).groups())

    check_told(
        tuple(run_ranks(work, 2)), "the number of samples of `dataset` is 60 on rank 0 and up to a stream on rank 1"
    )


@pytest.mark.parametrize(
    ("told", "sizes"),
    [([2, 2, 1], (2, 1)), ([1, 2, 2], (1, 2)), ([2, 2, 2], (2, 1)), ([3, 3, 3], (3,)), ([2, 1, 2], (3,)), ([0, 0, 0], (3,))],
)
def test_ranks_of_uneven_nodes_agree_on_them(told, sizes):
    def run():
        os.environ["LOCAL_WORLD_SIZE"] = str(told[dist.get_rank()])
        return odb.ODBDataLoader([{"length": 3}] * 9, token_budget=9, length_fn=len).topology

    assert run_ranks(run, 3) == [Topology.of_node_sizes(sizes)] * 3
