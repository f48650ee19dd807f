#!/usr/bin/env bash
# Sets itself up, then checks style and types and runs every test this machine can run.
#
#   launch/test.sh [pytest options]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
launch/setup.sh test
bin="$root/.venv/bin"

failed=0
check() {
    echo "== $*"
    "$@" || failed=1
}
check "$bin/ruff" check .
check "$bin/ruff" format --check .
check "$bin/mypy"
check "$bin/python" -m pytest -q "$@"
exit $failed
