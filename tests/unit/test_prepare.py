"""Tensors of a batch on their way to the device."""

import numpy as np
import torch

from orch.prepare import pinned_for, to_device

BATCH = {"input_ids": torch.arange(3), "nested": [torch.ones(2), ("text", torch.zeros(1))], "number": 3, "none": None}


def test_a_batch_for_a_gpu_is_pinned_as_a_whole(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 10)
    pinned = pinned_for(BATCH, torch.device("cuda"))
    assert pinned["input_ids"].tolist() == [10, 11, 12]
    assert pinned["nested"][0].tolist() == [11, 11]
    assert pinned["nested"][1][0] == "text"
    assert pinned["nested"][1][1].tolist() == [10]
    assert (pinned["number"], pinned["none"]) == (3, None)


def test_a_batch_for_the_cpu_stays_where_it_is():
    assert pinned_for(BATCH, torch.device("cpu")) is BATCH
    moved = to_device(BATCH, torch.device("cpu"))
    assert moved["input_ids"] is BATCH["input_ids"]
    assert np.shares_memory(moved["nested"][0].numpy(), BATCH["nested"][0].numpy())
