"""What is prepared in the background is bounded, and so is its life."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from orch.prefetch import Prefetcher


class Counted:
    """Numbers from 0 on; how many have been begun, and how many at most beyond what was consumed."""

    def __init__(self, closing, end=None, error=None):
        self.closing, self.end, self.error = closing, end, error
        self.num_begun = self.num_consumed = self.most_ahead = 0

    def __iter__(self):
        for number in itertools.count():
            if self.closing.is_set() or number == self.end:
                break
            self.num_begun += 1
            self.most_ahead = max(self.most_ahead, self.num_begun - self.num_consumed)
            yield number
        if self.error is not None:
            raise self.error


def prefetch(depth, **options):
    closing = threading.Event()
    source = Counted(closing, **options)
    return source, Prefetcher(source, depth, closing, on_wait=lambda _: None)


def wait_until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_it_runs_ahead_by_its_depth_and_one_in_hand(depth):
    source, ahead = prefetch(depth)
    for number in range(4):
        wait_until(lambda: source.num_begun == source.num_consumed + depth + 1)
        time.sleep(0.05)
        assert source.num_begun == source.num_consumed + depth + 1
        source.num_consumed += 1  # before, not after: the thread goes on once there is room
        assert ahead.next() == number
    assert ahead.close(timeout_s=5)
    assert source.most_ahead == depth + 1


@pytest.mark.parametrize("error", [None, ArithmeticError("struck"), KeyboardInterrupt()])
def test_results_come_in_order_and_then_the_end_or_the_error(error):
    _, ahead = prefetch(2, end=7, error=error)
    assert [ahead.next() for _ in range(7)] == list(range(7))
    if error is None:
        assert ahead.next() is None
    else:
        with pytest.raises(type(error)) as caught:
            ahead.next()
        assert caught.value is error
    assert ahead.close(timeout_s=5)


def test_closing_ends_a_thread_that_waits_for_room():
    source, ahead = prefetch(1)
    wait_until(lambda: source.num_begun == 2)
    assert ahead.close(timeout_s=5)
    assert not ahead._thread.is_alive()
    assert source.num_begun == 2


def test_closing_does_not_interrupt_the_source_but_says_that_it_lives():
    go_on, closing = threading.Event(), threading.Event()

    def source():
        go_on.wait(10)
        yield 0

    ahead = Prefetcher(source(), 1, closing, on_wait=lambda _: None)
    assert not ahead.close(timeout_s=0.05)
    go_on.set()
    assert ahead.close(timeout_s=5)


def test_a_wait_may_be_given_up():
    go_on, closing, waited = threading.Event(), threading.Event(), []

    def source():
        go_on.wait(10)
        yield 0

    def give_up(seconds):
        waited.append(seconds)
        if seconds >= 1.0:
            raise TimeoutError

    ahead = Prefetcher(source(), 1, closing, give_up)
    with pytest.raises(TimeoutError):
        ahead.next()
    assert waited == [0.5, 1.0]
    go_on.set()
    assert ahead.close(timeout_s=5)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_once_closed_it_hands_out_nothing_of_what_is_ready(depth):
    source, ahead = prefetch(depth)
    assert ahead.next() == 0
    wait_until(lambda: source.num_begun == 1 + depth + (depth > 0))
    assert ahead.close(timeout_s=5)
    assert ahead.is_closed
    with pytest.raises(RuntimeError, match="This iteration has ended"):
        ahead.next()


def test_without_depth_there_is_no_thread():
    source, ahead = prefetch(0, end=2, error=ArithmeticError("struck"))
    assert [ahead.next(), source.num_begun, ahead.next(), source.num_begun] == [0, 1, 1, 2]
    with pytest.raises(ArithmeticError):
        ahead.next()


def test_without_depth_closing_lets_the_source_come_to_its_end():
    """Others may wait in a collective that this one is still to enter; it does not keep who closes waiting."""
    entered, go_on, closing, said = threading.Event(), threading.Event(), threading.Event(), []

    def source():
        while not closing.is_set():
            yield 0
        entered.set()
        go_on.wait(10)
        said.append("end")

    ahead = Prefetcher(source(), 0, closing, on_wait=lambda _: None)
    assert ahead.next() == 0
    assert not ahead.close(timeout_s=0.05)
    assert entered.wait(10)
    go_on.set()
    assert ahead.close(timeout_s=5)
    assert said == ["end"]
