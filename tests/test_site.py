"""The documentation as it is built: a reader opens it from a disk and searches it."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browser

import carbonopt.script
from carbonopt import Recommended, Study, load, run
from carbonopt.search.sampler import CarbonSampler

ROOT = Path(__file__).parents[1]
SEARCH = "document.querySelector('[data-md-component=search-query]').focus()"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("docs") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_search_works_from_a_disk_without_a_network(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as tab:
        tab.open(site / "index.html")
        tab.run(SEARCH)
        tab.send("Input.insertText", text="closure")
        tab.wait_for(f"{FOUND}.length")
        assert any("measuring.html" in link for link in tab.run(FOUND))
        assert [each for each in tab.requests() if not each.startswith(("file:", "data:"))] == []
        assert tab.complaints() == []


def test_the_reference_has_every_public_function_and_parameter(site: Path) -> None:
    text = (site / "api.html").read_text()
    _, *parts = re.split(r'<h\d id="carbonopt\.([\w.]+)"', text)
    documented = dict(zip(parts[::2], parts[1::2], strict=True))
    public = {
        f"script.{name}": getattr(carbonopt.script, name) for name in carbonopt.script.__all__
    }
    public["script.run.run"] = public.pop("script.run")  # `script.run` is also the file
    public["search.sampler.CarbonSampler"] = CarbonSampler
    public |= {"api.functions.run": run, "api.functions.load": load}
    for name in ("recommend", "figure", "export"):
        public[f"api.opened_study.Study.{name}"] = getattr(Study, name)
    public["api.recommended.Recommended.as_json"] = Recommended.as_json
    for name in ("step", "evaluation", "saving", "report", "end"):
        public[f"script.Run.{name}"] = getattr(carbonopt.script.Run, name)
    public["search.sampler.CarbonSampler.should_prune"] = CarbonSampler.should_prune
    values = {
        "api.opened_study.Study": {"name", "folder", "ended"},
        "api.opened_study.Study.trials": set(),
        "api.opened_study.Study.evaluations": set(),
        "api.recommended.Recommended": set(Recommended.model_fields),
        "api.recommended.TargetNotMet": {"closest"},
    }
    assert documented.keys() == public.keys() | values.keys()
    for name, attributes in values.items():
        assert set(re.findall(r"<b><code>(\w+)</code></b>", documented.pop(name))) <= attributes
    for name, part in documented.items():
        parameters = inspect.signature(public[name]).parameters.keys() - {"self"}
        assert set(re.findall(r"<b><code>(\w+)</code></b>", part)) == parameters, name
