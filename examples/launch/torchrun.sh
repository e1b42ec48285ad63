#!/usr/bin/env bash
# Starts a run with torchrun; call it on every node:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-1 examples/launch/torchrun.sh --engine zero2 --steps 100
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node-1 examples/launch/torchrun.sh --engine zero2 --steps 100
#
# RANKS_PER_NODE may differ between nodes. `SCRIPT="-m orch.doctor"` looks at the cluster instead of training.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}" "${RANKS_PER_NODE:=8}"
: "${SCRIPT:=examples/train_omni.py}" "${TORCHRUN:=torchrun}"

# The interface between nodes (see `ip addr`), where torch does not find it by itself:
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# shellcheck disable=SC2086  # SCRIPT may be "-m module"
exec $TORCHRUN --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" $SCRIPT "$@"
