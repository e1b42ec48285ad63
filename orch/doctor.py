"""`orch doctor`: looks at versions, launcher, network, nodes and groups before a run does, and says what to do.

orch doctor                                                     # this machine, on two processes of its own
torchrun --nnodes 2 --nproc-per-node 8 ... -m orch.doctor       # the cluster, as a run would be started
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orch import __version__
from orch.comm.launchers import read_launcher

OK, NOTE, FAIL = "ok", "note", "FAIL"
OLDEST = {"torch": (2, 6), "transformers": (5, 0), "deepspeed": (0, 16)}
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_DEBUG")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        level: "ok", "note" (works, but read it) or "FAIL" (a run would fail).
        subject: What was looked at.
        text: What was found, and what to do where it is not well.
    """

    level: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:>4}  {self.subject}: {self.text}"


def check_versions() -> list[Finding]:
    """Python, orch and what it stands on."""
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding(OK, "versions", f"orch {__version__}, Python {python}")]
    for package, oldest in OLDEST.items():
        wanted = ".".join(map(str, oldest))
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            optional = package == "deepspeed"
            advice = "not installed (needed for ZeRO only)" if optional else f"not installed: pip install {package}"
            findings.append(Finding(NOTE if optional else FAIL, package, advice))
            continue
        is_old = tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < oldest
        advice = f", older than {wanted}: pip install -U {package}" if is_old else ""
        findings.append(Finding(FAIL if is_old else OK, package, found + advice))
    return findings


def check_solver() -> Finding:
    """Whether the solver of placements loads."""
    try:
        importlib.import_module("orch.comm.placement_ilp")
    except Exception as error:
        return Finding(
            FAIL, "solver", f"{type(error).__name__}: {error}; try: pip install --force-reinstall highspy pulp"
        )
    return Finding(OK, "solver", "HiGHS loads")


def check_devices() -> Finding:
    """GPUs and what moves data between them."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Finding(NOTE, "devices", "no GPU: encoder outputs travel by gloo")
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if dist.is_nccl_available() else "no NCCL"
    level = OK if dist.is_nccl_available() else FAIL
    return Finding(level, "devices", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {nccl}")


def check_launcher(environ: Mapping[str, str] | None = None) -> Finding:
    """What the launcher says, and whether a process group can be made from it."""
    environ = os.environ if environ is None else environ
    try:
        view = read_launcher(environ)
    except ValueError as error:
        return Finding(FAIL, "launcher", str(error))
    if view.launcher == "none" and view.num_ranks == 1:
        return Finding(NOTE, "launcher", "none: started alone, so that only this machine is looked at")
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    where = f"{view.num_ranks} ranks, {view.local_size or '?'} on this node"
    if missing:
        advice = f"{view.launcher} leaves {missing} unset, which torch.distributed needs: see examples/launch"
        return Finding(FAIL, "launcher", f"{where}; {advice}")
    return Finding(OK, "launcher", f"{view.launcher}, {where}")


def check_network(environ: Mapping[str, str] | None = None, num_nodes: int = 1) -> Finding:
    """Whether backends are told which network to use."""
    environ = os.environ if environ is None else environ
    known = ", ".join(f"{name}={environ[name]}" for name in NETWORK_VARIABLES if name in environ)
    if num_nodes > 1 and environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return Finding(FAIL, "network", "GLOO_SOCKET_IFNAME=lo reaches no other node: name the interface between nodes")
    if num_nodes > 1 and "GLOO_SOCKET_IFNAME" not in environ:
        advice = "if ranks do not find each other, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface"
        return Finding(NOTE, "network", f"{known + '; ' if known else ''}{advice} between nodes, from `ip addr`")
    return Finding(OK, "network", known or "left to torch")


def local_findings() -> list[Finding]:
    """What one process can look at by itself."""
    return [*check_versions(), check_solver(), check_devices(), check_launcher()]


def report(findings: Sequence[Finding]) -> int:
    """Prints findings and a verdict; returns the exit status, 1 if a run would fail."""
    for finding in findings:
        print(finding)
    num_failed = sum(finding.level == FAIL for finding in findings)
    print(f"{num_failed} of {len(findings)} would make a run fail." if num_failed else "A run can start.")
    sys.stdout.flush()
    return int(num_failed > 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `orch doctor`."""
    parser.add_argument(
        "--hostfile", default=None, help="a DeepSpeed hostfile to hold against the hosts that there are"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to try with when started without a launcher")
    parser.add_argument("--megabytes", type=float, default=8.0, help="what each rank sends in a test of speed")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="seconds after which a test counts as failed")


def run(options: argparse.Namespace) -> int:
    """Looks at everything; returns the exit status."""
    from orch.self_test import try_alone, try_cluster

    mine = local_findings()
    launcher = next(finding for finding in mine if finding.subject == "launcher")
    if launcher.level == OK:
        return try_cluster(options, mine)
    return report([*mine, *([] if any(finding.level == FAIL for finding in mine) else try_alone(options))])


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m orch.doctor`."""
    parser = argparse.ArgumentParser(
        prog="orch doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
