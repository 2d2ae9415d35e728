#!/usr/bin/env bash
# Starts meshserve on the current TPU host:  deploy/tpu/start.sh deploy/tpu/v6e-2x4.toml --model /models/Qwen3-8B
# Arguments after the config file are passed on to `meshserve serve` and take precedence over the file.
set -euo pipefail

if [[ $# -lt 1 || ! -f $1 ]]; then
    echo "usage: $0 CONFIG.toml [flags of meshserve serve]" >&2
    exit 2
fi
config=$1
shift

# The TPU runtime lists the hosts of the slice, including this one, separated by commas.
IFS=, read -ra hosts <<< "${TPU_WORKER_HOSTNAMES:-localhost}"
if [[ ${#hosts[@]} -gt 1 ]]; then
    set -- --coordinator auto "$@"  # one process on each host: run this on all of them, with the same --cluster-token
fi

exec meshserve serve --config "$config" "$@"
