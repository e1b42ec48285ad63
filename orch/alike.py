"""Ranks that were set up differently are told so at the start, before they wait for each other in vain."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import ProcessGroup

from orch.comm.gather import gather_ragged
from orch.comm.groups import get_global_ranks
from orch.comm.hosts import decode_text, encode_text


def check_alike(choices: Mapping[str, object], group: ProcessGroup | None) -> None:
    """Compares what ranks were told to do; all of them call it.

    Args:
        choices: Names and values, whose `repr` is compared; the same names on all ranks of one version.
        group: A CPU (gloo) group; None for the world.

    Raises:
        ValueError: On all ranks alike, if any differs; names the ranks and what they have in place of rank 0's.
    """
    own = "\n".join(f"{name}={value!r}" for name, value in choices.items())
    ranks = get_global_ranks(group)
    told = [decode_text(words).split("\n") for words in gather_ragged(encode_text(own), group, label="choices")]
    wrong = [
        f"rank {rank} has {_only_in(lines, told[0])} where rank {ranks[0]} has {_only_in(told[0], lines)}"
        for rank, lines in zip(ranks, told, strict=True)
        if lines != told[0]
    ]
    if wrong:
        raise ValueError(f"`orch.orchestrate` must be set up alike on all ranks, but {'; '.join(wrong)} instead.")


def _only_in(lines: list[str], others: list[str]) -> str:
    return ", ".join(line for line in lines if line not in others) or "nothing"
