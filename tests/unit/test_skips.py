"""Ranks tell each other which batches they skipped; whoever looks ahead, or is late, has skipped none of these."""

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orch.skips import Skips, skipped_apart


class Script:
    """A rank's loop: it is handed batches and runs the model on all but some, each `looks_ahead` batches later."""

    def __init__(self, skipped, looks_ahead, num_held=2):
        self.skips, self.skipped, self.looks_ahead = Skips(num_held), skipped, looks_ahead
        self.events = []

    def hand_over(self, late=0):
        self.events.append(threading.Event())
        self.skips.hand_over(self.events[-1])
        for number in range(len(self.events) - self.looks_ahead - late):
            if number not in self.skipped:
                self.events[number].set()


NUMBERS = st.sets(st.integers(0, 19))


@settings(max_examples=200)
@given(
    NUMBERS, st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 3), min_size=20, max_size=20)), min_size=2)
)
def test_ranks_that_skip_the_same_are_never_told_apart(skipped, ranks):
    """Whatever each holds, and however late each is at any time."""
    scripts = [Script(skipped, looks_ahead) for looks_ahead, _ in ranks]
    for number in range(20):
        for script, (_, late) in zip(scripts, ranks, strict=True):
            script.hand_over(late[number])
        assert skipped_apart([script.skips.told() for script in scripts]) is None


@settings(max_examples=200)
@given(NUMBERS, NUMBERS, st.integers(0, 6), st.integers(0, 6))
def test_ranks_that_skip_others_are_found_before_long(skipped, others, ahead, more_ahead):
    scripts = [Script(skipped, ahead), Script(others, more_ahead)]
    found = []
    for _ in range(32):
        for script in scripts:
            script.hand_over()
        found.append(skipped_apart([script.skips.told() for script in scripts]))
    if skipped == others:
        assert found == [None] * 32
        return
    first = min(skipped ^ others)
    at = next(number for number, told in enumerate(found) if told is not None)
    assert first < at + 1 <= first + 2 + 8 + 1 + max(ahead, more_ahead) + len(skipped | others)
    assert found[at] in ([len(set(range(n)) & skipped), len(set(range(n)) & others)] for n in range(first + 1, 21))


@pytest.mark.parametrize("num_batches", [3, 40, 90, 200])
def test_all_that_was_decided_long_ago_is_forgotten_alike(num_batches):
    """One bit each of the last 62."""
    scripts = [Script(set(range(0, 200, 3)), looks_ahead) for looks_ahead in (0, 1, 4)]
    for _, script in itertools.product(range(num_batches), scripts):
        script.hand_over()
    told = [script.skips.told() for script in scripts]
    assert skipped_apart(told) is None
    assert max(bits for _, bits in told) < 1 << 62
    assert skipped_apart([(0, 0), (100, 5)]) is None  # too far apart to know


def test_a_batch_is_run_on_late_but_not_skipped():
    script = Script(set(), looks_ahead=0, num_held=1)
    for _ in range(4):
        script.hand_over(late=99)
    assert script.skips.told() == (0, 0)
    script.events[2].set()
    assert script.skips.told() == (3, 0b110)
    script.events[3].set()
    assert script.skips.told() == (4, 0b1100)


def test_a_script_that_runs_on_nothing_has_skipped_what_it_could_hardly_hold():
    script = Script(set(range(20)), looks_ahead=0, num_held=1)
    for _ in range(12):
        script.hand_over()
    assert script.skips.told() == (3, 0b111)
