from __future__ import annotations

import numpy as np
import pytest

from orch.comm.topology import Topology
from orch.config import BalanceConfig, StageConfig
from orch.cost import PackedCost
from orch.lengths import ItemLengths, StepLengths
from orch.metrics import MovedBytes, imbalance, step_metrics
from orch.plan import plan_step
from tests.unit.planning import arrays, random_step


def test_imbalance_is_time_waited_for_over_time_needed():
    assert imbalance(arrays([4, 2])) == pytest.approx(4 / 3)
    assert imbalance(np.array([[4, 1], [2, 3]])) == pytest.approx((4 + 3) / (3 + 2))
    assert imbalance(arrays([0, 0])) == 1.0


def step(llm: list[int], owners: list[int], items: list[int]) -> StepLengths:
    """Samples 0 and 1 on rank 0, the others on a rank each."""
    home = arrays([0, 0, *range(1, len(llm) - 1)])
    vision = ItemLengths(arrays(owners), arrays(items), arrays(items) // 4, arrays(items) * 10)
    return StepLengths(home, home * 0, arrays(llm), arrays(llm) * 16, home * 0, 1, {"vision": vision})


def test_figures_of_a_step_by_hand():
    """Rank 0 holds 60 + 40 tokens and both images; four ranks on two nodes."""
    lengths = step([60, 40, 20, 40, 40], [0, 1], [8, 8])
    topology = Topology(4, 2)
    config = BalanceConfig("post", stages={"vision": StageConfig(row_bytes=100)})
    metrics = step_metrics(lengths, plan_step(lengths, topology, config), topology, config)
    llm, vision = metrics.stages["llm"], metrics.stages["vision"]
    assert list(metrics.stages) == ["vision", "llm"]
    assert (llm.imbalance_before, llm.imbalance_after, llm.bound) == (2.0, 1.2, 1.2)
    assert (llm.num_items, llm.largest_batch_before, llm.largest_batch_after) == (5, 100, 60)
    assert llm.moved == MovedBytes(40 * 16, 0)
    assert (vision.imbalance_before, vision.imbalance_after, vision.bound) == (4.0, 2.0, 2.0)
    assert (vision.num_items, vision.largest_batch_before, vision.largest_batch_after) == (2, 16, 8)
    assert vision.moved in (MovedBytes(80, 0), MovedBytes(80 + 400, 0))
    assert metrics.moved == llm.moved + vision.moved


def test_the_bound_knows_that_equal_items_cannot_be_split():
    lengths = step([9] * 6, [0, 1, 2, 3, 4, 5], [8] * 6)
    metrics = step_metrics(lengths, plan_step(lengths, Topology(5)), Topology(5)).stages["vision"]
    assert metrics.bound == metrics.imbalance_after == pytest.approx(2 * 5 / 6)


def test_nothing_to_do_and_no_items_give_ones_and_zeros():
    lengths = step([0, 0, 0], [], [])
    topology = Topology(2, 1)
    for mode in ("none", "pre", "llm", "post"):
        metrics = step_metrics(lengths, plan_step(lengths, topology, BalanceConfig(mode)), topology)
        for stage in metrics.stages.values():
            assert (stage.imbalance_before, stage.imbalance_after, stage.bound) == (1.0, 1.0, 1.0)
            assert stage.moved == MovedBytes()


def test_fillers_cost_memory_and_do_not_count_as_items():
    lengths = StepLengths(arrays([0]), arrays([0]), arrays([8]), arrays([8]), arrays([8]))
    metrics = step_metrics(lengths, plan_step(lengths, Topology(4)), Topology(4)).stages["llm"]
    assert metrics.num_items == 1
    assert metrics.largest_batch_after == 8
    assert metrics.imbalance_after == metrics.bound == 4.0


def test_bytes_equal_the_volumes_of_the_rearrangements():
    lengths, topology = random_step(5, 8, 6, 2), Topology(8, 4)
    config = BalanceConfig("post", StageConfig(cost=PackedCost()), {"vision": StageConfig(row_bytes=7168)})
    plan = plan_step(lengths, topology, config)
    metrics = step_metrics(lengths, plan, topology, config)
    for name, row_bytes in (("vision", 7168), ("audio", 0)):
        intra, inter = 0, 0
        for part in plan.micro_steps:
            stage, items = part.stages[name], lengths.stages[name]
            for way, sizes in ((stage.to_encoder, items.num_bytes), (stage.to_llm, items.num_rows * row_bytes)):
                within, across = way.volumes(sizes[stage.items]).intra_and_inter_node(topology)
                intra, inter = intra + within, inter + across
        assert metrics.stages[name].moved == MovedBytes(intra, inter)
        assert inter > 0
