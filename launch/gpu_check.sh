#!/usr/bin/env bash
# Runs what needs a GPU, the parts of most worth first, and writes one page of results.
#
#   launch/gpu_check.sh [PAGE]                 in .venv, which it makes
#   launch/gpu_check.sh --wheels DIR           fetch what a bare machine with torch lacks, for --offline
#   launch/gpu_check.sh --offline DIR [PAGE]   with the python3 that is there and these wheels, no network
#
# --limit SECONDS ends it (default 540); the page is written after each part. --dry runs all parts in
# tiny shapes on any machine. TARGET_PYTHON=3.12 names the Python of the machine for --wheels.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# torch, transformers, accelerate and pytest are on such a machine.
packages="annotated-types datasets dill liger-kernel multiprocess pydantic pydantic-core typing-inspection xxhash"

offline= page=gpu_check.md options=()
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels)
            for package in $packages; do
                pin=$(grep -hoE "^$package==[^ ]+" "$root"/launch/tested/*.txt | head -n 1 || true)
                pins+=("${pin:-$package}")
            done
            exec python3 -m pip download --no-deps --only-binary=:all: --dest "$2" \
                --python-version "${TARGET_PYTHON:-3.12}" --implementation cp \
                --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
                --platform manylinux_2_28_x86_64 "${pins[@]}" ;;
        --offline) offline=$(realpath "$2"); shift ;;
        --limit) options+=(--limit "$2"); shift ;;
        --dry) options+=(--dry) ;;
        -*) echo "error: $0 has no option $1" >&2; exit 2 ;;
        *) page=$1 ;;
    esac
    shift
done
page=$(realpath -m "$page")
cd "$root"
if [ -z "$offline" ]; then
    launch/setup.sh test
    exec .venv/bin/python -m tests.gpu.check "$page" "${options[@]}"
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# A wheel is a zip file; without pip nothing looks for an index.
for wheel in "$offline"/*.whl; do
    python3 -m zipfile -e "$wheel" "$site"
done
PYTHONPATH="$site:$root" python3 -m tests.gpu.check "$page" "${options[@]}"
