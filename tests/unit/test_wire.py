import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orch.wire import ALIGNMENT, decode_record, encode_record

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.sampled_from([np.uint8, np.int64, np.float32, np.float64, np.bool_, np.float16, np.int32]).flatmap(
    lambda dtype: hnp.arrays(dtype, SHAPES)
)
VALUES = st.one_of(
    ARRAYS, ARRAYS.map(torch.from_numpy), st.text(), st.integers(-(2**62), 2**62), st.floats(), st.booleans()
)


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_a_record_comes_back_as_it_was(record):
    data = encode_record(record)
    assert data.numel() % ALIGNMENT == 0
    back = decode_record(data)
    assert list(back) == list(record)
    for key, value in record.items():
        assert type(back[key]) is type(value)
        if isinstance(value, (np.ndarray, torch.Tensor)):
            assert back[key].dtype == value.dtype
            assert tuple(back[key].shape) == tuple(value.shape)
        np.testing.assert_array_equal(back[key], value)


def test_bfloat16_keeps_its_bits():
    value = torch.randn(3, 5).to(torch.bfloat16)
    assert torch.equal(decode_record(encode_record({"x": value}))["x"].view(torch.int16), value.view(torch.int16))


@pytest.mark.parametrize("value", [None, [1, 2], {"a": 1}, np.array(["a"]), 1j])
def test_anything_else_is_refused_with_key_and_type(value):
    with pytest.raises(ValueError, match=rf"`extra` must be .*{type(value).__name__}"):
        encode_record({"input_ids": torch.zeros(2), "extra": value})
