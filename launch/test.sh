#!/usr/bin/env bash
# Installs the packages, checks style and types, and runs every test that this machine can run. With
# oldest and newest, style and types are not checked: other versions of ruff and mypy report other
# errors.
#
#   launch/test.sh [pytest options]
#   launch/test.sh full [pytest options]      for all families of models, not only for eight
#   launch/test.sh oldest [pytest options]    with the lowest versions that pyproject.toml admits
#   launch/test.sh newest [pytest options]    with the highest versions
#   launch/test.sh vllm [pytest options]      only the tests that serve models with vLLM
#   launch/test.sh mlx [pytest options]       only those that run models with mlx-lm
#   launch/test.sh onnx [pytest options]      only those that run models with ONNX Runtime GenAI
#   launch/test.sh liger [pytest options]     only those of Liger's kernels, in Triton's interpreter
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
versions=
case "${1:-}" in
    vllm | mlx | onnx | liger)
        engine=$1
        shift
        launch/setup_engine.sh "$engine"
        exec ".venv-$engine/bin/python" -m pytest -q "tests/$engine" "$@"
        ;;
    oldest | newest) versions=$1; shift ;;
    full) export BOSCH_TESTS=full; shift ;;
esac
launch/setup.sh test $versions
bin="$root/.venv${versions:+-$versions}/bin"

export BOSCH_PYTHON="$bin/python" # the interpreter of launch/torchrun.sh in the tests
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 # as in every process of a run (pipeline/__main__.py)
export PYTHONDONTWRITEBYTECODE="" # imported modules are compiled once, not in every process
failed=0
check() {
    echo "== $*"
    "$@" || failed=1
}
types=
if [ -z "$versions" ]; then
    check "$bin/ruff" check .
    check "$bin/ruff" format --check .
    # mypy takes a minute or more on one core, so it runs beside the tests, which do not always use all.
    types=$(mktemp)
    "$bin/mypy" >"$types" 2>&1 &
    mypy=$!
    trap 'kill $mypy 2>/dev/null || true; rm -f "$types"' EXIT
fi
# One worker per core: another one would cost as much for its imports as it gains. Files run in the
# order of testpaths in pyproject.toml: ordered by their number of tests, files with a few slow tests
# would run last and alone.
check "$bin/python" -m pytest -q -n "$(env -u OMP_NUM_THREADS nproc)" --dist loadfile --no-loadscope-reorder --durations=25 "$@"
if [ -n "$types" ]; then
    echo "== $bin/mypy"
    wait "$mypy" || failed=1
    cat "$types"
fi
exit $failed
