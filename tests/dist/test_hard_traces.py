"""The handed hard cases that need ranks: each goes through the loader, the plan and the model as its case says."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.distributed as dist

import orch
from orch import odb
from orch.comm.gather import gather_ragged
from orch.comm.topology import Topology
from orch.config import BalanceConfig, StageConfig
from orch.lengths import ItemLengths, StepLengths, merge_lengths, pack_lengths
from orch.metrics import step_metrics
from orch.plan import plan_step
from tests.omni import largest_error, make_sample, reference_gradients, small_model
from tests.ranks import run_ranks


def rows_of(orch_data, case):
    (folder,) = (orch_data / "hard").glob(f"{case}_*")
    lines = (folder / "trace.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line], json.loads((folder / "case.json").read_text())


def num_audio_tokens(frames):
    return ((frames - 1) // 2 - 1) // 2 + 1 if frames >= 3 else 0


def length_of(row):
    """Tokens in the LLM."""
    media = sum(t * h * w for t, h, w in row["images"]) // 4 + sum(map(num_audio_tokens, row["audio_frames"]))
    return row["text_tokens"] + media


class Tokens:
    """A dataset of samples that are tokens alone, as long as the rows of a trace."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = torch.full((length_of(self.rows[index]),), 20)
        return {"id": self.rows[index]["id"], "input_ids": ids, "labels": ids}


def groups_of_ranks(rows, num_ranks, **options):
    """By rank, the lengths by id of each of its groups."""

    def run():
        loader = odb.ODBDataLoader(Tokens(rows), **options)
        return [{s["id"]: len(s["input_ids"]) for s in group} for group in loader.groups()]

    return run_ranks(run, num_ranks)


def check_dealt_once(rows, ranks):
    """Each sample once over all ranks; as many micro-steps on each; none in which no rank has a sample."""
    ids = [name for groups in ranks for group in groups for name in group]
    assert sorted(ids) == sorted(row["id"] for row in rows)
    assert len({len(groups) for groups in ranks}) == 1
    assert all(any(groups) for groups in zip(*ranks, strict=True))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_27_samples_over_the_budget_go_alone(orch_data, layout, num_ranks):
    rows, case = rows_of(orch_data, 27)
    budget = case["observed"]["budget_to_try"]
    ranks = groups_of_ranks(rows, num_ranks, token_budget=budget, layout=layout)
    check_dealt_once(rows, ranks)
    over = {row["id"] for row in rows if length_of(row) > budget}
    assert over == {"o0", "o1", "o2"}
    for group in (group for groups in ranks for group in groups if group):
        tokens = sum(group.values()) if layout == "packed" else len(group) * max(group.values())
        assert tokens <= budget or (len(group) == 1 and set(group) <= over)


def test_27_samples_over_the_budget_are_trained_and_raise_no_rank_above_the_largest(orch_data):
    """At a 32nd of the lengths, through exchange, collators and model."""
    rows, case = rows_of(orch_data, 27)
    budget = case["observed"]["budget_to_try"] // 32

    def run():
        model = small_model(torch.float32)
        samples = [_scaled(model.config, index, row, 32) for index, row in enumerate(rows)]
        return train_all(model, samples, token_budget=budget)

    results = run_ranks(run, 4)
    assert sorted(name for ids, *_ in results for name in ids) == [f"s{i:02}" for i in range(len(rows))]
    for _, losses, largest, expected in results:
        assert all(map(math.isfinite, losses))
        assert expected > budget
        for before, after in largest.values():
            assert 0 < after <= before
        assert largest["llm"][0] == expected


def _scaled(config, index, row, factor):
    """A sample of the tiny model, its text, pictures and recordings shorter by `factor`."""
    grids = [(h // 4, 2 * (4 * w // factor // 2)) for _, h, w in row["images"]]
    frames = [max(3, frames // factor) for frames in row["audio_frames"]]
    num_text = max(8, row["text_tokens"] // factor)
    return make_sample(config, index, num_text, grids, frames) | {"id": f"s{index:02}"}


def train_all(model, samples, **options):
    """Ids trained on this rank, losses, largest batches before and after by stage, and the longest sample."""
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    loader = odb.ODBDataLoader(samples, layout="packed", **options)
    batches = orch.orchestrate(loader, ddp, topology=Topology(dist.get_world_size(), 2), timeout_s=60)
    ids, losses = [], []
    for batch in batches:
        loss = ddp(**batch).loss
        loss.backward()
        losses.append(loss.item())
        ids += [sample["id"] for sample in batch["orch"].samples]
    stages = batches.report.stages()
    largest = {name: (s["largest_batch_before"], s["largest_batch_after"]) for name, s in stages.items()}
    return ids, losses, largest, max(len(sample["input_ids"]) for sample in samples)


def rows_28(orch_data, num_samples):
    """The trace's samples, and more like them."""
    rows, _ = rows_of(orch_data, 28)
    more = [dict(rows[0], id=f"a{i}", text_tokens=50 + 400 * i) for i in range(len(rows), num_samples)]
    return rows + more


@pytest.mark.parametrize("num_samples", [5, 17])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_28_fewer_samples_than_ranks(orch_data, num_samples, layout):
    rows = rows_28(orch_data, num_samples)
    ranks = groups_of_ranks(rows, 8, token_budget=2048, layout=layout)
    check_dealt_once(rows, ranks)
    if num_samples == 5:
        assert [len(groups[0]) for groups in ranks] == [1] * 5 + [0] * 3


@pytest.mark.parametrize("num_samples", [5, 17])
def test_28_fewer_samples_than_ranks_are_trained_once(orch_data, num_samples):
    rows = rows_28(orch_data, num_samples)

    def run():
        model = small_model(torch.float32)
        samples = [_scaled(model.config, index, row, 50) for index, row in enumerate(rows)]
        return train_all(model, samples, token_budget=40)

    results = run_ranks(run, 8, timeout_s=120)
    assert sorted(name for ids, *_ in results for name in ids) == [f"s{i:02}" for i in range(num_samples)]
    assert len({len(losses) for _, losses, *_ in results}) == 1
    assert all(math.isfinite(loss) for _, losses, *_ in results for loss in losses)


@pytest.mark.parametrize("balance", ["none", "post"])
def test_29_a_modality_missing_on_ranks_keeps_the_gradients(orch_data, balance):
    """Rank 0 draws texts, rank 1 texts with a picture, rank 2 texts with a recording.

    The model's RMSNorm computes in float32 whatever its dtype; a scale of W / T with W = 3 rounds there.
    """
    rows, _ = rows_of(orch_data, 29)

    def run():
        model = small_model()
        samples = [_scaled(model.config, index, row, 16) for index, row in enumerate(rows)]
        assert {len(samples[i].get("image_grid_thw", ())) for i in range(1, 24, 3)} == {1}
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        loader = odb.ODBDataLoader(samples, token_budget=10**6, layout="packed", grouping="local")
        encoded = {}
        for step, batch in enumerate(orch.orchestrate(loader, ddp, balance=balance, timeout_s=60)):
            assert step == 0
            encoded = {name: stage.num_rows for name, stage in batch["orch"].stages.items()}
            ddp(**batch).loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(grad is not None for grad in gradients.values())
        return encoded, largest_error(gradients, reference_gradients(samples)[1])

    results = run_ranks(run, 3, timeout_s=120)
    assert max(error for _, error in results) < 1e-6
    media = [(encoded["vision"] > 0, encoded["audio"] > 0) for encoded, _ in results]
    assert media == ([(False, False), (True, False), (False, True)] if balance == "none" else [(True, True)] * 3)


@pytest.mark.parametrize("mode", ["none", "pre", "llm", "post"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_31_entries_of_zero_cost_are_planned_without_nan(orch_data, mode, layout):
    rows, _ = rows_of(orch_data, 31)

    def run():
        rank, topology = dist.get_rank(), Topology(8, 4)
        vectors = gather_ragged(pack_lengths(_lengths(rows[rank : rank + 1])))
        lengths = merge_lengths(vectors, ["vision", "audio"])
        stages = {"vision": StageConfig(), "audio": StageConfig()}
        config = BalanceConfig(mode=mode, llm=StageConfig(layout=layout), stages=stages)
        plan = plan_step(lengths, topology, config)
        metrics = step_metrics(lengths, plan, topology, config)
        return plan.fingerprint(), lengths.num_samples, _numbers(asdict(metrics))

    with np.errstate(all="raise"):
        results = run_ranks(run, 8)
    assert len({fingerprint for fingerprint, *_ in results}) == 1
    for _, num_samples, numbers in results:
        assert num_samples == 5
        assert len(numbers) > 10
        assert all(map(math.isfinite, numbers))


def _lengths(rows):
    """The lengths of one rank's rows; recordings of any number of frames are items."""
    stages = {}
    for name, key, cost in (("vision", "images", math.prod), ("audio", "audio_frames", int)):
        owners = [i for i, row in enumerate(rows) for _ in row[key]]
        lengths = np.array([cost(item) for row in rows for item in row[key]], dtype=np.int64)
        num_rows = lengths // 4 if name == "vision" else np.array([num_audio_tokens(n) for n in lengths], np.int64)
        stages[name] = ItemLengths(np.array(owners, np.int64), lengths, num_rows, lengths * 16)
    llm = np.array([length_of(row) for row in rows], dtype=np.int64)
    zeros = np.zeros(len(rows), dtype=np.int64)
    return StepLengths(zeros, zeros, llm, llm * 8, llm // 2, 1, stages)


def _numbers(value):
    """All numbers in nested dicts."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_31_tiny_entries_are_trained_and_an_empty_one_is_skipped_with_its_reason(orch_data, num_ranks):
    """A label of one token alone trains nothing; recordings without a token were refused before (case 22)."""
    rows, _ = rows_of(orch_data, 31)
    empty, *tiny = rows
    assert length_of(empty) == 0

    def run():
        model = small_model(torch.float32)
        samples = [_tiny(model.config, index, row) for index, row in enumerate(rows)]
        ids, losses, *_ = train_all(model, samples, token_budget=64)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        loader = odb.ODBDataLoader(Tokens(rows), token_budget=64)
        names = [sample["id"] for group in loader.groups() for sample in group]
        return ids, losses, names, loader.skipped

    results = run_ranks(run, num_ranks, timeout_s=120)
    assert sorted(name for ids, *_ in results for name in ids) == [row["id"] for row in tiny]
    assert sorted(name for *_, names, _ in results for name in names) == [row["id"] for row in tiny]
    assert len({len(losses) for _, losses, *_ in results}) == 1
    assert all(math.isfinite(loss) for _, losses, *_ in results for loss in losses)
    assert [entry for *_, skipped in results for entry in skipped] == [(0, "its length is 0")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_length_0_alone_give_an_epoch_without_a_step(num_workers):
    """Also where one rank alone has a sample."""
    rows = [{"id": f"e{i}", "text_tokens": 0, "images": [], "audio_frames": []} for i in range(6)]
    rows_with_one = [dict(row, text_tokens=5 * (i == 3)) for i, row in enumerate(rows)]

    def run():
        found = []
        for dataset in (Tokens(rows), Tokens(rows_with_one)):
            loader = odb.ODBDataLoader(dataset, token_budget=64, num_workers=num_workers)
            found.append(([odb.pop_step_info(batch).num_samples for batch in loader], len(loader.skipped)))
            assert len(loader) == len(found[-1][0])
        return found

    (empty, one), (other_empty, other_one) = run_ranks(run, 2)
    assert empty == other_empty == ([], 3)
    assert sorted([one, other_one]) == [([0], 3), ([1], 2)]


def _tiny(config, index, row):
    grids = [(h, w) for _, h, w in row["images"]]
    frames = [frames for frames in row["audio_frames"] if num_audio_tokens(frames)]
    sample = make_sample(config, index, row["text_tokens"], grids, frames, trained=min(1, row["text_tokens"]))
    return sample | {"id": row["id"]}
