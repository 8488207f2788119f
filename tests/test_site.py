"""The documentation as it is built: a reader opens it from a disk and searches it."""

import subprocess
import sys
from pathlib import Path

import pytest
from browser import browser

ROOT = Path(__file__).parents[1]
SEARCH = "document.querySelector('[data-md-component=search-query]').focus()"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"


@pytest.mark.slow
def test_the_search_works_from_a_disk_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "s")]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with browser(tmp_path / "profile") as tab:
        tab.open(tmp_path / "s" / "index.html")
        tab.run(SEARCH)
        tab.send("Input.insertText", text="closure")
        tab.wait_for(f"{FOUND}.length")
        assert any("measuring.html" in link for link in tab.run(FOUND))
        assert [each for each in tab.requests() if not each.startswith(("file:", "data:"))] == []
        assert tab.complaints() == []
