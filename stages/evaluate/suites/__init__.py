"""The suites: each package here sets SUITE, its section of `evaluate`, under the package's name.

Imports no torch.
"""

from __future__ import annotations

import importlib
import pkgutil

from stages.evaluate.section import SuiteSection

_SECTIONS: dict[str, type[SuiteSection]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").SUITE
    for module in pkgutil.iter_modules(__path__)
}
SUITES = dict(sorted(_SECTIONS.items(), key=lambda item: item[1].rank))


def suite_title(name: str) -> str:
    """Display name of a suite; an unknown name is returned as it is."""
    return SUITES[name].title if name in SUITES else name
