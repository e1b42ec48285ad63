"""At exit threads end, and then gloo's have a moment to drop their tensors, which they need the interpreter for."""

import itertools
import threading

import numpy as np
import pytest

from orch.comm import groups, liveness
from orch.odb import pipeline


@pytest.fixture
def events(monkeypatch):
    events = []
    for module in (liveness, pipeline):
        monkeypatch.setattr(module, "settle_before_exit", lambda: events.append("settled"))
    return events


def test_threads_of_loaders_have_ended_before(events):
    stop = threading.Event()

    def rounds():
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            yield [number]

    ahead = pipeline.Pipeline(rounds(), stop, lambda: events.append("released"))
    assert next(ahead) == 0
    pipeline._end_all()
    assert events[-2:] == ["released", "settled"]
    assert ahead.is_closed


def test_the_heartbeat_has_ended_before(events, monkeypatch):
    monkeypatch.setattr(liveness.Liveness, "stop", lambda self, finished: events.append(f"stopped {finished}"))
    alone = liveness.Liveness.__new__(liveness.Liveness)
    alone._idle = True
    alone._at_exit()
    assert events == ["stopped True", "settled"]


@pytest.mark.parametrize("seconds", [15, 1.5, np.float32(15), np.int64(15)])
def test_times_of_any_kind_of_number_are_waited_for(seconds):
    assert groups._timeout(seconds).total_seconds() == float(seconds)
