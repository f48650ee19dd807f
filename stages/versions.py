"""Versions of installed packages, for the records of what ran."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Version by name of those `packages` that are installed; none of them is imported."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
