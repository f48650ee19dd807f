#!/usr/bin/env bash
# Writes launch/tested/, the list of packages that launch/setup.sh installs, with versions and hashes of
# files. Needs uv (pip install uv). Run it after the tests have passed in .venv, whose versions it takes.
#
# pipeline.txt has the packages that every run needs; gpu.txt and test.txt have the additional ones of
# the extras gpu and test. torch and the packages that only its plain wheel needs are left out: its CPU
# build comes from another index, with another version and hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
installed=$(mktemp)
trap 'rm -f "$installed"' EXIT
# Without +cpu: the index of the other packages has no such version.
.venv/bin/python -m pip freeze --exclude-editable | sed "s/+cpu//" >"$installed"
mkdir -p launch/tested

pin() {
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --constraint "$installed" "$@" pyproject.toml
}
# Removes torch, its own packages, and the packages that are listed in the files named.
without() {
    awk '
        FILENAME != "-" { if (/==/) have[$0] = 1; next }
        /==/ { skip = ($0 in have) || /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ }
        !skip' "$@" -
}
pin --extra pipeline --extra eval | without >launch/tested/pipeline.txt
pin --extra pipeline --extra eval --extra gpu | without launch/tested/pipeline.txt >launch/tested/gpu.txt
pin --extra pipeline --extra eval --extra test | without launch/tested/pipeline.txt >launch/tested/test.txt
