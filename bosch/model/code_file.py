"""The code file in a hybrid's directory, with which transformers loads it without bosch.

It joins bosch's modules, so that there is one implementation, without the imports between them. No
two may define the same top-level name.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from importlib import resources

from bosch.version import VERSION

# The files that a loaded model needs, each after its dependencies.
MODULES = (
    "errors.py", "window.py", "masks.py", "backends.py", "model/families.py",
    "attention/context.py", "attention/layout.py", "attention/logit_transform.py",
    "attention/call.py", "attention/kernels.py", "attention/causal.py", "attention/eager.py",
    "attention/sdpa.py", "attention/varlen.py", "attention/flex.py", "attention/__init__.py",
    "model/interface.py", "model/cache.py", "model/configuration.py", "model/permutation.py",
    "model/adapters.py", "model/deploy_mode.py",
)  # fmt: skip

_HEAD = '''"""{model} whose heads are full or sliding, for transformers.

Loaded by `trust_remote_code=True`. Made by bosch {version} from its own source; where bosch is
installed and imported, transformers uses that instead. Licence: Apache-2.0.
"""

from __future__ import annotations

'''

_TAIL = '''

def code_file(*names: str) -> str:
    """The text of this file, which a saved model carries on."""
    return Path(__file__).read_text(encoding="utf-8")


Hybrid{config} = hybrid_config_class("{model_type}")
Hybrid{decoder} = hybrid_decoder_class("{model_type}")
Hybrid{model} = hybrid_model_class("{model_type}")
'''


@functools.cache
def code_file(model_type: str, config: str, decoder: str, model: str) -> str:
    """Source of a family's classes without bosch; RuntimeError if its modules cannot be joined."""
    head = _HEAD.format(model=model, version=VERSION)
    tail = _TAIL.format(config=config, model=model, decoder=decoder, model_type=model_type)
    return head + _joined(MODULES) + "\n" + tail


@functools.cache
def _joined(modules: tuple[str, ...]) -> str:
    """Imports and bodies of the modules, the common part of all families' files."""
    imports: dict[str, set[str]] = defaultdict(set)
    defined = {"code_file"}
    bodies = [_body(name, imports, defined) for name in modules]
    plain = sorted(imports.pop("", set()))
    imports.pop("__future__", None)
    named = [f"from {module} import {', '.join(sorted(imports[module]))}" for module in imports]
    return "\n".join([*plain, *sorted(named)]) + "\n\n\n" + "\n\n\n".join(bodies)


def _body(name: str, imports: dict[str, set[str]], defined: set[str]) -> str:
    """Source of a module without its imports; adds imports of other packages to `imports`."""
    source = resources.files("bosch").joinpath(name).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    names = _names(tree)
    if names & defined:
        raise RuntimeError(f"bosch/{name} defines {sorted(names & defined)} again")
    defined |= names
    dropped = [tree.body[0]]  # the docstring
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bosch":
            unknown = [a.name for a in node.names if a.asname or a.name not in defined]
            if unknown:
                raise RuntimeError(f"bosch/{name} imports {unknown}, which the file does not have")
            dropped.append(node)
    for node in tree.body:
        if isinstance(node, ast.Import):
            imports[""] |= {ast.unparse(ast.Import([alias])) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node not in dropped:
            imports[node.module or ""] |= {ast.unparse(alias) for alias in node.names}
        elif not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            continue
        dropped.append(node)
    for node in dropped:
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[number] = "\0"
    text = "\n".join(line for line in lines if line != "\0").strip("\n")
    return f"# From bosch/{name}\n\n{text}"


def _names(tree: ast.Module) -> set[str]:
    """Names defined at a module's top level, without `__all__`."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names - {"__all__"}
