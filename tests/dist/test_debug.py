"""The debug mode: ids travel with all that moves, cost nothing where they are right, and name what is wrong."""

import re

import pytest
import torch
import torch.distributed as dist

import orch
from orch import micro_step, prepare
from orch.comm import all_to_all
from orch.comm.collective_log import CollectiveLog
from orch.comm.topology import Topology
from tests.dist.test_gradients import AUDIO, BOTH, IMAGE, TEXT, Groups, draw
from tests.omni import make_sample, small_model
from tests.ranks import run_ranks

KINDS = [[[BOTH, IMAGE], [IMAGE]], [[TEXT], [AUDIO, BOTH]], [[], [TEXT]], [[IMAGE, TEXT, AUDIO], [BOTH]]]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Forked ranks start quickly if the model's modules are here already."""
    small_model(torch.float32)


def losses_of(debug, exchange):
    """The loss of each micro-step of this rank, and the collectives."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ORCH_DEBUG", str(int(debug)))
        model = small_model(torch.float32)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        groups = Groups(draw(model.config, KINDS)[dist.get_rank()])
        options = {"accumulate": 2, "topology": Topology(4, 2), "timeout_s": 30}
        loader = orch.orchestrate(groups, ddp, exchange=exchange, **options)
    losses = []
    with CollectiveLog() as log:
        for batch in loader:
            loss = ddp(**batch).loss
            loss.backward()
            losses.append(loss.item())
    gradients = [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None]
    return losses, gradients, [(entry.label, entry.num_bytes) for entry in log.entries]


def test_a_right_run_is_the_same_under_debug():
    def run():
        return [[losses_of(debug, exchange) for debug in (False, True)] for exchange in ("flat", "node_wise")]

    for by_exchange in run_ranks(run, 4):
        for (losses, gradients, plain), (same_losses, same_gradients, tagged) in by_exchange:
            assert len(losses) == 2
            assert (same_losses, same_gradients) == (losses, gradients)
            assert sorted(label for label, _ in tagged) == sorted(label for label, _ in plain)
            assert sum(size for _, size in tagged) > sum(size for _, size in plain)


def train(debug, balance="post"):
    """Samples of equal size all around: two that change places do so unseen."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ORCH_DEBUG", debug)
        model = small_model(torch.float32)
        num_samples = (7, 1)[dist.get_rank()]
        samples = [make_sample(model.config, 10 * dist.get_rank() + i, grids=[(4, 4)]) for i in range(num_samples)]
        loader = orch.orchestrate(Groups([samples]), model, balance=balance, topology=Topology(2), timeout_s=30)
    for batch in loader:
        model(**batch).loss.backward()


def swap_parcels(monkeypatch):
    """The first two pictures that leave rank 0 change places."""
    real = prepare.exchange_parcels

    def swapped(parcels, rearrangement, *rest, **options):
        moving = rearrangement.source.rank_of_item != rearrangement.target.rank_of_item
        a, b = [i for i, moves in enumerate(moving[rearrangement.source.rank_of_item == 0]) if moves and i >= 7][:2]
        parcels[a], parcels[b] = parcels[b], parcels[a]
        return real(parcels, rearrangement, *rest, **options)

    monkeypatch.setattr(prepare, "exchange_parcels", swapped)


def swap_rows(monkeypatch):
    """The rows of the first two pictures that rank 0 encodes and rank 1 needs change places."""
    real = micro_step.start_exchange

    def swapped(tensors, exchange, *rest, **options):
        first = int(exchange.send_splits[0])
        a, b = (torch.from_numpy(exchange.send_index[first + 4 * k : first + 4 * k + 4]) for k in range(2))
        order = torch.arange(len(tensors[0]))
        order[a], order[b] = b, a
        return real([tensor[order] for tensor in tensors], exchange, *rest, **options)

    monkeypatch.setattr(micro_step, "start_exchange", swapped)


def swap_gradients(monkeypatch):
    """The gradients that rank 1 sends back for the rows of the first two pictures that rank 0 encoded."""
    real = all_to_all.start_exchange

    def swapped(tensors, exchange, *rest, **options):
        if not options["label"].endswith(".backward"):
            return real(tensors, exchange, *rest, **options)
        a, b = (torch.from_numpy(exchange.send_index[4 * k : 4 * k + 4]) for k in range(2))
        order = torch.arange(len(tensors[0]))
        order[a], order[b] = b, a
        return real([tensor[order] for tensor in tensors], exchange, *rest, **options)

    monkeypatch.setattr(all_to_all, "start_exchange", swapped)


@pytest.mark.parametrize(
    ("corrupt", "sender", "balance", "where"),
    [
        (swap_parcels, 0, "post", "exchange raw items"),
        (swap_rows, 0, "llm", "stage vision, exchange rows"),
        (swap_gradients, 1, "llm", "stage vision, exchange gradients of rows"),
    ],
)
def test_what_changed_places_is_named(corrupt, sender, balance, where):
    def run(debug):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if dist.get_rank() == sender:
                corrupt(monkeypatch)
            train(debug, balance)

    run_ranks(run, 2, "0")
    receiver = run_ranks(run, 2, "1", expect_failure=True)[1 - sender]
    item = r"item \d of stage vision"
    said = rf"step 0, {where}: rank {sender} was to send {item}, but {item} of step 0 came instead"
    assert re.search(rf"MisroutedError: {said}", receiver.traceback)


def test_ranks_of_which_one_debugs_are_refused():
    def run():
        with pytest.raises(ValueError, match="but `debug` is False on rank 0 and True on rank 1 instead"):
            train(str(dist.get_rank()))

    run_ranks(run, 2)
