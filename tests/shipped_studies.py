"""The study files of the repository, for tests."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def shipped_studies() -> list[Path]:
    """All study files that git knows: a user's own, kept beside them, are nobody's to test."""
    found = sorted((ROOT / "studies").rglob("*.yaml"))
    if not (ROOT / ".git").exists() or shutil.which("git") is None:  # an unpacked archive
        return found
    # Git refuses a folder of another user unless it is told that it is safe.
    argv = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "studies"]
    tracked = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in found if str(path.relative_to(ROOT)) in set(tracked)]
