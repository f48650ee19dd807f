#!/usr/bin/env bash
# Runs every test and measurement that needs a GPU and writes one page of results.
#
#   launch/gpu_check.sh [page.md]
#
# Takes half an hour on one GPU with 80 GB. Without a GPU it runs only the parts that need none, and
# says so.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
page=$(realpath -m "${1:-gpu_check.md}")
cd "$root"
launch/setup.sh test
exec .venv/bin/python -m tests.gpu.check "$page"
