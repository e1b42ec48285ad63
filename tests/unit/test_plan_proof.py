"""The slow bound that the planner's benchmark measures against must be a bound."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.dispatch.bounds import least_load
from tests.benchmark.plan_proof import proven_load
from tests.unit.planning import arrays


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([4, 6, 14, 26]), min_size=1, max_size=8), st.integers(1, 3))
def test_the_proven_load_is_between_the_cheap_bound_and_the_optimum(costs, num_bins):
    layouts = itertools.product(range(num_bins), repeat=len(costs))
    optimum = min(int(np.bincount(layout, weights=costs).max()) for layout in layouts)
    bound = least_load(arrays(costs), num_bins)
    assert bound <= proven_load(arrays(costs), num_bins, bound, sum(costs)) <= optimum


def test_it_proves_what_the_cheap_bound_does_not_see():
    """Under 14 no 4 fits beside a 10, so that two bins hold the tens and the fours need one bin and a third."""
    costs = arrays([10, 10, 4, 4, 4, 4])
    assert least_load(costs, 3) == 12
    assert proven_load(costs, 3, 12, 18) == 14
