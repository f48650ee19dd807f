"""`python -m pipeline COMMAND …`; as a file, also the way to start a process of a run.

`python pipeline/__main__.py --process MODULE …` calls `main()` of a module of this checkout.
Nothing is imported from the current directory, where a file may be called yaml.py or tokenize.py.
(With -m, the interpreter's own `runpy` still comes before this file.)
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(_FOLDER)


def trusted_path(path: list[str]) -> list[str]:
    """`sys.path` with the checkout first, and without the current directory and this folder.

    The interpreter puts one of them first; an empty entry of PYTHONPATH is the current directory.
    """
    try:
        current = os.getcwd()
    except FileNotFoundError:  # it was removed
        current = ""
    # The folder of the standard library or of installed packages stays on the path.
    is_library = current == os.path.dirname(os.__file__) or current.endswith("-packages")
    unwanted = {"", _FOLDER, _ROOT} | (set() if is_library else {current})
    return [_ROOT, *(entry for entry in path if entry not in unwanted)]


if __name__ == "__main__":
    sys.path[:] = trusted_path(sys.path)
    # Also for processes that this one or a library starts (PYTHONSAFEPATH: from Python 3.11 on).
    os.environ["PYTHONSAFEPATH"] = "1"
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    # Threads that wait for others spin by default: on a shared machine they take the cores that
    # the others need. Read when torch's library loads, here and in every process started from here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    import importlib

    # Plugin discovery reads the metadata of all packages, which is too slow for `status`.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    module = "pipeline.cli"
    if sys.argv[1:2] == ["--process"]:
        module = sys.argv.pop(2)
        del sys.argv[1]
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as missing:
        print(
            f"error: this Python lacks {missing.name}; run launch/setup.sh and use "
            ".venv/bin/python, or launch/torchrun.sh",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(main())
