"""Scripts of the released package run with one changed import."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from orch import odb


class Tokens(Dataset):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((5 + index % 40,), index), "labels": torch.ones(5 + index % 40)}


def ids_of(batches: Any) -> list[list[int]]:
    ids = []
    for batch in batches:
        odb.pop_step_info(batch, loss_scaling="exact")
        ids.append(batch["input_ids"][:, 0].tolist())
    return ids


def flat(ids: list[list[int]]) -> Counter[int]:
    return Counter(i for batch in ids for i in batch)


@pytest.mark.parametrize(
    "arguments",
    [
        {"token_budget": 200},
        {"max_input_length": 200, "join_mode": True, "no_warmup": True, "no_sync": False, "version": 5},
        {"config": odb.ODBConfig(token_budget=200, loss_scaling="token", buffer_size=32)},
        {"token_budget": 200, "loss_scaling": True, "loss_scaling_approx": False, "max_patches": 0},
    ],
)
def test_the_keywords_of_the_released_loader(arguments: dict[str, Any]) -> None:
    loader = odb.ODBDataLoader(Tokens(), batch_size=1, num_workers=1, prefetch_factor=64, shuffle=True, **arguments)
    assert flat(ids_of(loader)) == Counter(range(90))
    assert loader.token_budget == 200
    assert loader.loss_scaling != "none"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "token_budget"),
        ({"token_budget": 5, "max_input_length": 6}, "max_input_length"),
        ({"token_budget": 5, "config": odb.ODBConfig(6)}, "config"),
        ({"token_budget": 5, "max_patches": 9}, "max_patches"),
    ],
)
def test_keywords_that_disagree(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        odb.ODBDataLoader(Tokens(), **arguments)


@pytest.mark.parametrize("shuffle", [True, False])
def test_apply_takes_over_an_existing_loader(shuffle: bool) -> None:
    dataloader = DataLoader(Tokens(), batch_size=1, shuffle=shuffle)
    handle = odb.apply(dataloader, token_budget=200, loss_scaling="exact", buffer_size=30)
    assert isinstance(dataloader, DataLoader)
    assert (handle.token_budget, handle.join, handle.step_info_key) == (200, True, odb.ODB_STEP_INFO_KEY)
    first, second = ids_of(dataloader), ids_of(dataloader)
    assert flat(first) == flat(second) == Counter(range(90))
    assert len(dataloader) == len(second)
    assert (first != second) == shuffle
    with pytest.raises(ValueError, match="was not applied"):
        odb.apply(dataloader, token_budget=200)


def test_apply_keeps_samplers_and_collate_functions() -> None:
    dataloader = DataLoader(Tokens(), sampler=range(0, 90, 3), collate_fn=lambda samples: {"n": len(samples)})
    odb.apply(dataloader, 200)
    assert sum(batch["n"] for batch in dataloader) == 30
    state = dataloader.state_dict()
    dataloader.load_state_dict(state)


def test_apply_refuses_batches_formed_elsewhere() -> None:
    with pytest.raises(ValueError, match="batch size 1"):
        odb.apply(DataLoader(Tokens(), batch_size=4), 200)
    with pytest.raises(ValueError, match="batch size 1"):
        odb.apply(DataLoader(Tokens(), batch_sampler=[[0, 1], [2]]), 200)


@pytest.mark.parametrize("given", [{"token_buget": 512}, {"token_budget": 512, "shufle": True}])
def test_misspelt_arguments_are_named(given):
    (misspelt,) = set(given) - {"token_budget"}
    with pytest.raises(TypeError, match=misspelt):
        odb.ODBDataLoader([1, 2], **given)
