#!/usr/bin/env bash
# A run by torchrun, with the variables of TorchTitan's script of this name:
#   NGPU=4 CONFIG_FILE=configs/quickstart.toml LOG_RANK=0,1 scripts/run_train.sh --training.steps 50
# NGPU: processes, and so trainer ranks; without it, one for each GPU, or 2 where there is none. LOG_RANK: whose output
# is shown; rank 0 alone says anything. CONFIG_FILE: a path, or the name of a TOML that comes with titan_rl. Whatever
# follows goes over the file.
set -euo pipefail

gpus=(/dev/nvidia[0-9]*)
[[ -e ${gpus[0]} ]] || gpus=(none none)

exec torchrun --nnodes=1 --nproc_per_node="${NGPU:-${#gpus[@]}}" \
    --rdzv_backend=c10d --rdzv_endpoint="${RDZV_ENDPOINT:-localhost:0}" \
    --local-ranks-filter="${LOG_RANK:-0}" --role=rank --tee=3 \
    -m titan_rl.train --job.config_file "${CONFIG_FILE:-quickstart}" "$@"
