# To be sourced with $root set. Sets $python to an interpreter that can run the project: the one in
# BOSCH_PYTHON; otherwise that of .venv; without .venv, another Python that has all packages; if there
# is none, .venv is set up.

# Remove empty entries: they mean the current directory, from which nothing must be imported.
PYTHONPATH=$(tr -s : <<<"${PYTHONPATH-}" | sed 's/^://;s/:$//')
export PYTHONPATH PYTHONSAFEPATH=1
python=${BOSCH_PYTHON-}
if [ -z "$python" ] && [ ! -e "$root/.venv" ]; then
    for candidate in python python3; do
        if "$candidate" - >/dev/null 2>&1 <<'CHECK'; then
import sys
sys.path[:] = filter(None, sys.path)  # without the current directory
import importlib.util as util
needed = "torch transformers accelerate datasets pydantic yaml PyNomad altair vl_convert rich lm_eval".split()
sys.exit(any(util.find_spec(name) is None for name in needed))
CHECK
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    "$root/launch/setup.sh"
    python="$root/.venv/bin/python"
fi
