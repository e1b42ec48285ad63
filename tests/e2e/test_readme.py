"""Every block of Python in the README runs as it is written, on two ranks, given what it says it is given."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import orch
from orch import odb
from orch.encoders.packing import use_packed_attention
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


def python_blocks():
    text = README.read_text() if README.exists() else ""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def diffs():
    text = README.read_text() if README.exists() else ""
    return re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def given():
    """The user's own: a model with two towers, an optimizer and a data set."""
    model = small_model(torch.float32, staged=False)
    use_packed_attention(model)
    kinds = [{"grids": [(4, 4)]}, {"frames": [15]}, {}]
    dataset = [make_sample(model.config, i, **kinds[i % 3]) | {"source": f"web {i}"} for i in range(12)]
    return {"torch": torch, "model": model, "dataset": dataset, "optimizer": torch.optim.AdamW(model.parameters())}


def given_what_came_before(names):
    """What the block of the script defines, for those that go on from there."""
    orch.stage(names["model"].model.visual, "vision")
    orch.stage(names["model"].model.audio_tower, "audio")
    loader = odb.ODBDataLoader(names["dataset"], token_budget=64, layout="packed")
    return {**names, "orch": orch, "loader": loader, "engine": DistributedDataParallel(names["model"])}


def train(names):
    """The loop of the script, if the block leaves it out."""
    for batch in names["loader"]:
        names["sources"] = batch.pop("source", [])
        names["loss"] = names["engine"](**batch).loss
        names["loss"].backward()


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_a_block_of_the_readme_runs(index):
    block = python_blocks()[index]
    goes_on = "loader" in block and "odb.ODBDataLoader" not in block

    def run():
        names = given_what_came_before(given()) if goes_on else given()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, f"README.md, block {index}", "exec"), names)
        if goes_on:
            train(names)
        assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
        gradients = [p.detach().sum() for p in names["model"].parameters()]
        is_named = "sources" not in names or all(source.startswith("web ") for source in names["sources"])
        loss = float(names["loss"]) if "loss" in names else 0.0
        return loss, float(torch.stack(gradients).sum()), is_named, dist.get_rank()

    results = run_ranks(run, 2)
    assert all(math.isfinite(loss) and is_named for loss, _, is_named, _ in results)
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("index", range(len(diffs())))
def test_a_script_changed_as_the_readme_says_trains(index):
    changed = "".join(line[1:] + "\n" for line in diffs()[index].splitlines() if not line.startswith("-"))

    def run():
        names = {**given(), "DataLoader": DataLoader, "DistributedDataParallel": DistributedDataParallel}
        names["sampler"] = DistributedSampler(names["dataset"])
        names["dataset"] = [sample for sample in names["dataset"] if "input_features" not in sample] * 2
        names["model"].model.audio_tower.requires_grad_(False)
        exec(compile(changed, f"README.md, diff {index}", "exec"), names)
        train(names)
        return float(names["loss"])

    assert all(math.isfinite(loss) for loss in run_ranks(run, 2))


def test_the_readme_has_blocks_of_python():
    if not README.exists():
        pytest.skip("there is no README.md")
    if not python_blocks():
        pytest.skip("README.md has no block of Python")
    for block in python_blocks():
        compile(block, "README.md", "exec")
