"""The study files of the repository, for tests."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def shipped_studies() -> list[Path]:
    """All study files that git knows: a user's own, kept beside them, are nobody's to test."""
    found = sorted((ROOT / "studies").rglob("*.yaml"))
    if not (ROOT / ".git").exists():  # an unpacked archive
        return found
    argv = ["git", "-C", str(ROOT), "ls-files", "studies"]
    tracked = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in found if str(path.relative_to(ROOT)) in set(tracked)]
