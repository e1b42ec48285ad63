"""`orch doctor`: what it finds, on one machine, among ranks and on an emulated cluster, and what it says to do."""

from __future__ import annotations

import argparse
import importlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from orch import doctor, self_test
from orch.doctor import FAIL, NOTE, OK, Finding
from tests.cluster import Cluster, NotPermittedError
from tests.ranks import run_ranks

OPTIONS = argparse.Namespace(hostfile=None, ranks=2, megabytes=0.2, timeout_s=40.0)
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_this_machine_is_well():
    findings = by_subject(doctor.local_findings())
    assert {findings[name].level for name in ("versions", "torch", "transformers", "solver")} == {OK}
    assert not [finding for finding in findings.values() if finding.level == FAIL]


def test_old_and_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setitem(doctor.OLDEST, "torch", (99, 0))
    monkeypatch.setitem(doctor.OLDEST, "no-such-package", (1, 0))
    findings = by_subject(doctor.check_versions())
    assert findings["torch"].level == FAIL
    assert "older than 99.0: pip install -U torch" in findings["torch"].text
    assert findings["no-such-package"] == Finding(FAIL, "no-such-package", "not installed: pip install no-such-package")


def test_launchers():
    assert doctor.check_launcher(TORCHRUN) == Finding(OK, "launcher", "torchrun, 8 ranks, 4 on this node")
    assert doctor.check_launcher({}).level == NOTE
    slurm = doctor.check_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"})
    assert slurm.level == FAIL
    assert "slurm leaves ['RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'] unset" in slurm.text
    broken = doctor.check_launcher(TORCHRUN | {"WORLD_SIZE": "many"})
    assert broken.level == FAIL
    assert "WORLD_SIZE must be a positive number" in broken.text


def test_networks():
    assert doctor.check_network({"GLOO_SOCKET_IFNAME": "lo"}, num_nodes=2).level == FAIL
    assert doctor.check_network({"GLOO_SOCKET_IFNAME": "lo"}, num_nodes=1).level == OK
    assert doctor.check_network({}, num_nodes=2).level == NOTE
    assert "GLOO_SOCKET_IFNAME=eth0" in doctor.check_network({"GLOO_SOCKET_IFNAME": "eth0"}, num_nodes=2).text


def test_verdict(capsys):
    assert doctor.report([Finding(OK, "a", "b")]) == 0
    assert capsys.readouterr().out == "  ok  a: b\nA run can start.\n"
    assert doctor.report([Finding(OK, "a", "b"), Finding(FAIL, "c", "d")]) == 1
    assert capsys.readouterr().out.endswith("FAIL  c: d\n1 of 2 would make a run fail.\n")


@pytest.mark.parametrize("command", [["-m", "orch.cli", "doctor"], ["-m", "orch.doctor"]])
def test_as_a_user_runs_it(command):
    done = subprocess.run(
        [sys.executable, *command, "--megabytes", "0.1"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "raw items (gloo), flat: 18 rows there and their gradients back" in done.stdout
    assert done.stdout.endswith("A run can start.\n")


def test_the_installed_command_is_the_one_that_is_tested():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.scripts]\norch = "orch.cli:main"' in text
    assert callable(importlib.import_module("orch.cli").main)


def test_ranks_that_differ_are_named():
    def fn():
        version = "2.5" if dist.get_rank() == 2 else "2.6"
        lines = [Finding(OK, "torch", version), Finding(OK, "launcher", f"{dist.get_rank()} on this node")]
        return self_test.compare_ranks(lines)

    results = run_ranks(fn, 3)
    assert results[0] == [Finding(FAIL, "rank 2", "differs from rank 0: ok torch: 2.5")]
    assert [finding.subject for finding in results[2]] == ["rank 0", "rank 1"]
    assert run_ranks(lambda: self_test.compare_ranks([])[0].level, 2) == [OK, OK]


def test_a_hostfile_that_says_otherwise_is_told(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")

    def fn():
        options = argparse.Namespace(**{**vars(OPTIONS), "hostfile": str(hostfile)})
        return self_test.try_groups(options, [])[-1]

    for finding in run_ranks(fn, 2):
        assert finding.level == FAIL
        assert finding.text.startswith(f"{hostfile}: ")
        assert "rank 1 is on host" in finding.text


@pytest.mark.parametrize("what", ["rows", "gradients", "raises"])
def test_a_group_that_carries_the_wrong_rows_fails_on_all_ranks(what):
    def fn():
        sound = self_test.exchange_rows

        def broken(rows, *args, **kwargs):
            if what == "raises" and dist.get_rank() == 1:
                sound(rows, *args, **kwargs).pow(2).sum().backward()
                raise RuntimeError("connection reset\nby peer")
            result = sound(rows * 1.0, *args, **kwargs)
            if dist.get_rank() == 1:
                return result + 1 if what == "rows" else result * 1.0 + 0 * result.detach() + (result - result.detach())
            return result

        self_test.exchange_rows = broken
        return by_subject(self_test.try_groups(OPTIONS, []))["raw items (gloo), flat"]

    results = run_ranks(fn, 2)
    assert results[0] == results[1]
    assert results[0].level == FAIL
    expected = {  # wrong rows on rank 1 send wrong gradients back to rank 0
        "rows": "ranks [0, 1] failed",
        "gradients": "gradients came back that are not",
        "raises": "ranks [1] failed, rank 1 with: RuntimeError: connection reset;",
    }
    assert expected[what] in results[0].text


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)], ids=["2x2", "1+2"])
def test_every_group_of_a_cluster_is_tried(sizes):
    def fn():
        return self_test.try_groups(OPTIONS, []), socket.gethostname()

    try:
        with Cluster(sizes, mbit=100) as cluster:
            results = cluster.run(fn, timeout_s=100)
    except NotPermittedError as error:
        pytest.skip(f"no cluster can be emulated here: {error}")
    findings = by_subject(results[0][0])
    assert not [finding for finding in findings.values() if finding.level == FAIL], findings
    hosts = f"node0 with {sizes[0]}, node1 with {sizes[1]}"
    assert findings["topology"].text == f"{sum(sizes)} ranks on 2 host(s): {hosts}"
    for method in ("flat", "node_wise"):
        assert findings[f"raw items (gloo), {method}"].level == OK
    across = findings["raw items (gloo), inter_node_gbps"]
    assert across.level == NOTE
    assert "400 assumed" in across.text
