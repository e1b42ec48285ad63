"""The comparison of balancing modes, small, and the statistic it stands on."""

import contextlib
import io
import re

import numpy as np
import pytest
import torch
from ablate import VARIANTS, summarise
from part_times import PartTimes, least

from tests.ranks import run_ranks

OPTIONS = "--steps 2 --samples 300 --max-pixels 50176 --token-budget 384 --num-workers 0 --ranks-per-node 1"


def test_every_variant_runs_every_step():
    def run():
        import ablate
        from reporting import print_ablation

        args = ablate.make_arguments().parse_args(f"{OPTIONS} --repeats 2 --hidden-size 64".split())
        result = ablate.run(args)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            print_ablation(result)
        return result, printed.getvalue()

    (first, printed), (second, _) = run_ranks(run, 2, timeout_s=200)
    flat = " ".join(re.sub("[^a-zA-Z0-9.,/=() ]", " ", printed).split())
    for heading in ("perfect", "tokens/s", "none = 1", "imbalance", "largest", "MB a step", "all-gather"):
        assert heading.split("-")[0] in flat, printed
    assert first["variants"].keys() == VARIANTS.keys()
    assert (first["num_steps"], first["num_repeats"]) == (2, 2)
    for name, row in first["variants"].items():
        own = np.array(row["rank_cpu_s"])
        assert own.shape == (2, 2)
        assert own.min() > 0
        assert row["rank_cpu_s"] == second["variants"][name]["rank_cpu_s"]
    rows = first["variants"]
    assert all(row["bytes_per_step"]["intra_node"] == 0 for row in rows.values())  # each rank is a node
    crossing = {name: row["bytes_per_step"]["inter_node"] for name, row in rows.items()}
    assert 0 <= crossing["none"] < crossing["post"] < crossing["post, all-gather"]
    assert rows["post"]["stages"] == rows["post, all-gather"]["stages"]


class FakeLoader:
    def __init__(self):
        self.report = self

    def stages(self):
        return {}


def test_shares_are_of_what_perfect_balance_would_gain():
    """Two ranks, two steps: as drawn 4 and 6 seconds where 3 and 5 are possible; half of that is 3.5 and 5.5."""
    none, half = [[4.0, 4.0], [2.0, 6.0]], [[3.5, 4.5], [2.5, 5.5]]
    cpu = np.array([none, half]).swapaxes(0, 1)
    wall = cpu[:, :, None, :].repeat(3, axis=2)
    result = summarise(cpu, wall, {"none": FakeLoader(), "half": FakeLoader()}, {"none": 0, "half": 1}, num_tokens=80)
    assert result["variants"]["half"]["share_of_possible_gain"] == pytest.approx(0.5)
    assert result["variants"]["half"]["speed"] == pytest.approx(10 / 9)
    assert result["variants"]["half"]["work"] == pytest.approx(1.0)
    assert result["perfect balance"]["speed"] == pytest.approx(10 / 8)
    assert result["perfect balance"]["tokens_per_s"] == pytest.approx(10)


def test_parts_are_modules_forward_and_backward_and_add_up():
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    parts = PartTimes(layers)
    runs = []
    for _ in range(2):
        with parts.measure() as seconds:
            hidden = torch.ones(4, 8)
            for layer in layers:
                hidden = layer(hidden)
            hidden.sum().backward()
        runs.append(seconds)
    assert [len(run) for run in runs] == [7, 7]  # three layers either way, and what follows the last
    assert min(map(min, runs)) >= 0
    assert least(runs) <= min(map(sum, runs)) + 1e-12


def test_the_least_of_each_part_counts():
    assert least([[1.0, 5.0, 2.0], [3.0, 1.0, 2.5]]) == 4.0
    with pytest.raises(ValueError, match="shape"):
        least([[1.0], [1.0, 2.0]])
