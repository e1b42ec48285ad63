"""Late or dead: a rank that beats is waited for, however long; one that is silent is named."""

from __future__ import annotations

import threading
import time
import weakref

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from orch.comm.counts import check_seconds
from orch.comm.groups import get_global_ranks
from orch.comm.heartbeats import Beat, Board, BoardLostError

DEFAULT_LOST_AFTER_S = 30.0
BEATS_UNTIL_LOST = 10


class RankLostError(RuntimeError):
    """A rank has gone, or has been silent for too long.

    Attributes:
        ranks: Which ones, as numbered in the world; empty if nobody could be found missing.
    """

    def __init__(self, ranks: list[int], message: str) -> None:
        self.ranks = ranks
        super().__init__(message)


class Heartbeat:
    """Beats for this rank in a thread, and looks for the beats of others when asked to.

    Args:
        group: Whose ranks beat; its name tells several loaders apart.
        rank: This rank in the group.
        lost_after_s: A rank that is silent for so long counts as lost.
    """

    def __init__(self, group: ProcessGroup, rank: int, lost_after_s: float = DEFAULT_LOST_AFTER_S) -> None:
        check_seconds("lost_after_s", lost_after_s)
        self.ranks, self.rank, self.lost_after_s = get_global_ranks(group), rank, lost_after_s
        store = dist.PrefixStore(f"odb/{group.group_name}", distributed_c10d._get_default_store())
        self._board = Board(store, len(self.ranks), limit_s=lost_after_s)
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped = threading.Event()
        args = (self._board, rank, lost_after_s / BEATS_UNTIL_LOST, self._stopped)
        threading.Thread(target=_beat, args=args, name="odb-heartbeat", daemon=True).start()
        weakref.finalize(self, self._stopped.set)

    def silent_ranks(self, for_s: float) -> list[int]:
        """Ranks (in the world) whose beat has stood still for so long, as far as it was looked at.

        Raises:
            RankLostError: If the store that holds the beats is gone.
        """
        try:
            beats = self._board.read()
        except BoardLostError as error:
            hosts = [] if error.host_rank is None else [error.host_rank]
            raise RankLostError(hosts, str(error)) from error
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank == self.rank:
                continue
            count = beat.count if beat else -1
            if self._seen.get(rank, (None, 0.0))[0] != count:
                self._seen[rank] = (count, now)
        return [self.ranks[rank] for rank, (_, since) in self._seen.items() if now - since >= for_s]

    def check(self) -> None:
        """Looks once; call it now and then while waiting.

        Raises:
            RankLostError: If a rank has been silent for too long since the first of these looks.
        """
        silent = self.silent_ranks(self.lost_after_s)
        if silent:
            raise RankLostError(
                silent, f"{_named(silent)} silent for {self.lost_after_s:g} s: dead, stopped or cut off."
            )

    def explain(self, error: BaseException) -> RankLostError:
        """Finds out who is missing after a collective failed; takes a few beats."""
        wait_s = 4 * self.lost_after_s / BEATS_UNTIL_LOST
        try:
            self.silent_ranks(wait_s)
            time.sleep(wait_s)
            silent = self.silent_ranks(wait_s * 0.9)
        except RankLostError as lost:
            return lost
        who = f"{_named(silent)} gone" if silent else "no rank is known to be gone"
        return RankLostError(silent, f"A collective of the loader failed; {who}. ({str(error).splitlines()[0]})")


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks} are"


def _beat(board: Board, rank: int, interval_s: float, stopped: threading.Event) -> None:
    count = 0
    while not stopped.is_set():
        count += 1
        try:
            board.post(rank, Beat(count, "loading", 0.0))
        except BoardLostError:
            return
        stopped.wait(interval_s)
