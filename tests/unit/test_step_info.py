from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from orch import odb
from orch.odb.collate import collate_packed, collate_padded
from orch.odb.measure import default_label_tokens, measured_length
from orch.odb.packing import NotPackableError, pack_samples, unpack_sample
from orch.odb.step_info import GroupCounts, in_steps, put_step_info, resolve_loss_scaling, step_infos


def infos_of(label_tokens: list[list[int]], loss_scaling: str = "exact") -> list[list[odb.ODBStepInfo]]:
    """Infos of each rank for `label_tokens[rank][micro_step]`."""
    local = [[GroupCounts(int(n > 0), n, n) for n in row] for row in label_tokens]
    total = [GroupCounts.total(column) for column in zip(*local, strict=True)]
    return [step_infos(row, total, loss_scaling=loss_scaling, num_ranks=len(local)) for row in local]


def test_scales_average_over_ranks_to_the_mean_over_all_label_tokens() -> None:
    label_tokens = [[3, 5], [4, 0]]
    losses = np.array([[1.0, 2.0], [7.0, 9.0]])
    infos = infos_of(label_tokens)
    scaled = sum(losses[r][m] * infos[r][m].loss_scale for r in range(2) for m in range(2)) / 2
    assert scaled == pytest.approx((3 * 1.0 + 5 * 2.0 + 4 * 7.0) / 12)
    assert infos[1][1].loss_scale == 0
    assert infos[1][1].is_idle
    assert [info.is_last_micro_step for info in infos[0]] == [False, True]
    assert infos[0][0].all_samples_this_step == 2
    assert infos[0][1].all_samples_this_step == 1


def test_without_scaling_only_idle_batches_have_another_scale_than_one() -> None:
    assert [info.loss_scale for info in infos_of([[3, 0]], "none")[0]] == [1.0, 0.0]


def test_popping_removes_every_key_and_needs_one() -> None:
    batch: dict[str, Any] = {"input_ids": torch.ones(2, 3)}
    info = infos_of([[6], [2]])[0][0]
    put_step_info(batch, info)
    assert {odb.TOTAL_BATCH_SIZE_KEY, odb.LOCAL_BATCH_SIZE_KEY, odb.TOTAL_TOKENS_KEY, odb.LOCAL_TOKENS_KEY} < set(batch)
    assert odb.pop_step_info(batch) == info
    assert set(batch) == {"input_ids"}
    with pytest.raises(KeyError, match="odb_step_info"):
        odb.pop_step_info(batch)


def test_flat_keys_alone_say_as_much() -> None:
    batch: dict[str, Any] = {}
    put_step_info(batch, infos_of([[6], [2]])[0][0])
    del batch[odb.ODB_STEP_INFO_KEY]
    info = odb.pop_step_info(batch, loss_scaling="exact", world_size=2)
    assert info.loss_scale == pytest.approx(6 / 8 * 2)


def test_a_mode_or_world_size_given_to_pop_decides() -> None:
    def popped(**arguments: Any) -> float:
        batch: dict[str, Any] = {}
        put_step_info(batch, infos_of([[6], [2]])[0][0])
        return float(odb.pop_step_info(batch, **arguments).loss_scale)

    assert popped() == pytest.approx(1.5)
    assert popped(loss_scaling="none") == 1
    assert popped(world_size=1) == pytest.approx(0.75)
    assert popped(accumulation_divisor=4) == pytest.approx(6)


def test_scale_loss_takes_a_batch_or_numbers() -> None:
    batch: dict[str, Any] = {}
    put_step_info(batch, infos_of([[6], [2]])[0][0])
    assert odb.scale_loss(torch.tensor(2.0), batch).item() == pytest.approx(3)
    assert odb.ODB_STEP_INFO_KEY in batch
    assert odb.scale_loss(torch.tensor(2.0), 3, 12, 2).item() == pytest.approx(1)
    with pytest.raises(ValueError, match="total_batch_size"):
        odb.scale_loss(torch.tensor(2.0), 3)


def test_mappings_other_than_dict_carry_the_info_and_lists_do_not() -> None:
    batch: UserDict[str, Any] = UserDict(input_ids=1)
    put_step_info(batch, infos_of([[6]])[0][0])
    assert odb.pop_step_info(batch).num_label_tokens == 6
    with pytest.raises(TypeError, match="must return a dict"):
        put_step_info([1], infos_of([[6]])[0][0])


def test_a_batch_encoding_of_transformers_carries_the_info() -> None:
    transformers = pytest.importorskip("transformers")
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (5, 9, 7)]
    loader = odb.ODBDataLoader(
        samples, token_budget=20, collate_fn=lambda group: transformers.BatchEncoding(collate_padded(group))
    )
    seen = 0
    for batch in loader:
        assert type(batch) is transformers.BatchEncoding
        assert odb.scale_loss(torch.tensor(2.0), batch).item() == pytest.approx(2)
        batch = batch.to("cpu")
        info = odb.pop_step_info(batch)
        seen += info.num_samples
        assert info.num_label_tokens == int((batch["labels"][:, 1:] != -100).sum())
        assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert seen == 3


def test_keys_that_collate_drops_are_put_back_and_those_dropped_later_are_missed() -> None:
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n), "odb_step_info": n} for n in (5, 9)]
    loader = odb.ODBDataLoader(
        samples, token_budget=20, collate_fn=lambda group: {"input_ids": collate_padded(group)["input_ids"]}
    )
    batch = next(iter(loader))
    assert odb.scale_loss(torch.tensor(2.0), dict(batch)).item() == pytest.approx(2)
    only_inputs = {key: value for key, value in batch.items() if key == "input_ids"}
    for take in (odb.pop_step_info, lambda batch: odb.scale_loss(torch.tensor(2.0), batch)):
        with pytest.raises(KeyError, match="must carry 'odb_step_info'"):
            take(dict(only_inputs))
    one_missing = {key: value for key, value in batch.items() if key not in ("odb_step_info", odb.LOCAL_TOKENS_KEY)}
    with pytest.raises(KeyError, match="must carry 'odb_step_info'"):
        odb.pop_step_info(one_missing)


@pytest.mark.parametrize(
    ("word", "mode"), [(None, "none"), (True, "exact"), ("token-exact", "exact"), ("Approx", "approx")]
)
def test_words_of_older_scripts(word: Any, mode: str) -> None:
    assert resolve_loss_scaling(word) == mode
    with pytest.raises(ValueError, match="loss_scaling"):
        resolve_loss_scaling("sum")


def test_a_short_last_step_is_a_step() -> None:
    assert list(in_steps(range(5), 2)) == [[0, 1], [2, 3], [4]]


def test_label_tokens_leave_out_the_masked_and_the_first() -> None:
    assert default_label_tokens({"labels": torch.tensor([5, -100, 6, 7])}) == 2
    assert default_label_tokens({"labels": [-100, -100, 6]}) == 1
    assert default_label_tokens({"labels": np.array(3)}) == 1
    assert default_label_tokens({"input_ids": [1, 2]}) is None


@pytest.mark.parametrize("length", [0, -1, 2.5, None, True])
def test_a_length_must_be_a_positive_whole_number(length: Any) -> None:
    with pytest.raises(ValueError, match="length of a sample"):
        measured_length({}, lambda sample: length)
    assert measured_length({}, lambda sample: torch.tensor(4)) == 4


def test_packed_rows_do_not_leak_labels() -> None:
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n), "name": f"n{n}"} for n in (2, 3)]
    batch = collate_packed(samples)
    assert batch["input_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 1, -100, 1, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens"].tolist() == [0, 2, 5]
    assert batch["name"] == ["n2", "n3"]
    assert samples[1]["labels"][0] == 0


def test_padded_rows_mask_what_is_padded() -> None:
    batch = collate_padded([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [[1, 2], [3, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_samples_survive_packing() -> None:
    samples = [
        {"x": torch.arange(3), "y": np.ones((2, 0), dtype=np.float32), "s": "é", "n": 7, "f": float("inf"), "b": True},
        ({"deep": [torch.ones(2, dtype=torch.bfloat16), None]}, np.float64(0.5)),
    ]
    data, sizes = pack_samples(samples)
    assert sum(sizes) == len(data)
    first, second = unpack_sample(data[: sizes[0]]), unpack_sample(data[sizes[0] :])
    assert torch.equal(first["x"], samples[0]["x"])
    assert (first["y"].shape, first["y"].dtype) == ((2, 0), np.float32)
    assert [first[key] for key in "snfb"] == ["é", 7, float("inf"), True]
    assert isinstance(second, tuple)
    assert second[0]["deep"][0].dtype == torch.bfloat16
    assert second[0]["deep"][1] is None
    assert second[1] == 0.5
    with pytest.raises(NotPackableError, match=r"`p` must be .* but is object"):
        pack_samples([{"p": object()}])
