#!/usr/bin/env bash
# Starts a run with DeepSpeed's launcher; call it once, on a node that reaches all others by ssh without a password:
#
#   examples/launch/deepspeed.sh --steps 100
#
# HOSTFILE names nodes and their GPUs, ZERO_CONFIG what ZeRO does.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${HOSTFILE:=examples/launch/hostfile}" "${ZERO_CONFIG:=examples/launch/zero2_8gpu.json}" "${DEEPSPEED:=deepspeed}"
: "${MASTER_PORT:=29500}"

exec $DEEPSPEED --hostfile "$HOSTFILE" --master_port "$MASTER_PORT" examples/train_omni.py \
    --engine zero2 --engine-config "$ZERO_CONFIG" --dtype bfloat16 "$@"
