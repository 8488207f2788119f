"""What the documents say is so: their commands run, their studies are valid, their tables are the
code's, their links lead somewhere.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from gallery import MARKER, entry, headline_sentence
from key_tables import default_text, keys, with_tables
from shipped_studies import shipped_studies
from small_studies import study, trial
from test_rooms import CONTRACTS, IMPORTERS
from typer.testing import CliRunner

import carbonopt
from carbonopt.analysis.confidence import Confidence
from carbonopt.analysis.recommend import recommend
from carbonopt.cli.app import app
from carbonopt.core.dimensions import DIMENSION_NAMES
from carbonopt.core.trial import Attempt, Prediction, TrialRecord, TrialState
from carbonopt.engines.replay import RecordedRun
from carbonopt.export import winner
from carbonopt.spec.launch_settings import HostfileLaunch, LocalLaunch, ReplayLaunch, SlurmLaunch
from carbonopt.spec.space_settings import Choices, Range
from carbonopt.spec.study_config import StudyConfig
from carbonopt.study_file.reader import load_study
from carbonopt.train.tasks.task import TASKS, task_class

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md"]

FENCE = re.compile(r"^```(\w*) ?(.*)\n([\s\S]*?)^```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    page: Path
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.title or self.text.split()[0]}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str) -> list[Block]:
    code_blocks = []
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text()):
            title = re.search(r'title="([^"]+)"', fence[2])
            if fence[1] == language:
                code_blocks.append(Block(page, language, title and title[1], fence[3]))
    return code_blocks


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def tables(page: str) -> list[dict[str, list[str]]]:
    """Of each table the cells of every row by its first cell, which is code."""
    page_tables: list[dict[str, list[str]]] = [{}]
    for line in with_tables((DOCS / page).read_text()).splitlines():
        if line.startswith("| `"):
            first, *cells = (cell.strip() for cell in line.split("|")[1:-1])
            page_tables[-1][first.strip("`")] = cells
        elif page_tables[-1]:
            page_tables.append({})
    return page_tables


# --------------------------------------------------------------------------------------------------------------
# links


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for link in LINK.findall(prose(document)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_an_item_after_an_indented_paragraph_is_not_a_part_of_it(document: Path) -> None:
    # Python-Markdown takes such a line for text of the paragraph, unless an empty line is between.
    for paragraph in re.split(r"\n\s*\n", prose(document)):
        if paragraph.lstrip("\n").startswith("    "):
            assert not re.search(r"^(\d+\.|-) ", paragraph, re.MULTILINE), paragraph


def test_every_page_is_in_the_navigation() -> None:
    names = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert names == {page.name for page in DOCS.glob("*.md")}


def test_every_study_and_every_piece_is_linked() -> None:
    linked = {
        (page.parent / link).resolve() for page in PAGES for link in LINK.findall(prose(page))
    }
    shipped = {
        *(path for path in shipped_studies() if path.parent.name == "studies"),
        *(ROOT / "configs").glob("*/*"),
        *(DOCS / "examples").iterdir(),
    }
    assert shipped <= linked


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# ------------------------------------------------------------------------------------------------------------
# studies


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a checkout, with the studies of the documents and the data that they name."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("docs", "studies", "configs", "reports"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).write_text('{"text": "made up"}\n')
    for block in blocks("yaml"):
        if block.title:
            (folder / block.title).write_text(block.text)
    (folder / "mine").mkdir()  # for study files that parts are laid over, and what they name
    for block in blocks("text"):
        if block.title:
            (folder / "mine" / block.title).write_text(block.text)
    return folder


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_every_yaml_block_is_a_study_or_part_of_one(block: Block, checkout: Path) -> None:
    if block.title:
        assert load_study(checkout / block.title).name == Path(block.title).stem
        return
    small = yaml.safe_load((checkout / "small-study.yaml").read_text())
    part = yaml.safe_load(block.text)
    if "notify" in part:
        part["notify"]["on"] = part["notify"].pop(True)  # YAML 1.1 reads `on` as true
    whole = laid_over(small, part)
    beside_configs = checkout / "mine" / "study.yaml"
    beside_configs.write_text(yaml.safe_dump(whole))
    load_study(beside_configs)


def laid_over(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """`part` decides; where it gives another source of a model or data, that of `base` is gone, and
    where it names a task, all of its workload is.
    """
    merged = dict(base)
    for key, value in part.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and "task" not in value
        merged[key] = (
            laid_over(base[key], value) if both and key in ("workload", "search") else value
        )
    return merged


def test_a_replays_line_is_as_the_page_says() -> None:
    (block,) = (
        json_block for json_block in blocks("json") if json_block.page.name == "study-file.md"
    )
    assert RecordedRun.model_validate(json.loads(block.text)).evals[-1].step == 976


# -----------------------------------------------------------------------------------------------------------
# commands

OTHER_PROGRAMS = {".", "pip", "optuna-dashboard", "./run.sh", "docker", "kubectl", "ssh-keygen"}
REPLAY = ("docs/examples/replay.yaml", "runs/replay")


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks("sh"):
        if block.page == page:
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words[: words.index(">")] if ">" in words else words


def runs_at_once(arguments: list[str]) -> bool:
    """Without training and without a look at the machine."""
    return (
        arguments[0] in ("check", "schema")
        or arguments[-1] in ("--help", "--version")
        or arguments[1:2] in ([path] for path in REPLAY)
    )


@pytest.fixture(scope="module")
def output_of(checkout: Path) -> Any:
    """Runs a command of the documents, once, after the replay that others read."""
    outputs: dict[tuple[str, ...], str] = {}

    def run(*arguments: str) -> str:
        if arguments not in outputs:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(checkout)
                result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, (arguments, result.output, result.exception)
            outputs[arguments] = result.stdout
        return outputs[arguments]

    run("run", REPLAY[0])
    return run


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
@pytest.mark.slow
def test_every_command_runs_or_can_be_parsed(page: Path, output_of: Any) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *arguments in commands(page):
        if program == "make":
            assert arguments[0] in targets
        elif program != "carbonopt":
            assert program in OTHER_PROGRAMS
        elif runs_at_once(arguments):
            assert output_of(*arguments)
        else:
            name, *rest = arguments
            typer.main.get_command(app).commands[name].make_context(name, rest)  # type: ignore[attr-defined]


def test_the_report_page_has_every_section(output_of: Any, checkout: Path) -> None:
    headings = re.findall(
        r"^## (.+)$", prose(checkout / REPLAY[1] / "report" / "report.md"), re.MULTILINE
    )
    assert len(headings) > 8
    assert all(f"\n| {heading} |" in (DOCS / "report.md").read_text() for heading in headings)


def test_every_command_and_option_is_in_its_table() -> None:
    documented = tables("commands.md")[0]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    usages = {usage.split()[1]: usage for usage in documented}
    assert usages.keys() == commands.keys()
    for name, command in commands.items():
        options = {
            opt for param in command.params for opt in param.opts if opt.startswith("--")
        } - {"--help"}
        assert set(re.findall(r"--[\w-]+", usages[name])) == options


@pytest.mark.parametrize("block", blocks("python"), ids=str)
@pytest.mark.slow
def test_every_example_in_python_runs(block: Block, tmp_path: Path) -> None:
    met = {
        "search.md": "assert min(one.values[1] for one in study.trials if one.values) <= 33.0",
        "api.md": "assert best.value <= 75.0 and len(study.trials) == 10",
    }
    for name in ("docs", "reports"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", f"{block.text}\n{met[block.page.name]}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if block.page.name == "api.md":  # Optuna's own study prints its trials
        assert done.stderr == ""


def test_the_tests_of_tried_reports_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "tried-reports.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named <= set(re.findall(r"def (test_\w+)\(", source))


def test_the_lines_that_a_tutorial_marks_are_carbonopts() -> None:
    (script,) = (
        fence
        for fence in FENCE.finditer((DOCS / "tutorial-own-script.md").read_text())
        if "hl_lines" in fence[2]
    )
    (marked,) = re.findall(r'hl_lines="([\d ]+)"', script[2])
    lines = enumerate(script[3].splitlines(), 1)
    ours = [
        number for number, line in lines if re.search(r"\bcarbonopt\b|\bcarbon\.|\brun\.", line)
    ]
    assert [int(number) for number in marked.split()] == ours


# -------------------------------------------------------------------------------------------------------------
# tables


def test_the_pages_of_the_study_file_have_every_key_with_its_default() -> None:
    by_key = {
        key: cells
        for page in ("study-file.md", "tasks.md")
        for table in tables(page)
        for key, cells in table.items()
    }
    documented = {key: cells[0] for key, cells in by_key.items() if key not in TASKS}
    expected = {
        key: default_text(field)
        for key, (field, _) in keys(StudyConfig).items()
        if "hosts[]" not in key
    }
    expected |= {
        f"launch.{key}": default_text(field)
        for launch in (SlurmLaunch, HostfileLaunch, ReplayLaunch, LocalLaunch)
        for key, field in launch.model_fields.items()
        if key != "hosts"  # which is what the hostfile says
    }
    for task in TASKS:  # what all tasks share has the shared default, whatever a task makes of it
        settings = keys(task_class(task).settings, "workload.")
        expected |= {
            key: default_text(field) for key, (field, _) in settings.items() if key not in expected
        }
    for model in (Choices, Range):
        expected |= {
            key: "–" if field.is_required() else default_text(field)
            for key, field in model.model_fields.items()
        }
    assert {key: text for key, text in documented.items() if key not in DIMENSION_NAMES} == expected


def test_a_table_of_a_part_that_the_study_file_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="'bugdet'"):
        with_tables("<!-- keys: budget bugdet -->")


def test_the_table_of_dimensions_is_the_codes() -> None:
    (documented,) = (table for table in tables("study-file.md") if "lora_rank" in table)
    assert documented.keys() == set(DIMENSION_NAMES)
    assert documented["warmup_ratio"] == [
        "warm-up",
        "from 0 to 1",
        "–",
        "quality",
        "`warmup_steps`",
    ]
    assert documented["offload"][1:4] == [
        "`none`, `optimizer`, `parameters`",
        "`none`",
        "cost, memory, kernels",
    ]


def test_the_records_page_has_every_field() -> None:
    record, states, recommendation, confidence = (
        set(table) for table in tables("records.md") if table
    )
    assert record == keys(TrialRecord).keys()
    generated = trial(
        0,
        predictions=(Prediction(source="a", expected="b", predicted="b"),),
        continued_at_steps=(1,),
        earlier_attempts=(Attempt(started_at="2026-01-01T00:00:00+00:00"),),
    ).as_json()
    assert {field.partition(".")[0].removesuffix("[]") for field in record} == generated.keys()
    rare = {"predictions", "continued_at_steps", "earlier_attempts"}
    assert generated.keys() - trial(0).as_json().keys() == rare, "it is there where there are some"
    assert states == set(TrialState)
    unmet = recommend(study(trial(0)), 1.0)
    assert not unmet.met
    assert recommendation == unmet.as_json().keys() | {"caveats"}
    assert confidence == Confidence.model_fields.keys()


def test_the_winners_files_are_the_codes() -> None:
    assert set(tables("reproducing.md")[0]) == set(winner.NAMES)


def test_the_rooms_and_what_they_import_are_the_codes() -> None:
    layers = CONTRACTS[0]["layers"]
    rooms = {room for layer in layers for room in re.findall(r"\w+", layer)}
    importers = {"core": rooms - {"core"}} | IMPORTERS
    documented = tables("architecture.md")[0]
    assert {room: set(re.findall(r"\w+", cells[-1])) for room, cells in documented.items()} == {
        room: {imported for imported in rooms if room in importers.get(imported, ())}
        for room in rooms
    }


def test_the_errors_of_the_troubleshooting_page_are_the_codes() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "carbonopt").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that go on in the next line
    messages = re.findall(
        r"^- \*\*`([^`]+)`\*\*", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(messages) > 10
    for message in messages:
        for part in message.split("…"):
            assert part.strip(" ;:?") in source, message


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (carbonopt.__version__, "Apache-2.0")


# -------------------------------------------------------------------------------------------------------------
# gallery

REPORTS = sorted(report.parent.name for report in (ROOT / "reports").glob("*/report.md"))


def test_the_gallery_shows_every_report_and_has_no_figure_of_its_own() -> None:
    page = (DOCS / "gallery.md").read_text()
    assert sorted(MARKER.findall(page)) == REPORTS
    assert not re.search(r"\d\.\d|%|CO2e \d", MARKER.sub("", page))


@pytest.mark.parametrize("name", REPORTS)
def test_the_gallery_has_a_reports_saving_caveats_and_picture(name: str) -> None:
    folder = ROOT / "reports" / name
    (data,) = (json.loads(path.read_text()) for path in (folder / "data").glob("*.json"))
    shown = entry(name)
    saving = data.get("recommendation", data)["saving_fraction"]
    percent = re.search(r"\*\*([\d.]+) % less CO2e\*\*", shown)
    assert percent is not None
    assert float(percent[1]) == pytest.approx(100 * saving, abs=0.05)
    critical = (folder / "report.md").read_text().count("\n- Critical: ")
    assert shown.count("\n- Critical: ") == critical
    links = [(DOCS / link).resolve() for link in LINK.findall(shown)]
    assert {path.suffix for path in links} == {".png", ".md"}
    assert all(path.is_file() and path.is_relative_to(folder) for path in links)


def test_a_report_without_a_saving_is_refused_by_the_gallery() -> None:
    document = {"headline": "No trial meets the target", "details": ["Nearest: trial 3."]}
    with pytest.raises(ValueError, match="No trial meets the target"):
        headline_sentence(document)
