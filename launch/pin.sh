#!/usr/bin/env bash
# Writes launch/tested/: what launch/setup.sh installs, every package with its version and the hashes
# of its files. Needs uv (pip install uv). Run it after the tests passed in .venv.
#
# pipeline.txt is what every run needs; gpu.txt and test.txt are what the extras gpu and test need
# besides. Where .venv has a package its version is taken. torch is not among them, nor what only its
# plain wheel needs: its CPU build comes from another index, under another version and hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
installed=$(mktemp)
trap 'rm -f "$installed"' EXIT
# Not +cpu: there is no such version on the index of all the rest.
.venv/bin/python -m pip freeze --exclude-editable | sed "s/+cpu//" >"$installed"
mkdir -p launch/tested

pin() {
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --constraint "$installed" "$@" pyproject.toml
}
# Without the entries whose first line stands in the files named, and without torch and its own.
without() {
    awk '
        FILENAME != "-" { if (/==/) have[$0] = 1; next }
        /==/ { skip = ($0 in have) || /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==/ }
        !skip' "$@" -
}
pin --extra pipeline --extra eval | without >launch/tested/pipeline.txt
pin --extra pipeline --extra eval --extra gpu | without launch/tested/pipeline.txt >launch/tested/gpu.txt
pin --extra pipeline --extra eval --extra test | without launch/tested/pipeline.txt >launch/tested/test.txt
