"""Every block of Python in the README runs as it is written, on two ranks, given what it says it is given."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orch.encoders.packing import use_packed_attention
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def python_blocks():
    text = README.read_text() if README.exists() else ""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def given():
    """The user's own: a model with two towers, an optimizer and a data set."""
    model = small_model(torch.float32, staged=False)
    use_packed_attention(model)
    kinds = [{"grids": [(4, 4)]}, {"frames": [15]}, {}]
    dataset = [make_sample(model.config, i, **kinds[i % 3]) for i in range(12)]
    return {"torch": torch, "model": model, "dataset": dataset, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_a_block_of_the_readme_runs(index):
    block = python_blocks()[index]

    def run():
        names = given()
        exec(compile(block, f"README.md, block {index}", "exec"), names)
        gradients = [p.detach().sum() for p in names["model"].parameters()]
        return float(names["loss"]) if "loss" in names else 0.0, float(torch.stack(gradients).sum()), dist.get_rank()

    results = run_ranks(run, 2)
    assert all(math.isfinite(loss) for loss, *_ in results)
    assert results[0][1] == results[1][1]


def test_the_readme_has_blocks_of_python():
    if not README.exists():
        pytest.skip("there is no README.md")
    if not python_blocks():
        pytest.skip("README.md has no block of Python")
    for block in python_blocks():
        compile(block, "README.md", "exec")
