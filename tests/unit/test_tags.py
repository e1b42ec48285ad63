"""Ids of the debug mode, on one rank."""

import numpy as np
import pytest
import torch

from orch.comm.layout import Layout, Rearrangement
from orch.tags import TAG_BYTES, MisroutedError, Tags, is_debugging
from orch.wire import ALIGNMENT

ITEM = (1 << 40) + 5  # item 5 of the first stage
MOVE = Rearrangement(Layout(np.array([0, 0, 1]), 2), Layout(np.array([1, 1, 0]), 2))


def tags(rank, num_rows=1):
    return Tags.of(3, "exchange rows", ["vision"], np.array([0, ITEM, 7]), MOVE, rank, num_rows)


def test_what_is_sent_is_what_is_expected():
    sender, receiver = tags(0, np.array([2, 1, 1])), tags(1, np.array([2, 1, 1]))
    assert receiver.senders.tolist() == [0, 0, 0]
    receiver.check(sender.outgoing())
    tags(0).check(tags(1).outgoing())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([[3, ITEM], [3, 0]], r"to send sample 0, but item 5 of stage vision of step 3 came instead \(2 of 2 ids"),
        ([[3, 0], [4, ITEM]], r"to send item 5 of stage vision, but item 5 of stage vision of step 4 came instead"),
        ([[3, 0], [3, -7]], r"but something unknown \(-7\) of step 3 came instead \(1 of 2 ids are wrong\)"),
    ],
)
def test_a_wrong_id_is_named(found, message):
    with pytest.raises(MisroutedError, match=rf"^step 3, exchange rows: rank 0 was .*{message}"):
        tags(1).check(torch.tensor(found))


def test_parcels_carry_their_tag_behind_them():
    parcels = [torch.arange(size, dtype=torch.uint8) for size in (16, 48)]
    tagged = tags(0).attach(parcels)
    assert [len(parcel) for parcel in tagged] == [16 + TAG_BYTES, 48 + TAG_BYTES]
    assert TAG_BYTES % ALIGNMENT == 0
    assert all(torch.equal(a, b) for a, b in zip(tags(1).detach(tagged), parcels, strict=True))
    assert Tags.of(3, "", [], np.array([1]), Rearrangement(*[Layout(np.array([0]), 2)] * 2), 1).attach([]) == []


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_asks_for_it(value, expected, monkeypatch):
    monkeypatch.delenv("ORCH_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("ORCH_DEBUG", value)
    assert is_debugging() == expected
