#!/usr/bin/env bash
# Runs a recipe, also from a fresh checkout: sets up .venv if needed, and uses all visible GPUs.
#
#   launch/torchrun.sh RECIPE [key.path=value ...] [--until STAGE] [--from STAGE] [--force STAGE] [--dry-run]
#
# Uses torchrun's variables: NPROC_PER_NODE, and on several nodes NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT (the same command on every node, the checkout on a shared disk).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ $# -eq 0 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
# exec: Ctrl-C and other signals reach the runner itself, which ends every process it has started.
# Started as a file: with -m, Python would import from the current directory first.
exec "$python" "$root/pipeline/__main__.py" run "$@"
