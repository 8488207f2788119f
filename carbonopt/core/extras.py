"""Packages that only some studies need, and that pip installs by an extra's name."""

from importlib.util import find_spec

from carbonopt.core.errors import BadInput


def check_installed(package: str, extra: str, what: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: the package, as it is imported.
        extra: the extra of carbonopt that installs it.
        what: what needs it, such as a setting of the study file.

    Raises:
        BadInput: if it is missing.
    """
    if find_spec(package) is None:
        raise BadInput(f"{what} needs {package}; type: pip install 'carbonopt[{extra}]'.")
