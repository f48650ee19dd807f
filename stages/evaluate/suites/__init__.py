"""The suites: each is a package here that sets SUITE, its section; no torch.

The package's name is the section's in `evaluate`.
"""

from __future__ import annotations

import importlib
import pkgutil

from stages.evaluate.section import SuiteSection

_FOUND: dict[str, type[SuiteSection]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").SUITE
    for module in pkgutil.iter_modules(__path__)
}
SUITES = dict(sorted(_FOUND.items(), key=lambda item: item[1].rank))


def suite_title(name: str) -> str:
    """A suite's name for people; an unknown one's is its own."""
    return SUITES[name].title if name in SUITES else name
