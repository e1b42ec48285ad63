"""A staged encoder is the same module as before, wherever anybody looks."""

import copy
import io
import pickle

import own_encoder
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import orch
from orch.encoders.registry import adapter_for
from orch.stages import stage_of, stages_in
from tests.omni import make_sample, small_model


@pytest.fixture
def plain():
    return small_model(torch.float32, staged=False)


@pytest.fixture
def staged():
    return small_model(torch.float32, staged=True)


def encode(tower, sample):
    adapter = adapter_for(tower)
    return adapter.rows(tower(**adapter.join(adapter.split(sample))))[0]


def test_class_names_and_state_stay(plain, staged):
    assert type(staged.model.visual) is type(plain.model.visual)
    assert [name for name, _ in staged.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in staged.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(staged.state_dict()) == list(plain.state_dict())
    assert staged.model.visual.dtype == plain.model.visual.dtype


def test_outside_a_micro_step_it_is_the_plain_encoder(plain, staged):
    picture = make_sample(plain.config, 1, grids=[(4, 6)])
    sound = make_sample(plain.config, 2, frames=[20, 7])
    assert torch.equal(encode(staged.model.visual, picture), encode(plain.model.visual, picture))
    assert torch.equal(encode(staged.model.audio_tower, sound), encode(plain.model.audio_tower, sound))


def test_save_pretrained_writes_the_same_checkpoint(plain, staged, tmp_path):
    plain.save_pretrained(tmp_path / "plain")
    staged.save_pretrained(tmp_path / "staged")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "staged").iterdir())
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "staged" / name).read_bytes()


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _through_torch_save(m)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_a_stage_of_its_own(staged, copied):
    twin = copied(staged)
    instrument = stage_of(twin.model.visual)
    assert instrument.encoder is twin.model.visual
    assert instrument is not stage_of(staged.model.visual)
    with torch.no_grad():
        for parameter in twin.model.visual.parameters():
            parameter.zero_()
    picture = make_sample(staged.config, 1, grids=[(4, 6)])
    assert encode(twin.model.visual, picture).abs().max() == 0
    assert encode(staged.model.visual, picture).abs().max() > 0


def test_gradient_checkpointing_still_works(plain, staged):
    picture = make_sample(plain.config, 1, grids=[(4, 6)])
    staged.activation_checkpointing_enable()
    for model in (plain, staged):
        encode(model.model.visual, picture).sum().backward()
    for (name, expected), got in zip(
        plain.model.visual.named_parameters(), staged.model.visual.parameters(), strict=True
    ):
        assert torch.allclose(got.grad, expected.grad, atol=1e-6), name


def test_generate_still_works(plain, staged):
    ids = make_sample(plain.config, 5)["input_ids"][None]
    args = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(staged.eval().generate(ids, **args), plain.eval().generate(ids, **args))


def test_parameters_that_take_part_in_no_forward_are_frozen():
    model = small_model(torch.float32, staged=False).requires_grad_(True)
    orch.stage(model.model.visual, "vision")
    orch.stage(model.model.audio_tower, "audio")
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.audio_tower.audio_bos_eos_token.weight"]
    encode(model.model.audio_tower, make_sample(model.config, 2, frames=[20])).sum().backward()
    left_out = [name for name, parameter in model.model.audio_tower.named_parameters() if parameter.grad is None]
    assert left_out == ["audio_bos_eos_token.weight"]


def test_stages_are_found_in_the_order_of_the_modules(staged):
    assert list(stages_in(staged)) == ["audio", "vision"]


def test_what_cannot_be_a_stage_is_refused(staged):
    with pytest.raises(ValueError, match="must not be a stage yet, but is stage 'vision'"):
        orch.stage(staged.model.visual, "again")
    with pytest.raises(ValueError, match=r"must not hold BatchNorm, but '0' is BatchNorm1d"):
        orch.stage(nn.Sequential(nn.BatchNorm1d(3)), "norm")
    with pytest.raises(ValueError, match=r"`encoder` must be one of .*, but is Linear instead"):
        orch.stage(nn.Linear(2, 2), "linear")
    with pytest.raises(ValueError, match=r"`adapter` must have .*'split'"):
        orch.stage(nn.Linear(2, 2), "linear", adapter=object())


@pytest.mark.parametrize("name", ["", "llm", "a:b", None])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ValueError, match=f"`name` must be a text .*, but is {name!r} instead"):
        orch.stage(own_encoder.PatchEncoder(), name, own_encoder.PatchAdapter())


class _CallsAlways(own_encoder.PatchAdapter):
    """Of a model that calls its encoder for a batch of text too."""

    def calls(self, parts):
        return [list(range(len(parts)))]


@pytest.mark.parametrize("num_rows", [[], [2, 1]])
def test_a_call_that_serves_no_items_gets_no_rows(num_rows):
    instrument = stage_of(orch.stage(own_encoder.PatchEncoder(), "vision", _CallsAlways()))
    rows = torch.randn(3, own_encoder.WIDTH), torch.randn(3, 2)
    instrument.route(rows, [{}] * len(num_rows), num_rows)
    ((first, second),) = instrument._routed
    assert torch.equal(first, rows[0][: sum(num_rows)])
    assert torch.equal(second, rows[1][: sum(num_rows)])


def test_a_wrapped_stage_is_refused():
    model = small_model(torch.float32)
    model.model.visual = checkpoint_wrapper(model.model.visual)
    with pytest.raises(ValueError, match="stage 'vision' must have its blocks checkpointed, but is wrapped whole"):
        stages_in(model)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_compiled_encoder_computes_compiled_and_serves_as_ever(before):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model = own_encoder.Captioner()
    if before:
        model.encoder.compile(backend=backend)
    orch.stage(model.encoder, "vision", own_encoder.PatchAdapter())
    if not before:
        model.encoder.compile(backend=backend)
    twin = copy.deepcopy(model)
    samples = [own_encoder.make_sample([3, 5]), own_encoder.make_sample([2])]
    losses = [model(**batch).loss.item() for batch in orch.orchestrate([samples], model, prefetch=0)]
    assert len(compiled) == 1
    (batch,) = orch.orchestrate([samples], twin, prefetch=0)
    assert losses == [pytest.approx(twin(**batch).loss.item())]


def test_hooks_of_an_encoder_run_where_it_computes_not_where_it_serves():
    model, entered = own_encoder.Captioner(), []
    orch.stage(model.encoder, "vision", own_encoder.PatchAdapter())
    model.encoder.register_forward_pre_hook(lambda module, args, kwargs: entered.append(1), with_kwargs=True)
    for batch in orch.orchestrate([[own_encoder.make_sample([3])], [own_encoder.make_sample([])]], model, prefetch=0):
        model(**batch)
    assert len(entered) == 2


def test_two_stages_of_one_name_are_refused():
    model = small_model(torch.float32, staged=False)
    orch.stage(model.model.visual, "media")
    orch.stage(model.model.audio_tower, "media")
    with pytest.raises(ValueError, match="two stages are 'media'"):
        stages_in(model)


def _through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
