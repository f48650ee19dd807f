#!/usr/bin/env bash
# Makes a virtual environment in the checkout and installs packages into it; returns at once if they are
# installed already.
#
#   launch/setup.sh [cpu|gpu] [test]              .venv with the versions the project is tested with
#   launch/setup.sh [cpu|gpu] [test] oldest       .venv-oldest with the lowest that pyproject.toml admits
#   launch/setup.sh [cpu|gpu] [test] newest       .venv-newest with the highest
#
# Without cpu or gpu: gpu where nvidia-smi finds one. PYTHON names the interpreter to build on
# (default: python3 if it is 3.11 or later, else python3.13, python3.12 or python3.11).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Python imports from the current directory first, where a tokenize.py may lie.
cd "$root"

fail() {
    echo "error: $1" >&2
    exit 1
}

mode= versions=tested extras="pipeline eval"
for word in "$@"; do
    case "$word" in
        cpu | gpu) mode=$word ;;
        test) extras="$extras test" ;;
        oldest | newest) versions=$word ;;
        *) echo "error: launch/setup.sh knows cpu, gpu, test, oldest and newest, not '$word'" >&2; exit 2 ;;
    esac
done
if [ -z "$mode" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then mode=gpu; else mode=cpu; fi
fi
[ "$mode" = gpu ] && extras="$extras gpu"
venv="$root/.venv"
[ "$versions" = tested ] || venv="$venv-$versions"
stamp="$venv/setup-stamp"
log="$venv-setup.log"

# The stamp is written last and names what the environment was made of.
fingerprint="$( (cat pyproject.toml launch/setup.sh launch/tested/*; echo "$root") | cksum)"
is_done() {
    [ -f "$stamp" ] && [ -x "$venv/bin/python" ] || return 1
    { read -r made; read -r have; } <"$stamp" || return 1
    [ "$made" = "$fingerprint" ] || return 1
    for extra in $extras; do
        case " $have " in *" $extra "*) ;; *) return 1 ;; esac
    done
}
is_done && exit 0

# Two jobs of one shared checkout must not install at the same time.
if command -v flock >/dev/null; then
    exec 9>"$venv-setup.lock"
    flock 9
    is_done && exit 0
fi

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python from 3.11 on was found${PYTHON:+ (PYTHON=$PYTHON)}; install one, or name it: PYTHON=/path/to/python3 launch/setup.sh"
}

echo "setting up $venv ($mode: ${extras// /, }; $versions versions); details in $log"
: >"$log"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    "$base" -m venv --clear "$venv" >>"$log" 2>&1 ||
        fail "$base could not make $venv (on Debian and Ubuntu install python3-venv); see $log"
fi
if [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" = "$fingerprint" ]; then
    for extra in $(sed -n 2p "$stamp"); do
        case " $extras " in *" $extra "*) ;; *) extras="$extras $extra" ;; esac
    done
fi
rm -f "$stamp"

# With bytecode of modules that are never imported it would take twice as long; see below.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" >>"$log" 2>&1
}
install() {
    echo "  installing $*"
    pip_install "$@" || {
        tail -n 5 "$log" >&2
        fail "pip could not install $*; see $log"
    }
}
# An interpreter's own pip may be old: 23.2 takes twice as long to choose among the files.
pip_install --retries 1 pip==26.3 || echo "  note: pip 26.3 could not be installed; the interpreter's own pip is used"
# Each requirement of pyproject.toml at the lowest version it admits, as constraints for pip.
lowest() {
    sed '1,/^\[project\]/d; /^\[tool/,$d' pyproject.toml |
        grep -oE '"[[:alnum:]_.-]+(\[[^]]*\])?>=[^,;" ]+' | sed -E 's/^"([^[>]+).*>=/\1==/' | sort -u
}

# torch first and by itself. Without a GPU its CPU build, a tenth of the plain wheel, is taken from
# where pip is configured to look, else from PyTorch's own index; the plain wheel works too where
# neither has it. Only the plain wheel is on one index with all the rest, so no hash is asked of it.
torch=2.13.0
[ "$versions" = oldest ] && torch=$(lowest | sed -n 's/^torch==//p')
pytorch_index=--extra-index-url=https://download.pytorch.org/whl/cpu
install_cpu_build() {
    "$venv/bin/python" -c "import importlib.metadata as m, sys
sys.exit(m.version('torch').split('+')[0] != '$torch')" >/dev/null 2>&1 && return
    for index in "" "$pytorch_index"; do
        pip_install --retries 1 ${index:+"$index"} "torch==$torch+cpu" && return
    done
    install "torch==$torch"
}
if [ "$versions" = newest ]; then
    # PyTorch's index has CPU builds of the newest; a version with +cpu comes before one without.
    if [ "$mode" = gpu ]; then install --upgrade torch; else install --retries 1 --upgrade "$pytorch_index" torch; fi
elif [ "$mode" = cpu ]; then
    echo "  installing torch $torch (CPU build)"
    install_cpu_build
else
    install "torch==$torch,!=$torch+cpu"
fi
behind=
case "$versions" in
    tested)
        # Every package at the version the tests ran with, and the file whose hash is known.
        pinned() {
            case " $extras " in
                *" $1 "*) install --no-deps --require-hashes -r "launch/tested/$1.txt" ;;
            esac
        }
        pinned pipeline
        pinned gpu
        install --no-deps --no-build-isolation -e . # torch has brought setuptools
        pinned test & # beside the imports below: no stage needs what the tests do
        behind=$!
        ;;
    oldest)
        lowest >"$venv/lowest.txt"
        install -c "$venv/lowest.txt" -e ".[${extras// /,}]"
        ;;
    newest) install --upgrade --upgrade-strategy eager -e ".[${extras// /,}]" ;;
esac
# Writes the bytecode of what the stages import, also where the environment says not to write any:
# without it every process would need twice as long to start.
echo "  importing the stages"
PYTHONPATH="$root" PYTHONDONTWRITEBYTECODE="" "$venv/bin/python" -c "
import importlib
from pipeline.recipe.stage_list import STAGES
for stage in STAGES:
    importlib.import_module(stage.function.partition(':')[0])
import transformers.models.qwen3.modeling_qwen3" >>"$log" 2>&1 ||
    fail "what was installed cannot be imported; see $log"
[ -z "$behind" ] || wait "$behind" || exit 1
printf '%s\n%s\n' "$fingerprint" "$extras" >"$stamp"
echo "done: $venv/bin/python"
