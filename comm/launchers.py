"""What launchers say of ranks and nodes, in environment variables and files: torchrun, DeepSpeed, SLURM, Open MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LauncherView:
    """What the launcher told this process.

    Attributes:
        launcher: "torchrun", "deepspeed", "slurm", "mpi", or "none".
        num_ranks: World size.
        local_size: Ranks on this node; None if it does not say.
        num_nodes: Number of nodes; None if it does not say.
        node_sizes: Ranks on each node, where it says so for all.
    """

    launcher: str
    num_ranks: int = 1
    local_size: int | None = None
    num_nodes: int | None = None
    node_sizes: tuple[int, ...] | None = None


def read_launcher(environ: Mapping[str, str] | None = None) -> LauncherView:
    """What the environment variables of this process (or `environ`) say.

    Of several launchers the innermost counts: torchrun within SLURM is torchrun.

    Raises:
        ValueError: If a variable is not a positive number, or SLURM's list of nodes cannot be read.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" in environ and "LOCAL_WORLD_SIZE" in environ:
        return _counts(environ, "torchrun", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    if "WORLD_SIZE" in environ and "LOCAL_SIZE" in environ:
        return _counts(environ, "deepspeed", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return _counts(environ, "mpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ:
        return _slurm(environ)
    return LauncherView("none", _count(environ, "WORLD_SIZE") or 1)


def node_sizes_of(view: LauncherView) -> tuple[int, ...]:
    """Ranks on each node, as far as the launcher's words determine them.

    Raises:
        ValueError: If they do not, or contradict each other.
    """
    if view.node_sizes is not None:
        return view.node_sizes
    if view.local_size is None:
        return (view.num_ranks,)
    full, rest = divmod(view.num_ranks, view.local_size)
    sizes = (view.local_size,) * full + (rest,) * (rest > 0)
    if view.num_nodes in (None, len(sizes)):
        return sizes
    raise ValueError(
        f"The nodes of {view.launcher} must be told from {view.num_ranks} ranks in all and {view.local_size} on this "
        f"node, but it counts {view.num_nodes} nodes instead of {len(sizes)}: they are uneven. Take "
        "`Topology.from_hostfile(...)`, `Topology(num_ranks, node_sizes=(...))`, or `discover_topology()`, which asks "
        "all ranks."
    )


def read_hostfile(path: str | os.PathLike[str]) -> dict[str, int]:
    """Slots of each host of a DeepSpeed hostfile, in the order of the file.

    Raises:
        ValueError: If a line cannot be read, a host is named twice, or there is no host; says which line.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([1-9]\d*)", entry)
        if match is None:
            raise ValueError(f"Line {number} of {path} must be like 'worker-1 slots=8', but is {line!r} instead.")
        if match[1] in slots:
            raise ValueError(f"A host of {path} must be named once, but {match[1]!r} is named again in line {number}.")
        slots[match[1]] = int(match[2])
    if not slots:
        raise ValueError(f"{path} must name at least one host, but names none instead.")
    return slots


def parse_tasks_per_node(text: str) -> tuple[int, ...]:
    """SLURM's short form: "8(x2),4" is (8, 8, 4).

    Raises:
        ValueError: If it is something else.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM's tasks per node must be like '8(x2),4', but are {text!r} instead.")
        sizes += [int(match[1])] * int(match[2] or 1)
    return tuple(sizes)


def _slurm(environ: Mapping[str, str]) -> LauncherView:
    """SLURM's own numbering of tasks; a step (`srun`) may be smaller than its job."""
    num_ranks = _count(environ, "SLURM_STEP_NUM_TASKS") or _count(environ, "SLURM_NTASKS") or 1
    if "cyclic" in environ.get("SLURM_DISTRIBUTION", "").split(":")[0]:
        raise ValueError(
            "SLURM must number ranks node by node, but SLURM_DISTRIBUTION is "
            f"{environ['SLURM_DISTRIBUTION']!r} instead: start with `srun --distribution=block`."
        )
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    sizes = parse_tasks_per_node(text) if text else None
    if sizes is not None and sum(sizes) != num_ranks:
        raise ValueError(f"SLURM's tasks per node must add up to {num_ranks} tasks, but are {text!r} instead.")
    node = environ.get("SLURM_NODEID", "")
    local = sizes[int(node)] if sizes is not None and node.isdigit() and int(node) < len(sizes) else None
    return LauncherView("slurm", num_ranks, local, len(sizes) if sizes else None, sizes)


def _counts(environ: Mapping[str, str], launcher: str, world: str, local: str, nodes: str) -> LauncherView:
    return LauncherView(launcher, _count(environ, world) or 1, _count(environ, local), _count(environ, nodes))


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"The environment variable {name} must be a positive number, but is {text!r} instead.")
    return int(text)
