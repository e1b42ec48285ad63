"""The exchange of rows against one process that holds everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orch.comm.all_to_all import exchange_many, exchange_rows, start_exchange
from orch.comm.collective_log import CollectiveLog
from orch.comm.groups import new_cpu_group
from orch.comm.layout import Exchange, Layout, Rearrangement
from tests.ranks import run_ranks

METHODS = ["all_gather", "flat"]  # node-wise: see test_node_wise.py
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _scene(num_ranks: int, kind: str) -> tuple[Rearrangement, np.ndarray]:
    """A rearrangement and the rows of each item."""
    random = np.random.default_rng(7)
    num_items = {"uneven": 13, "empty": 0}.get(kind, 9)
    source, target = random.integers(0, num_ranks, (2, num_items))
    if kind == "source_without_items":
        source[:] = num_ranks - 1
    if kind == "target_without_items":
        target[:] = 0
    if kind == "stays":
        target = source
    rows = random.integers(0, 6, num_items)
    return Rearrangement(Layout(source, num_ranks), Layout(target, num_ranks)), rows


KINDS = ["uneven", "source_without_items", "target_without_items", "empty", "stays"]


def _rows_on(layout: Layout, num_rows: np.ndarray, rank: int) -> torch.Tensor:
    """Global ids of the rows on a rank."""
    starts = np.cumsum(num_rows) - num_rows
    ids = [np.arange(starts[item], starts[item] + num_rows[item]) for item in layout.items_on(rank)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids]))


def _data(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(num_rows, *shape, generator=generator, dtype=torch.float64) * 50).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_dtype_arrives_as_in_one_process(num_ranks, kind):
    rearrangement, num_rows = _scene(num_ranks, kind)

    def fn():
        rank = dist.get_rank()
        exchange = Exchange.of(rearrangement, rank, num_rows)
        mine = _rows_on(rearrangement.source, num_rows, rank)
        expected = _rows_on(rearrangement.target, num_rows, rank)
        for dtype in DTYPES:
            for shape in [(), (3,), (2, 5)]:
                whole = _data(int(num_rows.sum()), shape, dtype)
                for method in METHODS:
                    result = exchange_rows(whole[mine], exchange, method=method)
                    assert result.dtype == dtype
                    assert result.shape == (len(expected), *shape)
                    assert torch.equal(result, whole[expected])
                    assert not result.requires_grad

    run_ranks(fn, num_ranks)


def _loss_weights(num_rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.linspace(-1, 2, num_rows * int(np.prod(shape)), dtype=torch.float64).reshape(num_rows, *shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_index_select_in_one_process(kind, method):
    num_ranks, shape = 4, (3,)
    rearrangement, num_rows = _scene(num_ranks, kind)
    total = int(num_rows.sum())
    whole = _data(total, shape, torch.float64).requires_grad_()
    (whole.index_select(0, torch.arange(total)).pow(3) * _loss_weights(total, shape)).sum().backward()

    def fn():
        rank = dist.get_rank()
        exchange = Exchange.of(rearrangement, rank, num_rows)
        mine = _rows_on(rearrangement.source, num_rows, rank)
        arrived = _rows_on(rearrangement.target, num_rows, rank)
        rows = _data(total, shape, torch.float64)[mine].requires_grad_()
        result = exchange_rows(rows, exchange, method=method)
        (result.pow(3) * _loss_weights(total, shape)[arrived]).sum().backward()
        assert torch.equal(rows.grad, whole.grad[mine])

    run_ranks(fn, num_ranks)


def test_gradcheck_and_second_derivatives():
    rearrangement, num_rows = _scene(2, "uneven")

    def fn():
        exchange = Exchange.of(rearrangement, dist.get_rank(), num_rows)
        rows = torch.randn(len(exchange.send_index), 2, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(exchange_rows(rows, exchange).pow(3).sum(), rows, create_graph=True)
        assert torch.allclose(grad, 3 * rows**2)
        (second,) = torch.autograd.grad(grad.sum(), rows)
        assert torch.allclose(second, 6 * rows)

    run_ranks(fn, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.uint8)])
def test_many_tensors_travel_in_one_collective_and_back_in_one(dtypes, method):
    rearrangement, num_rows = _scene(2, "uneven")
    total = int(num_rows.sum())

    def fn():
        rank = dist.get_rank()
        exchange = Exchange.of(rearrangement, rank, num_rows)
        mine = _rows_on(rearrangement.source, num_rows, rank)
        arrived = _rows_on(rearrangement.target, num_rows, rank)
        wholes = [_data(total, (width,), dtype) for width, dtype in zip((5, 1, 3), dtypes, strict=True)]
        tensors = [whole[mine].requires_grad_(whole.is_floating_point()) for whole in wholes]
        with CollectiveLog() as log:
            results = exchange_many(tensors, exchange, method=method, label="vision")
            for whole, result in zip(wholes, results, strict=True):
                assert torch.equal(result, whole[arrived])
                assert result.requires_grad == whole.is_floating_point()
            sum((result.float() * 2).sum() for result in results if result.requires_grad).backward()
        for tensor in tensors:
            if tensor.requires_grad:
                assert torch.equal(tensor.grad, torch.full_like(tensor, 2))
        return [(entry.kind, entry.label) for entry in log.entries]

    kind = "all_to_all" if method == "flat" else "all_gather"
    assert run_ranks(fn, 2) == [[(kind, "vision"), (kind, "vision.backward")]] * 2


def test_nothing_flows_where_no_input_requires_grad_or_only_some_do():
    rearrangement, num_rows = _scene(2, "uneven")

    def fn():
        exchange = Exchange.of(rearrangement, dist.get_rank(), num_rows)
        frozen = torch.ones(len(exchange.send_index), 2)
        trained = torch.ones(len(exchange.send_index), 2, requires_grad=True)
        with CollectiveLog() as log:
            first, second = exchange_many([frozen, trained], exchange, label="some")
            assert not first.requires_grad
            (second * 3 + first).sum().backward()
            assert exchange_rows(frozen, exchange, label="none").grad_fn is None
            with torch.no_grad():
                assert not exchange_rows(trained, exchange, label="off").requires_grad
        assert frozen.grad is None
        assert torch.equal(trained.grad, torch.full_like(trained, 3))
        back = next(entry for entry in log.entries if entry.label == "some.backward")
        assert back.num_bytes == len(exchange.recv_index) * 2 * 4
        return [entry.label for entry in log.entries]

    assert run_ranks(fn, 2) == [["some", "some.backward", "none", "off"]] * 2


def test_several_exchanges_on_their_way_at_once():
    rearrangement, num_rows = _scene(4, "uneven")
    total = int(num_rows.sum())

    def fn():
        rank, group = dist.get_rank(), new_cpu_group()
        exchange = Exchange.of(rearrangement, rank, num_rows)
        mine = _rows_on(rearrangement.source, num_rows, rank)
        arrived = _rows_on(rearrangement.target, num_rows, rank)
        wholes = [_data(total, (width,), torch.float64) for width in (1, 2, 3)]
        tensors = [whole[mine].requires_grad_() for whole in wholes]
        handles = [start_exchange([tensor], exchange, group) for tensor in tensors]
        results = [handle.wait()[0] for handle in handles]
        sum(result.sum() for result in results).backward()
        for whole, tensor, result in zip(wholes, tensors, results, strict=True):
            assert torch.equal(result, whole[arrived])
            assert torch.equal(tensor.grad, torch.ones_like(tensor))
        with pytest.raises(AssertionError, match="only once"):
            handles[0].wait()

    run_ranks(fn, 4)


def test_bytes_on_the_wire_are_the_plans():
    rearrangement, num_rows = _scene(4, "uneven")

    def fn():
        exchange = Exchange.of(rearrangement, dist.get_rank(), num_rows)
        with CollectiveLog() as log:
            exchange_rows(torch.zeros(len(exchange.send_index), 6, dtype=torch.bfloat16), exchange)
        return log.entries[0].num_bytes

    sent = [int(num_rows[rearrangement.source.items_on(rank)].sum()) * 12 for rank in range(4)]
    assert run_ranks(fn, 4) == sent


def test_world_of_one_needs_no_group():
    one = Layout(np.zeros(3, np.int64), 1)
    exchange = Exchange.of(Rearrangement(one, one), 0, np.array([2, 0, 1]))
    rows = torch.randn(3, 2, requires_grad=True)
    with CollectiveLog() as log:
        result = exchange_rows(rows, exchange)
        result.sum().backward()
    assert torch.equal(result, rows)
    assert torch.equal(rows.grad, torch.ones(3, 2))
    assert log.count() == 0


def test_refuses_what_does_not_fit_the_plan():
    one = Layout(np.zeros(3, np.int64), 1)
    exchange = Exchange.of(Rearrangement(one, one), 0, np.array([2, 0, 1]))
    with pytest.raises(ValueError, match=r"`tensors` of 'vision' must have 3 rows each.*\(4, 2\)"):
        exchange_rows(torch.zeros(4, 2), exchange, label="vision")
    with pytest.raises(
        ValueError, match=r"must be 'auto' or one of \['all_gather', 'flat', 'node_wise'\], but is 'ring'"
    ):
        exchange_rows(torch.zeros(3, 2), exchange, method="ring")
    with pytest.raises(ValueError, match="must hold at least one tensor"):
        exchange_many([], exchange)
    two = Layout(np.zeros(3, np.int64), 2)
    with pytest.raises(ValueError, match="for the 1 ranks of the group, but is for 2"):
        exchange_rows(torch.zeros(3, 2), Exchange.of(Rearrangement(two, two), 0, np.array([2, 0, 1])))
