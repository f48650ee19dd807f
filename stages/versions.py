"""Installed packages: their versions, for the records of what ran, and what lacks one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable

from bosch.errors import UserError


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version by name of those `packages` that are installed; none of them is imported."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def require_package(package: str, setting: str, otherwise: str) -> None:
    """Raise UserError where the package that a setting takes is not installed."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UserError(
            f"{setting} needs the package {package}, which is not installed; install it, or "
            f"{otherwise}"
        )
