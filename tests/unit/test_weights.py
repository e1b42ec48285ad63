from __future__ import annotations

import numpy as np
import pytest

from orch.comm.topology import Topology
from orch.config import BalanceConfig, StageConfig
from orch.lengths import ItemLengths, StepLengths
from orch.metrics import step_metrics
from orch.plan import plan_step
from orch.weights import weigh_samples
from tests.unit.planning import arrays, random_step

ENCODER = StageConfig(row_bytes=100)


def two_samples() -> StepLengths:
    """Sample 0 on rank 0 with images of 8 and 4 patches, sample 1 on rank 1 with one of 40."""
    vision = ItemLengths(arrays([0, 0, 1]), arrays([8, 4, 40]), arrays([2, 1, 10]), arrays([80, 40, 400]))
    return StepLengths(
        arrays([0, 1]), arrays([0, 0]), arrays([9, 9]), arrays([5, 6]), arrays([1, 1]), 1, {"vision": vision}
    )


@pytest.mark.parametrize(("mode", "follows"), [("pre", [120, 400]), ("llm", [300, 1000]), ("post", [120, 400])])
def test_items_at_home_follow_their_sample(mode, follows):
    config = BalanceConfig(mode, stages={"vision": ENCODER})
    weights = weigh_samples(two_samples(), config, {"vision": arrays([0, 0, 1])}, 4)
    assert weights.move_bytes.tolist() == [5 + follows[0], 6 + follows[1]]
    assert weights.target.tolist() == [0, 1]
    assert weights.target_bytes.tolist() == [0, 0]


def test_a_sample_prefers_the_rank_on_which_most_of_its_output_is_made():
    config = BalanceConfig("post", stages={"vision": ENCODER})
    weights = weigh_samples(two_samples(), config, {"vision": arrays([3, 2, 1])}, 4)
    assert weights.target.tolist() == [3, 1]
    assert weights.target_bytes.tolist() == [200, 0]
    assert weights.move_bytes.tolist() == [5, 6 + 400]


@pytest.mark.parametrize(("slack", "share"), [(0.0, 0.8), (0.01, 0.7)])
def test_planning_stages_together_spares_much_of_what_crosses_nodes(slack, share):
    lengths, topology = random_step(0, 64, 16), Topology(64, 8)
    stages = {"vision": StageConfig(row_bytes=7168), "audio": StageConfig(row_bytes=7168)}
    config = BalanceConfig("post", stages=stages, slack=slack)
    apart = BalanceConfig("post", StageConfig(dispatcher="none"), stages, slack=slack)
    together = step_metrics(lengths, plan_step(lengths, topology, config), topology, config)
    encoders_alone = step_metrics(lengths, plan_step(lengths, topology, apart), topology, apart)
    assert together.stages["llm"].imbalance_after < 1.01
    assert together.moved.inter_node < share * encoders_alone.moved.inter_node
    from_scratch = {name: StageConfig(dispatcher="greedy", row_bytes=7168) for name in lengths.stages}
    greedy = BalanceConfig("post", StageConfig(dispatcher="greedy"), from_scratch)
    dealt = step_metrics(lengths, plan_step(lengths, topology, greedy), topology, greedy)
    assert together.moved.inter_node < 0.1 * dealt.moved.inter_node


def test_the_same_numbers_give_the_same_plan_on_any_machine():
    """A plan written down: if this fails and the planner was not meant to change, it is not deterministic."""
    counter = np.arange(600, dtype=np.int64)
    lengths = (counter * 7919) % 1009 + 1
    sample = np.sort((counter * 104729) % 600)
    vision = ItemLengths(sample, 4 * ((counter * 15485863) % 499 + 1), (counter * 15485863) % 499 + 1, counter * 1000)
    step = StepLengths(counter // 25, counter % 3, lengths, lengths * 16, lengths, 3, {"vision": vision})
    plan = plan_step(step, Topology(24, 8), BalanceConfig("post", stages={"vision": StageConfig(row_bytes=7168)}))
    assert plan.fingerprint() == FINGERPRINT


FINGERPRINT = 1922223264104347728
