"""What a training loop may do wrong with a batch is told, and what it may do is left alone."""

import copy
import pickle
import warnings

import own_encoder
import pytest
import torch

import orch
from orch.comm.topology import Topology


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = own_encoder.Captioner()
    orch.stage(model.encoder, "vision", own_encoder.PatchAdapter())
    return model


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def load(model, *sizes_of_samples):
    groups = [[own_encoder.make_sample(sizes)] for sizes in sizes_of_samples]
    return iter(orch.orchestrate(groups, model, topology=Topology(1), prefetch=0))


def without_plan(batch):
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def test_a_batch_with_items_is_not_trained_on_without_its_plan(model):
    batch = next(load(model, [3]))
    with pytest.raises(ValueError, match=r"`orch` must be among .* step 0 has items of the stages \['vision'\]"):
        model(**without_plan(batch))
    with pytest.raises(ValueError, match="pass the whole batch, whose key `orch` carries the plan"):
        model(batch["input_ids"].clone(), labels=batch["labels"])
    model(**batch).loss.backward()


def test_a_batch_without_items_may_be(model):
    model(**without_plan(next(load(model, [])))).loss.backward()


def test_calls_that_are_none_of_the_batch_are_left_alone(model):
    loader = load(model, [3], [2], [4])
    first, other = next(loader), own_encoder.make_sample([])["input_ids"][None]
    model(input_ids=other, labels=other).loss.backward()  # while a batch waits to be trained on
    with torch.no_grad():
        model(**without_plan(first))
    model(**first).loss.backward()
    model(**without_plan(first)).loss.backward()  # once its items were trained on
    next(loader)  # skipped
    model(**next(loader)).loss.backward()


def test_a_model_that_waits_for_a_batch_is_copied_and_saved_as_before(model):
    batch = next(load(model, [3]))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(**batch).loss == model(**batch).loss


def test_a_forward_without_labels_is_told_once_that_its_loss_is_not_exact(model):
    loader = load(model, [3], [2])
    batch = next(loader)
    labels = batch.pop("labels")
    with torch.no_grad():
        model(**batch)
    with pytest.warns(UserWarning, match=r"without the batch's `labels`.* times `batch\['orch'\].loss_scale`"):
        logits = model(**batch).logits
    loss = orch.loss.token_loss_sum(logits, labels) * batch["orch"].loss_scale
    assert loss == model(**batch, labels=labels).loss
    batch = next(loader)
    del batch["labels"]
    model(**batch)


def test_nor_is_it_with_embeddings_of_its_tokens(model):
    batch = next(load(model, [3]))
    embeddings = torch.zeros(*batch["input_ids"].shape, 4)
    with pytest.raises(ValueError, match=r"`orch` must be among .* step 0 has items"):
        model(inputs_embeds=embeddings, labels=batch["labels"])
