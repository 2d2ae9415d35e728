#!/usr/bin/env bash
# Starts meshserve on the TPU host it runs on:  deploy/tpu/start.sh deploy/tpu/v6e-2x4.toml --model /models/Qwen3-8B
# Everything after the config file is passed on to `meshserve serve` and beats the file.
set -euo pipefail

if [[ $# -lt 1 || ! -f $1 ]]; then
    echo "usage: $0 CONFIG.toml [flags of meshserve serve]" >&2
    exit 2
fi
config=$1
shift

# The TPU runtime names the hosts of a slice, this one among them, separated by commas.
IFS=, read -ra hosts <<< "${TPU_WORKER_HOSTNAMES:-localhost}"
if [[ ${#hosts[@]} -gt 1 ]]; then
    echo "$0: the slice has ${#hosts[@]} hosts. meshserve serves from one process, which sees the chips of its own host" >&2
    echo "only. Take a slice with all its chips on one host." >&2
    exit 2
fi

exec meshserve serve --config "$config" "$@"
