import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orch.lengths import ItemLengths, StepLengths, merge_lengths, pack_lengths

NAMES = ("vision", "audio")


@st.composite
def own_lengths(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, k = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    n = n if k else 0
    stages = {}
    for name in NAMES:
        m = draw(st.integers(0, 6)) if n else 0
        owner = np.sort(rng.integers(0, max(n, 1), m))
        stages[name] = ItemLengths(owner, *rng.integers(0, 99, (3, m)))
    micro_step = np.sort(rng.integers(0, max(k, 1), n))
    columns = rng.integers(0, 99, (3, n))
    return StepLengths(np.zeros(n, np.int64), micro_step, *columns, k, stages, group_rank=rng.integers(0, 4, n))


@given(st.lists(own_lengths(), min_size=1, max_size=4))
def test_lengths_of_all_ranks_are_put_together_in_rank_order(ranks):
    merged = merge_lengths([pack_lengths(own) for own in ranks], NAMES)
    assert merged.num_samples == sum(own.num_samples for own in ranks)
    assert merged.num_micro_steps == max(own.num_micro_steps for own in ranks)
    for rank, own in enumerate(ranks):
        here = merged.home == rank
        np.testing.assert_array_equal(merged.llm_length[here], own.llm_length)
        np.testing.assert_array_equal(merged.micro_step[here], own.micro_step)
        np.testing.assert_array_equal(merged.group_rank[here], own.group_rank)
        first = sum(r.num_samples for r in ranks[:rank])
        for name in NAMES:
            items = merged.stages[name]
            mine = here[items.sample] if len(items) else np.zeros(0, bool)
            np.testing.assert_array_equal(items.sample[mine] - first, own.stages[name].sample)
            np.testing.assert_array_equal(items.num_bytes[mine], own.stages[name].num_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llm_length": [1, -2]}, "`llm_length` must not be negative, but is -2 at 1"),
        ({"llm_length": [1]}, r"`llm_length` must have shape \(2,\)"),
        ({"home": [1, 0]}, "`home` must not decrease"),
        ({"micro_step": [0, 1]}, "`micro_step` must be below 1, but reaches 1"),
        ({"llm_length": [1.9, 2.9]}, "`llm_length` must be integers, but are float64 instead"),
        ({"num_bytes": [1, np.nan]}, "`num_bytes` must be integers, but are float64 instead"),
        ({"group_rank": [0]}, r"`group_rank` must have shape \(2,\)"),
        ({"group_rank": [0, -1]}, "`group_rank` must not be negative, but is -1 at 1"),
    ],
)
def test_bad_lengths_are_named(change, message):
    ones = {"num_bytes": [1, 1], "num_label_tokens": [1, 1]}
    columns = {"home": [0, 0], "micro_step": [0, 0], "llm_length": [1, 2], **ones}
    with pytest.raises(ValueError, match=message):
        StepLengths(**(columns | change))
