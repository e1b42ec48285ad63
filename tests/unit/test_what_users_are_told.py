"""Names that `help` lists, and what messages and warnings say of arguments, loaders, samples and ranks."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import orch
from orch import odb
from orch.comm.heartbeats import Beat
from orch.comm.lost_peers import PeerWatch, peer_lost_error
from orch.micro_step import describe_samples
from orch.unused_keys import UnusedKeys
from tests.omni import make_sample, small_model

SAMPLE = {"input_ids": torch.arange(4), "labels": torch.arange(4)}


@pytest.mark.parametrize("module", [orch, odb], ids=["orch", "odb"])
def test_help_begins_with_the_public_names(module):
    listed = re.findall(r"^    (\w+)  +\S", module.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted({*module.__all__} - {"__version__"})
    assert {*listed} <= {*dir(module)}
    assert all(hasattr(module, name) for name in listed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: orch.balance([3, 4], [0, 1], 2), "`topology` must be an `orch.Topology`, such as .* but is 2"),
        (lambda step: orch.lower_bounds([3, 4], [0, 1], 2), "`topology` must be an `orch.Topology`"),
        (lambda step: orch.plan_step(step, 2), "`topology` must be an `orch.Topology`"),
        (lambda step: orch.plan_step(step, orch.Topology(2), "pre"), "`config` must be an `orch.BalanceConfig`.*'pre'"),
        (lambda step: orch.plan_step([3, 4], orch.Topology(2)), "`lengths` must be an `orch.StepLengths`"),
    ],
)
def test_an_argument_of_another_class_is_refused_by_name(call, message):
    step = orch.StepLengths(
        home=[0, 1], micro_step=[0, 0], llm_length=[3, 4], num_bytes=[1, 1], num_label_tokens=[2, 2]
    )
    with pytest.raises(ValueError, match=message):
        call(step)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("tokn_budget", "'token_budget'"), ("num_worker", "'num_workers'"), ("xyz", None)]
)
def test_a_misspelt_argument_is_told_the_right_one(wrong, meant):
    with pytest.raises(TypeError, match=wrong) as caught:
        odb.ODBDataLoader([SAMPLE], **{wrong: 1})
    assert str(caught.value).endswith(f" Did you mean {meant}?" if meant else "have no arguments ['xyz'].")


class Corrupt(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1:
            raise OSError("no picture")
        return SAMPLE


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Corrupt(), r"Sample 1 on rank 0: no picture \(raise `odb.SkipSample` in the data set to leave it out\)"),
        ((Corrupt()[i] for i in range(3)), r"Sample 1 of the stream .*\(give None in its place to leave it out\)"),
    ],
    ids=["map-style", "stream"],
)
def test_a_corrupt_sample_is_named_with_what_to_do(dataset, words):
    with pytest.raises(OSError, match=words):
        list(odb.ODBDataLoader(dataset, token_budget=8).groups())


def test_collated_batches_are_told_the_way():
    loader = orch.orchestrate(DataLoader([SAMPLE] * 4, batch_size=2), small_model(torch.float32))
    with pytest.raises(RuntimeError, match="use `collate_fn=list`"):
        next(iter(loader))


def test_a_collate_function_that_does_not_run_is_told():
    model, own = small_model(torch.float32), odb.ODBDataLoader([SAMPLE], token_budget=8, collate_fn=dict)
    with pytest.warns(UserWarning, match="`collate_fn` of the loader does not run"):
        orch.orchestrate(own, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orch.orchestrate(own, model, collate_fn=lambda samples, parts: {})
        orch.orchestrate(DataLoader([SAMPLE], collate_fn=list), model)


def test_keys_that_nothing_takes_are_named_once():
    keys = UnusedKeys(["pixel_values"])
    with pytest.warns(UserWarning, match=r"Keys \['source', 'weight'\] of samples"):
        keys.note([*SAMPLE, "id", "attention_mask", "pixel_values", "weight", "source"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys.note(["weight", "source"])


def test_a_run_names_the_keys_unless_it_collates_by_itself():
    model = small_model(torch.float32)
    samples = [make_sample(model.config, 0, grids=[(4, 4)], frames=[15]) | {"source": "web"}]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = next(iter(orch.orchestrate([samples], model)))
        own = next(iter(orch.orchestrate([samples], model, collate_fn=lambda s, parts: {"source": s[0]["source"]})))
    assert [str(warning.message)[:24] for warning in caught] == ["Keys ['source'] of sampl"]
    assert batch["orch"].samples[0]["source"] == own["source"] == "web"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "no samples"),
        ([{}] * 6, "6 samples (give them an `id`)"),
        ([{"id": "a"}, {}, {"id": 7}], "samples 'a', 7 and 1 more"),
        ([{"id": i} for i in range(10)], "samples 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_samples_are_described_in_few_words(samples, words):
    assert describe_samples(samples) == words


def test_a_rank_that_left_is_not_said_to_be_there():
    watch = PeerWatch(0, 3)
    watch.update([Beat(1, "train", 1.0), Beat(1, "train", 1.0), Beat(1, "end", 1.0, "left")])
    text = str(peer_lost_error("step 3, train", RuntimeError("closed"), watch, 60.0, {}))
    assert "rank 2 left: all must take the same number of batches. What each does:\nranks 0-1: train\nrank 2:" in text
    assert "no rank is missing" not in text
