"""Versions of installed packages, for records of runs; errors for missing packages."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable

from bosch.errors import UserError

_version = functools.cache(importlib.metadata.version)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the `packages` that are installed, by name; imports none of them."""
    versions = {}
    for package in packages:
        try:
            versions[package] = _version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def require_package(package: str, setting: str, otherwise: str) -> None:
    """Raise UserError if the package that a setting needs is not installed."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UserError(
            f"{setting} needs the package {package}, which is not installed; install it, or "
            f"{otherwise}"
        )
