"""Carries out an `Exchange`: packed rows of any tensors move between ranks, and their gradients move back.

All receive sizes are known from the plan, so an exchange is one collective for all tensors of a stage together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from orch.comm.collective_log import log_collective
from orch.comm.groups import Group, NodeGroups, all_gather_single, get_world_size, whole_of
from orch.comm.layout import Exchange
from orch.comm.node_wise import start_node_wise
from orch.comm.predict import choose_method
from orch.comm.row_packing import RowPacking
from orch.comm.splits import Splits
from orch.comm.topology import IntArray


def exchange_rows(
    rows: Tensor,
    exchange: Exchange,
    group: Group = None,
    *,
    method: str = "flat",
    label: str = "rows",
) -> Tensor:
    """Moves this rank's rows from the source layout to the target layout; see `exchange_many`.

    Args:
        rows: [n, ...] of any dtype, this rank's rows in the source layout; n may be 0.
        exchange: This rank's view of the rearrangement.
        group: The process group; None for the world, or a world of one.
        method: How; a key of `METHODS`, or "auto".
        label: What it is for, in error messages, profiles and a `CollectiveLog`.

    Returns:
        [m, ...], this rank's rows in the target layout.
    """
    return start_exchange([rows], exchange, group, method=method, label=label).wait()[0]


def exchange_many(
    tensors: Sequence[Tensor],
    exchange: Exchange,
    group: Group = None,
    *,
    method: str = "flat",
    label: str = "rows",
) -> list[Tensor]:
    """Moves the rows of several tensors by the same exchange, in one collective.

    Differentiable: the gradients of all tensors that require them move back in one inverse exchange. So whether a
    tensor requires grad must be the same on all ranks, and all ranks must use the results in their backward, or none.

    Args:
        tensors: [n, ...] each, of any dtypes; number, dtypes and trailing dimensions are the same on all ranks.
        exchange: This rank's view of the rearrangement.
        group: The process group; None for the world, or a world of one.
        method: "flat" (one all-to-all), "node_wise" (two hops), "all_gather" (every rank receives everything: the
            baseline), or "auto": whichever is predicted to be fastest. "node_wise" and "auto" need an exchange made
            with a topology; "node_wise" needs a group with those of its hops (`new_node_groups`), without which "auto"
            does not choose it.
        label: What it is for, in error messages, profiles and a `CollectiveLog`.

    Returns:
        [m, ...] for each tensor: this rank's rows in the target layout.

    Raises:
        ValueError: If a tensor does not have n rows, the method is unknown or the exchange is for another world size.
    """
    return start_exchange(tensors, exchange, group, method=method, label=label).wait()


def start_exchange(
    tensors: Sequence[Tensor],
    exchange: Exchange,
    group: Group = None,
    *,
    method: str = "flat",
    label: str = "rows",
    guard: Guard | None = None,
    seal: Seal | None = None,
) -> ExchangeHandle:
    """Begins `exchange_many` and returns at once; `wait()` on the handle gives the results, differentiable as well.

    What runs in between overlaps with it, and in the backward, what lies in between overlaps with the inverse exchange.
    Whatever depends on other ranks runs inside `guard(label)`; the label of the inverse exchange ends in ".backward".
    A `seal` travels with the gradients and is checked where they arrive.
    """
    guard = guard or _unguarded
    tensors = tuple(tensors)
    _check(tensors, exchange, group, method, label)
    with torch.no_grad(), record_function(f"orch.exchange.{label}"):
        packing = RowPacking.of(tensors)
        send_index = torch.from_numpy(exchange.send_index).to(tensors[0].device, non_blocking=True)
        buffer = packing.pack([tensor.detach().index_select(0, send_index) for tensor in tensors])
        if get_world_size(whole_of(group)) == 1 or not packing.row_bytes:
            received = buffer.new_empty(int(exchange.recv_splits.sum()), 0) if not packing.row_bytes else buffer
            finish: _Finish = lambda: received  # noqa: E731
        else:
            with guard(label):
                finish = start_splits(buffer, exchange, group, method, label)
    way_back = _WayBack(seal)
    departed = tuple(_Departure.apply(way_back, *tensors))
    return ExchangeHandle(departed, exchange, group, method, label, guard, packing, finish, way_back)


def start_splits(buffer: Tensor, splits: Splits, group: Group, method: str, label: str) -> _Finish:
    """Begins to move the rows of a buffer by one of `METHODS`, or the best of them; outside autograd.

    Args:
        buffer: [rows sent, ...], in the order of the ranks they are for; rows are of equal size on all ranks.
        splits: This rank's view of all that moves.
        group: The process group.
        method: A key of `METHODS`, or "auto".
        label: What it is for.

    Returns:
        A function that waits and returns [rows received, ...], in the order of the ranks they come from.
    """
    if method == "auto":
        method = resolve_method(splits, group, math.prod(buffer.shape[1:]) * buffer.element_size())
    return METHODS[method](buffer, splits, group, label)


def resolve_method(splits: Splits, group: Group, row_bytes: int) -> str:
    """What "auto" means for an exchange of rows of `row_bytes` bytes; the same on all ranks."""
    if splits.nodes is None or splits.nodes.topology.num_nodes == 1:
        return "flat"
    method = choose_method(splits.nodes.loads, row_bytes, splits.nodes.topology)
    return "flat" if method == "node_wise" and not isinstance(group, NodeGroups) else method


@dataclass(slots=True, eq=False)
class ExchangeHandle:
    """An exchange on its way. Made by `start_exchange`."""

    _tensors: tuple[Tensor, ...]
    _exchange: Exchange
    _group: Group
    _method: str
    _label: str
    _guard: Guard
    _packing: RowPacking
    _finish: _Finish | None
    _way_back: _WayBack

    def wait(self) -> list[Tensor]:
        """The rows of each tensor in the target layout; may be called once."""
        assert self._finish is not None, "an exchange can be waited for only once"
        tensors, self._tensors = self._tensors, ()
        results = _Arrival.apply(self, *tensors)
        self._finish = None
        return list(results)

    def _arrived(self) -> tuple[Tensor, ...]:
        assert self._finish is not None
        with record_function(f"orch.exchange.{self._label}.wait"):
            with self._guard(self._label):
                buffer = self._finish()
            recv_index = torch.from_numpy(self._exchange.recv_index).to(buffer.device, non_blocking=True)
            return tuple(rows.index_select(0, recv_index) for rows in self._packing.unpack(buffer))


@dataclass(slots=True, eq=False)
class _WayBack:
    """The inverse exchange between the backwards of `_Arrival`, which begins it, and `_Departure`, which waits."""

    seal: Seal | None
    handle: ExchangeHandle | None = None

    def sealed(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """What travels."""
        return [*grads, self.seal.outgoing().to(grads[0].device)] if self.seal is not None else list(grads)

    def opened(self, arrived: list[Tensor]) -> list[Tensor]:
        """The gradients that arrived."""
        if self.seal is None:
            return arrived
        self.seal.check(arrived[-1])
        return arrived[:-1]


class _Departure(torch.autograd.Function):
    """What is sent, unchanged; its backward waits for the gradients."""

    @staticmethod
    def forward(ctx: Any, way_back: _WayBack, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way_back = way_back
        departed = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*_not_needed(departed, ctx.needs_input_grad[1:]))
        return departed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back
        handle, way_back.handle = way_back.handle, None
        if handle is None:
            return None, *grads
        returned = iter(way_back.opened(handle.wait()))
        return None, *(next(returned) if needed else None for needed in ctx.needs_input_grad[1:])


class _Arrival(torch.autograd.Function):
    """Ties what arrived to what departed; its backward begins the inverse exchange, unless it is itself recorded."""

    @staticmethod
    def forward(ctx: Any, handle: ExchangeHandle, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inverse = (handle._exchange, handle._group, handle._method, f"{handle._label}.backward", handle._guard)
        ctx.way_back, ctx.shapes = handle._way_back, [tensor.shape for tensor in tensors]
        results = handle._arrived()
        ctx.mark_non_differentiable(*_not_needed(results, ctx.needs_input_grad[1:]))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, group, method, label, guard = ctx.inverse
        needed = [index for index, need in enumerate(ctx.needs_input_grad[1:]) if need]
        gone = ctx.way_back.sealed([grads[index] for index in needed])
        handle = start_exchange(gone, exchange.inverse(), group, method=method, label=label, guard=guard)
        if torch.is_grad_enabled():  # for second derivatives
            returned = ctx.way_back.opened(handle.wait())
        else:  # nobody reads these but `_Departure`
            ctx.way_back.handle = handle
            returned = [grads[index].new_zeros(()).expand(ctx.shapes[index]) for index in needed]
        result: list[Tensor | None] = [None] * len(grads)
        for index, grad in zip(needed, returned, strict=True):
            result[index] = grad
        return None, *result


def _unguarded(_label: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _not_needed(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, need in zip(tensors, needed, strict=True) if not need]


def _check(tensors: tuple[Tensor, ...], exchange: Exchange, group: Group, method: str, label: str) -> None:
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, but is empty instead.")
    for tensor in tensors:
        if tensor.dim() < 1 or len(tensor) != len(exchange.send_index):
            raise ValueError(
                f"`tensors` of {label!r} must have {len(exchange.send_index)} rows each, as planned, "
                f"but one has shape {tuple(tensor.shape)} instead."
            )
    if method not in (*METHODS, "auto"):
        raise ValueError(f"`method` must be 'auto' or one of {sorted(METHODS)}, but is {method!r} instead.")
    num_ranks = get_world_size(whole_of(group))
    if len(exchange.send_splits) != num_ranks:
        raise ValueError(
            f"`exchange` of {label!r} must be for the {num_ranks} ranks of the group, "
            f"but is for {len(exchange.send_splits)} instead."
        )


Guard = Callable[[str], contextlib.AbstractContextManager[None]]
"""Around what other ranks can make fail; given the label of the exchange."""


class Seal(Protocol):
    """Ids of the rows whose gradients move back."""

    def outgoing(self) -> Tensor:
        """[m, ...], of any dtype: for each row that this rank received, what goes back with its gradient."""
        ...

    def check(self, found: Tensor) -> None:
        """Raises where what came back, [n, ...] for the rows that this rank sent, is not what belongs there."""
        ...


_Finish = Callable[[], Tensor]
"""Waits for a collective and returns the rows received, in the order of their source ranks."""


def _start_flat(buffer: Tensor, splits: Splits, group: Group, label: str) -> _Finish:
    """One all-to-all; every row travels once."""
    received = buffer.new_empty((int(splits.recv_splits.sum()), *buffer.shape[1:]))
    log_collective("all_to_all", label, buffer.numel() * buffer.element_size())
    work = dist.all_to_all_single(
        received, buffer, splits.recv_splits.tolist(), splits.send_splits.tolist(), group=whole_of(group), async_op=True
    )
    return lambda: _waited(work, received, buffer)


def _start_all_gather(buffer: Tensor, splits: Splits, group: Group, label: str) -> _Finish:
    """The baseline: every rank receives all rows, padded to the most that any rank sends, and keeps its own."""
    num_ranks = len(splits.send_splits)
    padded = buffer.new_zeros((splits.most_sent, *buffer.shape[1:]))
    padded[: len(buffer)] = buffer
    gathered = buffer.new_empty((num_ranks * splits.most_sent, *buffer.shape[1:]))
    log_collective("all_gather", label, padded.numel() * padded.element_size())
    work = all_gather_single(gathered, padded, whole_of(group), async_op=True)
    starts = np.arange(num_ranks, dtype=np.int64) * splits.most_sent + splits.recv_starts
    mine = torch.from_numpy(_ranges(starts, splits.recv_splits)).to(buffer.device, non_blocking=True)
    return lambda: _waited(work, gathered, padded).index_select(0, mine)


def _waited(work: Any, received: Tensor, _sent: Tensor) -> Tensor:
    """Waits, and keeps what is being sent alive until then."""
    work.wait()
    return received


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """start, start + 1, ... for each start, `counts` numbers each."""
    within = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within


METHODS: dict[str, Callable[[Tensor, Splits, Group, str], _Finish]] = {
    "flat": _start_flat,
    "node_wise": start_node_wise,
    "all_gather": _start_all_gather,
}
