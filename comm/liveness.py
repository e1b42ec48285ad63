"""Who is alive: heartbeats, so that a collective that fails or hangs ends with the name of the rank to blame.

While all is well a rank writes one short key a second and reads nothing. It reads all others' only after a collective
of its own has failed. While its training thread says nothing it watches those of the ranks behind it, and what others
say who watch the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from orch.comm.gather import RankFailedError
from orch.comm.groups import get_rank, get_world_size, settle_before_exit
from orch.comm.heartbeats import Beat, Board, BoardLostError, Failure, LivenessConfig
from orch.comm.lost_peers import PeerLostError, PeerWatch, first_line, is_of_a_collective, peer_lost_error

_MEET_INTERVAL_S = 0.02
_NUM_WATCHED = 32  # In 2,560 ranks, one that hosts the store is asked for 82,000 beats a second, a quarter of a core.
_MAX_TOLD = 8


class Liveness:
    """The heartbeat of this rank, and its view of the others. Made by `Liveness.start`.

    Args:
        board: Where ranks post; None for a world of one, in which nothing is ever missing.
        rank: This rank.
        config: Limits.
    """

    def __init__(self, board: Board | None, rank: int, config: LivenessConfig) -> None:
        self.board, self.rank, self.config = board, rank, config
        self._training, self._background = "starting", ""
        self._idle, self._since = True, time.monotonic()
        self._count = 0
        self._failures: dict[int, Failure] = {}
        self._num_failures_read = 0
        self._victim = False
        self._num_met = 0
        self._stopped = threading.Event()
        self._pid = os.getpid()

    @classmethod
    def start(cls, config: LivenessConfig | None = None) -> Liveness:
        """Begins to beat in a background thread, on the store of the default process group.

        All ranks of the world call it. It posts uncaught exceptions of the main thread (`sys.excepthook`), and says
        good-bye when the interpreter exits.
        """
        config = config or LivenessConfig()
        num_ranks = get_world_size()
        limit_s = max(config.suspect_after_s, 2.0)
        liveness = cls(Board.on_default_store(num_ranks, limit_s) if num_ranks > 1 else None, get_rank(), config)
        if liveness.board is not None:
            liveness._begin(liveness.board)
        return liveness

    def note(
        self,
        phase: str,
        *,
        step: int | None = None,
        stage: str | None = None,
        idle: bool = False,
        training: bool | None = None,
    ) -> None:
        """Says what this thread does from now on; costs no communication.

        The training thread is the one that must make progress; other threads are only spoken of.

        Args:
            phase: In a word or two: "gather", "encode", "exchange", "train".
            step: The step it belongs to.
            stage: The stage it belongs to.
            idle: Between epochs, after training: leaving now is no failure. In another thread: it does nothing.
            training: Whether it is said for the training thread, as by autograd's own; if not given, whether this is
                the main thread.
        """
        if training is None:
            training = threading.current_thread() is threading.main_thread()
        where = [f"step {step}"] if step is not None else []
        doing = ", ".join([*where, *([f"stage {stage}"] if stage else []), phase])
        if training:
            self._training, self._idle, self._since, self._victim = doing, idle, time.monotonic(), False
        else:
            self._background = "" if idle else doing

    def pause(self) -> None:
        """From now on leaving is no failure, as with `idle`; what this rank did last is still told should it fail."""
        self._idle = True

    @property
    def doing(self) -> str:
        """What this rank does, in words."""
        return f"{self._training}; in the background {self._background}" if self._background else self._training

    @contextlib.contextmanager
    def guard(
        self, phase: str, *, step: int | None = None, stage: str | None = None, training: bool | None = None
    ) -> Iterator[None]:
        """Around a collective: notes it, and turns its failure into a `PeerLostError` (see `explain`)."""
        self.note(phase, step=step, stage=stage, training=training)
        try:
            yield
        except (RankFailedError, PeerLostError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self.explain(error) from error

    def meet(self, what: str, ranks: Sequence[int]) -> int:
        """Waits, up to `lost_after_s`, until all of `ranks` have come here with the same `what`; how many have.

        No collective: a rank that never comes knows nothing of it.

        Raises:
            BoardLostError: If the store does not answer.
        """
        if self.board is None:
            return 1
        key, deadline = f"{min(ranks)}/{self._num_met}/{what}", time.monotonic() + self.config.lost_after_s
        self._num_met += 1
        num_here = self.board.count(key, 1)
        while num_here < len(ranks) and time.monotonic() < deadline:
            time.sleep(_MEET_INTERVAL_S)
            num_here = self.board.count(key, 0)
        return num_here

    def missing_ranks(self, wait_s: float | None = None) -> list[int]:
        """Ranks not heard of in `wait_s` seconds (`suspect_after_s` by default), or gone, or failed; waits that long.

        Raises:
            BoardLostError: If the store does not answer.
        """
        if self.board is None:
            return []
        watch, limit_s = self._watch_for(self.board, wait_s or self.config.suspect_after_s)
        return sorted({*watch.missing(limit_s), *self._failures} - {self.rank})

    def explain(self, error: BaseException) -> PeerLostError:
        """Finds out who is missing after a collective failed or timed out; takes up to `suspect_after_s`.

        Returns:
            An error that names the missing ranks and says what each did last, and why it failed if it said so; or,
            if none is missing, which have left, and what each rank is doing.
        """
        if self.board is None:
            return PeerLostError(self.rank, self.doing, (), f"there is no other rank: {first_line(error)}")
        try:
            watch, limit_s = self._watch_for(self.board, self.config.suspect_after_s)
        except BoardLostError as lost:
            self._victim = True
            ranks = () if lost.host_rank is None else (lost.host_rank,)
            return PeerLostError(self.rank, self.doing, ranks, f"{lost}\n(The collective said: {first_line(error)})")
        explained = peer_lost_error(self.doing, error, watch, limit_s, self._failures)
        if explained.ranks:
            self._victim = True
            with contextlib.suppress(BoardLostError):
                self._post()
        return explained

    def post_failure(self, text: str) -> None:
        """Tells the others why this rank fails; its own error is never hidden by a store that is gone."""
        if self.board is not None:
            with contextlib.suppress(BoardLostError):
                self.board.post_failure(Failure(self.rank, f"in {self.doing}: {text}", self.rank))

    def stop(self, *, finished: bool = True) -> None:
        """Ends the heartbeat; `finished` says that this rank ends as it should. Called at exit if not before."""
        if self._stopped.is_set() or self.board is None or os.getpid() != self._pid:
            return
        self._stopped.set()
        self._thread.join(timeout=self.board.limit_s)
        with contextlib.suppress(BoardLostError):
            self._post("left" if finished else "gone")
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._next_hook

    def _begin(self, board: Board) -> None:
        self._post()
        self._next_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        self._monitor = _Monitor(self, board)
        self._thread = threading.Thread(target=self._monitor.run, name="orch-liveness", daemon=True)
        self._thread.start()

    def _at_exit(self) -> None:
        self.stop(finished=self._idle)
        settle_before_exit()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid and not self._stopped.is_set():
            self._victim = self._victim or isinstance(error, (RankFailedError, PeerLostError))
            if is_of_a_collective(error) and not isinstance(error, (RankFailedError, PeerLostError)):
                _say(f"orch: {self.explain(error)}")
            if not self._victim:
                self.post_failure(_in_a_line(kind, error, trace))
        self._next_hook(kind, error, trace)
        if self.board is not None and self.board.host_rank == self.rank:
            time.sleep(4 * self.config.interval_s)  # The store ends with this process: let the others read why.

    def _post(self, state: str = "running") -> None:
        assert self.board is not None
        self._count += 1
        state = "victim" if self._victim else state
        self.board.post(self.rank, Beat(self._count, self.doing, round(time.monotonic() - self._since, 1), state))

    def _read_failures(self, board: Board) -> dict[int, Failure]:
        """Failures of other ranks, by rank; the first of each counts."""
        first = self._num_failures_read
        failures = board.read_failures(first)
        self._num_failures_read = max(self._num_failures_read, first + len(failures))
        for failure in failures:
            if failure.rank != self.rank:
                self._failures.setdefault(failure.rank, failure)
        return self._failures

    def _watch_for(self, board: Board, seconds: float) -> tuple[PeerWatch, float]:
        """Reads all beats twice, `seconds` apart or less if a rank says that it failed; and how long silence counts."""
        watch, deadline = PeerWatch(self.rank, board.num_ranks), time.monotonic() + seconds
        watch.update(board.read())
        while time.monotonic() < deadline and not self._read_failures(board):
            time.sleep(min(self.config.interval_s, max(deadline - time.monotonic(), 0)))
        watch.update(board.read())
        return watch, 0.9 * seconds


def _in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{kind.__name__}: {error}{where}"


class _Monitor:
    """Beats; and while the training thread is silent, looks whether a peer is lost, says so and ends the process.

    It watches the next ranks only, in a ring, so that what all ranks read does not grow with their square; when it ends
    the process it tells those who watch others.
    """

    def __init__(self, liveness: Liveness, board: Board) -> None:
        self._liveness, self._board, self._config = liveness, board, liveness.config
        behind = range(1, min(board.num_ranks, _NUM_WATCHED + 1))
        self._watched = sorted((liveness.rank + i) % board.num_ranks for i in behind)
        self._watch: PeerWatch | None = None
        self._reported: float | None = None

    def run(self) -> None:
        while not self._liveness._stopped.wait(self._config.interval_s):
            silent_s = time.monotonic() - self._liveness._since
            if silent_s < 2 * self._config.interval_s:
                self._watch, self._reported = None, None
            lost = self._beat_and_look(silent_s)
            if lost:
                self._report(lost)

    def _beat_and_look(self, silent_s: float) -> str:
        """Who is lost, in words; empty while nobody is known to be."""
        try:
            self._liveness._post()
            if silent_s < 2 * self._config.interval_s:
                return ""
            failures = self._liveness._read_failures(self._board)
            return "\n".join(str(failures[rank]) for rank in sorted(failures)) or self._look()
        except BoardLostError as error:
            limit_s = self._config.lost_after_s
            return str(error) if silent_s >= limit_s and not self._liveness._idle else ""

    def _look(self) -> str:
        if self._watch is None:
            self._watch = PeerWatch(self._liveness.rank, self._board.num_ranks, self._watched)
        self._watch.update(self._board.read(self._watched))
        return self._watch.describe(self._watch.missing(self._config.lost_after_s))

    def _report(self, lost: str) -> None:
        """Says once who is lost, and ends the process if the training thread still does not go on."""
        now, liveness, end_after_s = time.monotonic(), self._liveness, self._config.end_after_s
        if end_after_s is not None and any(failure.by != failure.rank for failure in liveness._failures.values()):
            end_after_s = min(end_after_s, self._config.interval_s)  # Others have waited as long and have ended.
        head = f"orch: rank {liveness.rank} waits in {liveness.doing} for {now - liveness._since:.0f} s"
        if self._reported is None:
            self._reported = now
            limit = "" if end_after_s is None else f"\nIt ends in {end_after_s:g} s unless it goes on."
            _say(f"{head}, but:\n{lost}{limit}")
        elif end_after_s is not None and now - self._reported >= end_after_s:
            _say(f"{head} and ends now, because:\n{lost}")
            with contextlib.suppress(BoardLostError):
                liveness._victim = True
                liveness._post()
                self._tell()
            os._exit(1)

    def _tell(self) -> None:
        """Tells the others who is lost, unless somebody has."""
        missing = self._watch.missing(self._config.lost_after_s) if self._watch is not None else []
        if self._watch is None or self._liveness._read_failures(self._board):
            return
        for rank in missing[:_MAX_TOLD]:
            self._board.post_failure(Failure(rank, self._watch.describe_one(rank), self._liveness.rank))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
