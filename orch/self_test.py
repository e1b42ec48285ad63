"""The tests of `orch doctor` that take several ranks: do they agree, where are they, does every group carry rows."""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from orch.comm.all_to_all import exchange_rows
from orch.comm.gather import Status, gather
from orch.comm.groups import Group, get_rank, new_cpu_group, new_node_groups
from orch.comm.hosts import check_topology, decode_text, discover_topology, encode_text, gather_hosts
from orch.comm.layout import Exchange, Layout, Rearrangement
from orch.comm.topology import Topology
from orch.doctor import FAIL, NOTE, OK, Finding, check_network, report

ROW_BYTES = 4096


def try_cluster(options: argparse.Namespace, mine: Sequence[Finding]) -> int:
    """Joins the ranks of the launcher, tries everything, and lets rank 0 report; returns the exit status."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    limit = timedelta(seconds=options.timeout_s)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=limit)
    except Exception as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        advice = f"is {address} reachable from here, and were as many ranks started as WORLD_SIZE says?"
        return report([*mine, Finding(FAIL, "process group", f"{_line(error)}; {advice}")])
    findings = [*mine, *try_groups(options, mine)]
    status = report(findings) if dist.get_rank() == 0 else int(any(f.level == FAIL for f in findings))
    dist.destroy_process_group()
    return status


def try_alone(options: argparse.Namespace) -> list[Finding]:
    """Starts a few processes on this machine and tries the groups there; what their first rank found."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory(prefix="orch-doctor-") as folder:
        ranks = [
            context.Process(target=_rank_main, args=(rank, options, folder, queue), daemon=True)
            for rank in range(options.ranks)
        ]
        for rank in ranks:
            rank.start()
        try:
            return list(queue.get(timeout=options.timeout_s + 60))
        except Exception:
            text = f"{options.ranks} processes on this machine did not come together in {options.timeout_s:.0f} s"
            return [Finding(FAIL, "process group", text)]
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()


def _rank_main(rank: int, options: argparse.Namespace, folder: str, queue: object) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=options.timeout_s),
    )
    findings = try_groups(options, [])
    if rank == 0:
        queue.put(findings)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def try_groups(options: argparse.Namespace, mine: Sequence[Finding]) -> list[Finding]:
    """All that ranks do together; they go on together or end together, at the first that fails."""
    findings = compare_ranks(mine)
    topology, found = find_topology(options.hostfile)
    findings += found
    if topology is None:
        return findings
    findings.append(check_network(num_nodes=topology.num_nodes))
    integers = new_cpu_group(timeout_s=options.timeout_s)
    world = dist.group.WORLD
    assert integers is not None
    assert world is not None
    groups = [("raw items (gloo)", integers, torch.device("cpu"))]
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        groups.append(("encoder outputs (nccl)", world, torch.device("cuda", torch.cuda.current_device())))
    for name, group, device in groups:
        findings += _try_group(name, group, topology, device, options)
        if findings[-1].level == FAIL:  # what follows would only hang
            break
    return findings


def _try_group(
    name: str, group: dist.ProcessGroup, topology: Topology, device: torch.device, options: argparse.Namespace
) -> list[Finding]:
    """Rows by each method, then speeds; up to the first that fails."""
    hops = new_node_groups(group, topology, timeout_s=options.timeout_s)
    tests: dict[str, Group] = {"flat": group, "node_wise": hops} if topology.num_nodes > 1 else {"flat": group}
    findings = []
    for method, where in tests.items():
        test = functools.partial(_try_exchange, where, topology, device, method)
        findings.append(_together(f"{name}, {method}", test))
        if findings[-1].level == FAIL:
            return findings
    return findings + _speeds(name, group, topology, device, options.megabytes)


def compare_ranks(mine: Sequence[Finding]) -> list[Finding]:
    """What other ranks found by themselves that this one did not; what a launcher says may differ between nodes."""
    own = [finding for finding in mine if finding.level == FAIL or finding.subject != "launcher"]
    words = gather(encode_text("\n".join(map(str, own))), Status.OK, label="doctor").values
    texts = [decode_text(vector).splitlines() for vector in words]
    findings = []
    for rank, lines in enumerate(texts):
        other = [" ".join(line.split()) for line in lines if line not in texts[get_rank()]]
        if other:
            is_harmless = all(line.startswith(NOTE) for line in other)
            said = f"differs from rank {get_rank()}: {'; '.join(other)}"
            findings.append(Finding(NOTE if is_harmless else FAIL, f"rank {rank}", said))
    return findings or [Finding(OK, "ranks", f"{len(texts)} ranks have the same versions")]


def find_topology(hostfile: str | None) -> tuple[Topology | None, list[Finding]]:
    """Nodes as hosts and launcher say, held against a hostfile; None where they contradict each other."""
    try:
        topology = discover_topology()
        hosts = gather_hosts()
    except (ValueError, OSError) as error:
        return None, [Finding(FAIL, "topology", _line(error))]
    try:
        if hostfile is not None:
            check_topology(Topology.from_hostfile(hostfile), hosts)
    except (ValueError, OSError) as error:
        return None, [Finding(FAIL, "topology", f"{hostfile}: {_line(error)}")]
    sizes = dict(zip(dict.fromkeys(hosts), topology.num_ranks_of_node.tolist(), strict=True))
    text = ", ".join(f"{host} with {size}" for host, size in sizes.items())
    return topology, [Finding(OK, "topology", f"{topology.num_ranks} ranks on {topology.num_nodes} host(s): {text}")]


def _try_exchange(group: Group, topology: Topology, device: torch.device, method: str) -> str:
    """Sends numbered rows to and fro among all ranks, and looks at every one."""
    num_ranks, rank = topology.num_ranks, dist.get_rank()
    random = np.random.default_rng(0)
    source, target = (np.append(random.integers(0, num_ranks, 8 * num_ranks), range(num_ranks)) for _ in range(2))
    num_rows = random.integers(0, 4, len(source))
    rearrangement = Rearrangement(Layout(source, num_ranks), Layout(target, num_ranks))
    exchange = Exchange.of(rearrangement, rank, num_rows, topology)
    ids = np.repeat(np.arange(len(source)), num_rows)
    sent = torch.from_numpy(ids[source[ids] == rank]).double().to(device)[:, None].requires_grad_()
    arrived = exchange_rows(sent, exchange, group, method=method, label="doctor")
    arrived.pow(2).sum().backward()
    expected = torch.from_numpy(ids[target[ids] == rank]).double().to(device)[:, None]
    if not torch.equal(arrived.detach(), expected):
        raise RuntimeError("rows arrived that are not those that were sent")
    if sent.grad is None or not torch.equal(sent.grad, 2 * sent.detach()):
        raise RuntimeError("gradients came back that are not those of the rows")
    return f"{len(ids)} rows there and their gradients back, all as planned"


def _speeds(
    name: str, group: dist.ProcessGroup, topology: Topology, device: torch.device, megabytes: float
) -> list[Finding]:
    """What a rank's links carry inside the node and across, if all ranks send at once."""
    node, local, size = topology.node_of_rank, topology.local_rank, topology.num_ranks_of_node
    targets = {}
    if topology.node_size > 1:
        targets["intra_node_gbps"] = topology.first_rank_of_node[node] + (local + 1) % size[node]
    if topology.num_nodes > 1:
        targets["inter_node_gbps"] = (np.arange(topology.num_ranks) + topology.node_size) % topology.num_ranks
    findings = []
    for field, target in targets.items():
        test = functools.partial(_measured_gbps, group, target, device, megabytes)
        found = _together(f"{name}, {field}", test)
        if found.level != FAIL:
            assumed = f"{getattr(topology, field):g} assumed"
            advice = f"to choose exchanges by it, give {field}= to orch.Topology"
            found = Finding(NOTE, found.subject, f"{float(found.text):.3g} Gbit/s a rank ({assumed}); {advice}")
        findings.append(found)
    return findings


def _measured_gbps(group: dist.ProcessGroup, target: np.ndarray, device: torch.device, megabytes: float) -> str:
    """Gbit/s of the slowest rank; the better of two tries, after one that connects."""
    num_rows, rank = max(1, int(1e6 * megabytes / ROW_BYTES)), dist.get_rank()
    num_ranks = len(target)
    layouts = Layout(np.arange(num_ranks), num_ranks), Layout(target, num_ranks)
    exchange = Exchange.of(Rearrangement(*layouts), rank, np.full(num_ranks, num_rows))
    rows, seconds = torch.zeros(num_rows, ROW_BYTES, dtype=torch.uint8, device=device), []
    for _ in range(3):
        gather(np.empty(0, np.int64), Status.OK, label="doctor")
        start = time.perf_counter()
        float(exchange_rows(rows, exchange, group, label="doctor")[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - start)
    slowest = gather(np.array([int(1e9 * min(seconds[1:]))]), Status.OK, label="doctor").values
    return str(8 * num_rows * ROW_BYTES / max(int(value[0]) for value in slowest))


def _together(subject: str, test: Callable[[], str]) -> Finding:
    """A test on all ranks, and its outcome on the first that failed."""
    failure, text = "", ""
    try:
        text = test()
    except Exception as error:
        failure = _line(error)
    words = gather(encode_text(failure), Status.OK, label="doctor").values
    failures = {rank: said for rank, vector in enumerate(words) if (said := decode_text(vector))}
    if failures:
        rank, said = next(iter(failures.items()))
        advice = "is the interface between nodes named (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), no firewall between?"
        return Finding(FAIL, subject, f"ranks {list(failures)} failed, rank {rank} with: {said}; {advice}")
    return Finding(OK, subject, text)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
