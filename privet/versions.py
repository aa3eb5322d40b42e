"""Versions of the packages that decide a run's numbers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("flwr", "torch", "transformers", "peft", "opacus")


def installed() -> dict[str, str]:
    """Return the installed version of each, empty where there is none."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
