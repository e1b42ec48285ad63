"""The launch scripts: run on an emulated cluster where they can be, and read where they cannot."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import engines
import pytest
import torch
import train_omni
from training import make_parser

from orch.comm.topology import Topology
from tests.cluster import Cluster, NotPermittedError

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
TORCHRUN = f"{shlex.quote(sys.executable)} -m torch.distributed.run"


def launch(script: str, *arguments: str, prefix: tuple[str, ...] = (), **environ: str) -> subprocess.Popen[str]:
    command = [*prefix, "bash", str(LAUNCH / script), *arguments]
    return subprocess.Popen(
        command, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh", "slurm.sbatch"])
def test_scripts_are_sound_shell(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)
    assert os.access(LAUNCH / script, os.X_OK)


def test_torchrun_on_two_uneven_nodes():
    """The script as it is run on a cluster: each node its own name, torchrun's own rendezvous over the link."""
    sizes = (2, 1)
    try:
        with Cluster(sizes, mbit=400) as cluster:
            runs = [
                launch(
                    "torchrun.sh",
                    *("--megabytes", "0.2"),
                    prefix=(
                        *("ip", "netns", "exec", namespace, "unshare", "--uts", "bash", "-c"),
                        f'echo node{node} > /proc/sys/kernel/hostname; exec "$@"',
                        "in-node",
                    ),
                    NNODES="2",
                    NODE_RANK=str(node),
                    RANKS_PER_NODE=str(size),
                    MASTER_ADDR="10.77.0.1",
                    GLOO_SOCKET_IFNAME="eth0",
                    SCRIPT="-m orch.doctor",
                    TORCHRUN=TORCHRUN,
                )
                for node, (namespace, size) in enumerate(zip(cluster.nodes, sizes, strict=True))
            ]
            outputs = [run.communicate(timeout=200)[0] for run in runs]
    except NotPermittedError as error:
        pytest.skip(f"no cluster can be emulated here: {error}")
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "topology: 3 ranks on 2 host(s): node0 with 2, node1 with 1" in outputs[0]
    assert "ok  raw items (gloo), node_wise: " in outputs[0]
    assert outputs[0].rstrip().endswith("A run can start.")


def test_deepspeed_starts_the_example_as_its_hostfile_says(tmp_path):
    run = launch("deepspeed.sh", "--steps", "2", DEEPSPEED="echo deepspeed")
    said = run.communicate(timeout=20)[0].split()
    assert said[:3] == ["deepspeed", "--hostfile", "examples/launch/hostfile"]
    assert said[5:] == [
        *("examples/train_omni.py", "--engine", "zero2", "--engine-config", "examples/launch/zero2_8gpu.json"),
        *("--dtype", "bfloat16", "--steps", "2"),
    ]
    assert Topology.from_hostfile(LAUNCH / "hostfile") == Topology(16, 8)


def test_slurm_starts_torchrun_on_every_node(tmp_path):
    """With SLURM's own commands played: `srun` runs its command once for each node."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node[1-2]" ] && echo node1 && echo node2\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nfor n in 0 1; do SLURM_NODEID=$n "$@" || exit 1; done\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    run = launch(
        "slurm.sbatch",
        *("--steps", "2 2"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_ID="21234",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="4",
        TORCHRUN="printf %s|",
    )
    lines = [line for line in run.communicate(timeout=20)[0].split("--nnodes") if line]
    assert run.returncode == 0
    words = [line.strip("|").split("|") for line in lines]
    assert [line[2] for line in words] == ["0", "1", "0", "1"]
    common = ["--nproc-per-node", "4", "--master-addr", "node1", "--master-port", "21234"]
    assert all(line[3:9] == common for line in words)
    assert [line[9:11] for line in words[:2]] == [["-m", "orch.doctor"]] * 2
    assert [line[9:] for line in words[2:]] == [["examples/train_omni.py", "--steps", "2 2"]] * 2


def test_zero_options_of_a_file(tmp_path):
    path = LAUNCH / "zero2_8gpu.json"
    options = engines.read_zero_options(path, 2)
    assert options["clip"] == json.loads(path.read_text())["gradient_clipping"] == 1.0
    assert options["reduce_bucket_size"] == 500_000_000
    assert options["overlap_comm"] == torch.cuda.is_available()
    with pytest.raises(ValueError, match="must be of stage 3, but is of 2"):
        engines.read_zero_options(path, 3)
    args = make_parser("", train_omni.ENGINES).parse_args(["--engine", "ddp", "--engine-config", str(path)])
    with pytest.raises(ValueError, match="`--engine-config` must be left out for ddp"):
        train_omni.wrap(torch.nn.Linear(1, 1), args)


def test_the_example_trains_under_deepspeeds_launcher_with_these_options(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n")
    run = launch(
        "deepspeed.sh",
        *("--steps", "2", "--samples", "60", "--max-pixels", "12544", "--token-budget", "256"),
        HOSTFILE=str(hostfile),
        DEEPSPEED=f"{shlex.quote(sys.executable)} -m deepspeed.launcher.runner --no_ssh_check --master_addr 127.0.0.1",
        MASTER_PORT="29611",
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
    )
    output = run.communicate(timeout=250)[0]
    assert run.returncode == 0, output[-4000:]
    assert "samples trained" in output
