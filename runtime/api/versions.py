"""The versions of installed packages. The only place that asks for them, because a package need not be installed."""

import importlib.metadata

UNKNOWN = "unknown"


def installed_version(package: str = "meshserve") -> str:
    """Returns a package's version; "unknown" if it runs from its source without being installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
