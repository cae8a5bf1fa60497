#!/usr/bin/env bash
# All that wants a GPU, measured on this machine in some 20 minutes: scripts/gpu_day.sh --help
exec "${PYTHON:-python}" "$(dirname "$0")/gpu_day.py" "$@"
