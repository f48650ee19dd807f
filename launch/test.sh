#!/usr/bin/env bash
# Sets itself up, then checks style and types and runs every test this machine can run. Style and
# types are checked with the tested versions alone: those of ruff and mypy decide what they say.
#
#   launch/test.sh [pytest options]
#   launch/test.sh oldest [pytest options]    with the lowest versions that pyproject.toml admits
#   launch/test.sh newest [pytest options]    with the highest
#   launch/test.sh vllm [pytest options]      only the tests that serve models with vLLM
#   launch/test.sh mlx [pytest options]       only those that run models with mlx-lm
#   launch/test.sh liger [pytest options]     only those of Liger's kernels, in Triton's interpreter
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
versions=
case "${1:-}" in
    vllm | mlx | liger)
        engine=$1
        shift
        launch/setup_engine.sh "$engine"
        exec ".venv-$engine/bin/python" -m pytest -q "tests/$engine" "$@"
        ;;
    oldest | newest) versions=$1; shift ;;
esac
launch/setup.sh test $versions
bin="$root/.venv${versions:+-$versions}/bin"

export BOSCH_PYTHON="$bin/python" # what launch/torchrun.sh runs in the tests
export PYTHONDONTWRITEBYTECODE="" # what the tests import is compiled once
failed=0
check() {
    echo "== $*"
    "$@" || failed=1
}
types=
if [ -z "$versions" ]; then
    check "$bin/ruff" check .
    check "$bin/ruff" format --check .
    # On one core for a minute or more: beside the tests, which wait for each other at times.
    types=$(mktemp)
    "$bin/mypy" >"$types" 2>&1 &
    mypy=$!
    trap 'kill $mypy 2>/dev/null || true; rm -f "$types"' EXIT
fi
# A test file on each core: each more costs as much to import as it gains. In the order of
# pyproject's testpaths: by number of tests, files of few slow ones would run last and alone.
check "$bin/python" -m pytest -q -n "$(nproc)" --dist loadfile --no-loadscope-reorder --durations=25 "$@"
if [ -n "$types" ]; then
    echo "== $bin/mypy"
    wait "$mypy" || failed=1
    cat "$types"
fi
exit $failed
