"""An encoder that was left plain: samples with items for it are refused by name, and all others train."""

import copy
import re

import pytest
import torch

import orch
from orch.comm.gather import RankFailedError
from orch.comm.topology import Topology
from orch.encoders.backbone import collator_for
from tests.models import FAMILIES, make_sample, plain_model
from tests.omni import make_sample as make_omni_sample
from tests.omni import small_model

pytestmark = pytest.mark.filterwarnings("ignore:No encoder of the model is a stage", "ignore:Keys .* of samples reach")

TOWERS = {"vision": "visual", "audio": "audio_tower"}


def load(model, samples, **choices):
    return orch.orchestrate([[sample] for sample in samples], model, topology=Topology(1), prefetch=0, **choices)


def model_of_one_stage(name):
    model = small_model(torch.float32, staged=False)
    orch.stage(getattr(model.model, TOWERS[name]), name)
    return model


@pytest.mark.parametrize(
    ("family", "left_out"), [(name, stage) for name in FAMILIES for stage in FAMILIES[name].towers]
)
def test_what_is_for_an_encoder_that_is_no_stage_is_refused(family, left_out):
    model, towers = copy.deepcopy(plain_model(family)), FAMILIES[family].towers
    for stage, path in towers.items():
        if stage != left_out:
            orch.stage(model.get_submodule(path), stage)
    sample = make_sample(family, 0, ["audio" if left_out == "audio" else "image"])
    kind, path = type(model.get_submodule(towers[left_out])).__name__, towers[left_out]
    line = f'but `model.{path}` ({kind}) is no stage instead: call `orch.stage(model.{path}, "{left_out}")`'
    with pytest.raises(RankFailedError, match=rf"Sample 's0': .* must have a stage that takes them, {re.escape(line)}"):
        list(load(model, [sample], layout="padded"))


@pytest.mark.parametrize(("staged", "keys"), [("vision", "audio_feature_lengths"), ("audio", "image_grid_thw")])
def test_the_message_says_what_the_sample_has(staged, keys):
    model = model_of_one_stage(staged)
    sample = make_omni_sample(model.config, 0, grids=[(2, 4)], frames=[15])
    with pytest.raises(RankFailedError, match=f"Sample 's0': `{keys}` and `[a-z_]*` must have a stage"):
        list(load(model, [sample]))


def test_placeholders_alone_are_refused():
    model = model_of_one_stage("vision")
    sample = make_omni_sample(model.config, 0, frames=[15])
    for key in ("audio_feature_lengths", "input_features"):
        del sample[key]
    with pytest.raises(RankFailedError, match="Sample 's0': 4 placeholders in `input_ids` must have a stage"):
        list(load(model, [sample]))


@pytest.mark.parametrize("staged", ["vision", "audio"])
def test_samples_without_items_for_it_train(staged):
    model = model_of_one_stage(staged)
    own, other = (
        ({"grids": [(2, 4)]}, {"frames": [15]}) if staged == "vision" else ({"frames": [15]}, {"grids": [(2, 4)]})
    )
    text, with_items = make_omni_sample(model.config, 0), make_omni_sample(model.config, 1, **own)
    nothing = {k: v[:0] for k, v in make_omni_sample(model.config, 2, **other).items() if k not in {"id", *text}}
    samples = [text, with_items, with_items | nothing]
    losses = [model(**batch).loss.item() for batch in load(model, samples)]
    assert losses[1] == losses[2]


def test_a_collator_of_ones_own_may_feed_it():
    model = model_of_one_stage("vision")
    sample = make_omni_sample(model.config, 0, frames=[15])

    def collate(samples, parts):
        features = torch.stack([sample["input_features"].T for sample in samples])
        mask = torch.ones(len(samples), features.shape[-1], dtype=torch.bool)
        parts = parts | {"audio": [[{"audio_feature_lengths": torch.tensor([15])}]]}
        batch = collator_for(model, "padded")(samples, parts)
        return batch | {"input_features": features, "feature_attention_mask": mask}

    for batch in load(model, [sample], layout="padded", collate_fn=collate):
        model(**batch).loss.backward()
    assert model.model.audio_tower.conv1.weight.grad.any()
