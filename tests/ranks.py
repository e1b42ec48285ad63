"""The only launcher of ranks in tests: fork, rendezvous by file, a wall-clock limit from the start.

Every rank is a process group of its own (workers that it starts end with it), dies with the test process, and runs
torch on one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_S = 3.0


@dataclass(slots=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: The rank.
        value: What its function returned; None if it did not return.
        returned: Whether its function returned.
        traceback: The traceback of the exception that ended it; empty if none did.
        exit_code: As in `multiprocessing.Process.exitcode`: -9 if killed by SIGKILL.
        seconds: From the start of the ranks to the end of this one.
        hung: Whether it had to be killed, at the limit or because all others were done and it was stopped.
        stderr: What it wrote to stderr; only caught with `expect_failure`.
    """

    rank: int
    value: Any = None
    returned: bool = False
    traceback: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    hung: bool = False
    stderr: str = ""

    @property
    def failed(self) -> bool:
        return not self.returned or self.exit_code != 0


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 60,
    expect_failure: bool = False,
    collective_timeout_s: float | None = None,
    init_process_group: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(*args)` on `num_ranks` forked ranks of one gloo process group.

    Args:
        fn: Runs on every rank; closures are fine. `torch.distributed` says which rank it is, and so do RANK,
            LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. What it returns must pickle.
        num_ranks: Number of ranks.
        *args: Given to `fn`.
        timeout_s: Wall-clock limit from the start; whoever is left then is killed.
        expect_failure: Return a `RankOutcome` for each rank, whatever happened, and let the others run on after a rank
            failed. A rank may kill or stop itself by `os.kill(os.getpid(), ...)`.
        collective_timeout_s: Timeout of the default process group; `timeout_s` by default.
        init_process_group: False leaves `torch.distributed` alone.
        env: Further environment variables of the ranks.

    Returns:
        What each rank returned, or with `expect_failure` how each rank ended.

    Raises:
        RuntimeError: If a rank failed, with the traceback of the first that did; names the ranks that hung.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _Ranks(num_ranks, Path(folder)) as ranks:
        setup = _Setup(folder, collective_timeout_s or timeout_s, init_process_group, expect_failure, env or {})
        ranks.start(fn, args, setup)
        ranks.watch(timeout_s, stop_at_first_failure=not expect_failure)
        outcomes = ranks.finish()
        if expect_failure:
            return outcomes
        _raise_first_failure(outcomes, ranks.failure_order, timeout_s)
        return [outcome.value for outcome in outcomes]


@dataclass(frozen=True, slots=True)
class _Setup:
    folder: str
    collective_timeout_s: float
    init_process_group: bool
    catch_stderr: bool
    env: dict[str, str]


class _Ranks(contextlib.AbstractContextManager["_Ranks"]):
    """The processes; nothing of them outlives the `with` block."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.folder = folder
        self.outcomes = [RankOutcome(rank) for rank in range(num_ranks)]
        self.failure_order: list[int] = []
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._started = time.monotonic()

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...], setup: _Setup) -> None:
        context = multiprocessing.get_context("fork")
        sys.stdout.flush()
        sys.stderr.flush()
        for outcome in self.outcomes:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(outcome.rank, len(self.outcomes), fn, args, setup, sender, os.getpid())
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._pipes.append(receiver)

    def watch(self, timeout_s: float, *, stop_at_first_failure: bool) -> None:
        """Takes in what the ranks send until all have ended or the time is up."""
        deadline = self._started + timeout_s
        running = set(range(len(self._processes)))
        while running and time.monotonic() < deadline:
            self._receive(running, min(0.5, max(deadline - time.monotonic(), 0.0)))
            for rank in [rank for rank in running if not self._processes[rank].is_alive()]:
                running.discard(rank)
                self._note_end(rank)
            if self.failure_order and stop_at_first_failure:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                stop_at_first_failure = False
            if running and all(_is_stopped(self._processes[rank].pid) for rank in running):
                break
        for rank in running:
            self.outcomes[rank].hung = True
            self._kill(rank)
            self._note_end(rank)

    def finish(self) -> list[RankOutcome]:
        for outcome in self.outcomes:
            path = self.folder / f"stderr-{outcome.rank}"
            outcome.stderr = path.read_text(errors="replace") if path.exists() else ""
        return self.outcomes

    def _receive(self, running: set[int], wait_s: float) -> None:
        rank_of_pipe = {self._pipes[rank]: rank for rank in running if not self._pipes[rank].closed}
        sentinels = [self._processes[rank].sentinel for rank in running]
        for ready in wait([*rank_of_pipe, *sentinels], timeout=wait_s):
            if isinstance(ready, Connection):
                self._take_message(rank_of_pipe[ready])

    def _take_message(self, rank: int) -> None:
        outcome, pipe = self.outcomes[rank], self._pipes[rank]
        try:
            returned, content = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            pipe.close()
            return
        outcome.returned = returned
        if returned:
            outcome.value = content
        else:
            outcome.traceback = content
            self.failure_order.append(rank)

    def _note_end(self, rank: int) -> None:
        process, outcome = self._processes[rank], self.outcomes[rank]
        while not self._pipes[rank].closed and self._pipes[rank].poll():
            self._take_message(rank)
        process.join()
        outcome.exit_code, outcome.seconds = process.exitcode, time.monotonic() - self._started
        if outcome.failed and rank not in self.failure_order and not outcome.hung:
            self.failure_order.append(rank)
        self._kill(rank)

    def _kill(self, rank: int) -> None:
        """Kills the rank and whatever it started."""
        pid = self._processes[rank].pid or 0
        assert pid > 0, pid
        for kill in (os.killpg, os.kill) if self._processes[rank].is_alive() else (os.killpg,):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self._processes):
            self._kill(rank)
            process.join()
            self._pipes[rank].close()


def _rank_main(
    rank: int,
    num_ranks: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    setup: _Setup,
    pipe: Connection,
    parent_pid: int,
) -> None:
    os.setpgid(0, 0)
    _die_with_parent(parent_pid)
    import torch

    torch.set_num_threads(1)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _set_environment(rank, num_ranks, setup)
    try:
        with _process_group(rank, num_ranks, setup):
            message = pickle.dumps((True, fn(*args)))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, "".join(traceback.format_exception(error)))))
        sys.excepthook(type(error), error, error.__traceback__)
        pipe.close()
        _exit(1)
    pipe.send_bytes(message)
    pipe.close()
    _exit(0)


def _exit(code: int) -> None:
    """Ends the rank without the exit handlers that it inherited from pytest."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _set_environment(rank: int, num_ranks: int, setup: _Setup) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks), **setup.env
    )
    if setup.catch_stderr:
        target = os.open(f"{setup.folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 2)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


@contextlib.contextmanager
def _process_group(rank: int, num_ranks: int, setup: _Setup) -> Iterator[None]:
    if not setup.init_process_group:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{setup.folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=setup.collective_timeout_s),
    )
    dist.barrier()  # a rank that is done at once must not leave while others still connect to it
    yield
    if not setup.catch_stderr:
        dist.barrier()  # nor while they still make a group with it
    dist.destroy_process_group()


def _is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _raise_first_failure(outcomes: list[RankOutcome], order: list[int], timeout_s: float) -> None:
    hung = [outcome.rank for outcome in outcomes if outcome.hung]
    if not hung and not order:
        return
    message = f"Ranks {hung} hung and were killed (limit {timeout_s} s). " if hung else ""
    if order:
        first = outcomes[order[0]]
        reason = first.traceback or f"It ended without a traceback, with exit code {first.exit_code}."
        message += f"Rank {first.rank} failed first:\n{reason}"
    raise RuntimeError(message)
