"""The paper of small studies: it compiles with a real LaTeX, and its numbers are those of the
facts.
"""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from analysis.test_confidence import of_shares, repeated, runs
from paper_facts import INFLUENCE, NOT_KNOWN, batch_effect, returns
from small_studies import (
    HACKED,
    HONEST,
    REPLAY,
    gpu_study,
    on_gpu,
    on_two_machines,
    probe,
    pruned,
    reward_study,
    study,
    trial,
)

from carbonopt import __version__
from carbonopt.core import format as fmt
from carbonopt.core.trial import TrialState
from carbonopt.core.units import human_duration
from carbonopt.report.assemble import whole
from carbonopt.report.caveats import TEMPLATES
from carbonopt.report.document import Document, Level
from carbonopt.report.paper.paper_files import paper_files
from carbonopt.report.paper.paper_text import bibliography, checklist, methods, statement
from carbonopt.report.render.latex import _SHOWN, MOST_ROWS, escape, tables
from carbonopt.report.standards import standard_text
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import Hardware, Intensity, StudyData

needs_latex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
needs_pdftotext = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="needs poppler-utils"
)
NASTY = r"100%_&$#{}~^\ éß漢 --``''<<>>\input{x}$x^2$" + "a_very_long_name" * 4
LARGEST_OVERFULL_PT = 20.0

SEEDS = [{"repeat_of": 1, "seed": seed, "params": {"learning_rate": 2e-3}} for seed in (4, 5)]
NASTY_STUDY: dict[str, Any] = {
    "model": {"name_or_path": NASTY},
    "dataset": {"train_files": [f"shakespeare {NASTY}"]},
    "sequence_length": 64,
}
STUDIES: dict[str, StudyData] = {
    "met": gpu_study(
        on_gpu(0, 20e3, perplexity=4.0), on_gpu(1), on_gpu(2, 5e3, perplexity=8.0), pruned(3)
    ),
    "no trial feasible": study(
        *(trial(number, 0.0, None, state=TrialState.INFEASIBLE, evals=()) for number in (0, 1)),
        sessions=(),
    ),
    "no trials": study(sessions=(), ended=None),
    "one trial": study(trial(0)),
    "all pruned": study(pruned(0), pruned(1)),
    "three seeds": gpu_study(
        on_gpu(0, 20e3, perplexity=4.0),
        on_gpu(1, perplexity=5.0),
        on_gpu(2, 10.1e3, perplexity=5.1, **{**SEEDS[0]}),
        on_gpu(3, 9.9e3, perplexity=4.95, **{**SEEDS[1]}),
        raw={"confirm": {"seeds": 3, "runners_up": 2}},
    ),
    "identical trials": study(trial(0), trial(1), trial(2)),
    "two machines": on_two_machines(),
    "probes": study(
        trial(0), trial(1, 2e-3, 4.0), probes=(probe(0), probe(1, params={"zero_stage": 3}))
    ),
    "no GPU": study(
        trial(0),
        raw={"launch": {"kind": "local", "gpus": [], "cpu_ranks": 2}, "budget": {"hours": 1}},
        provenance=study().provenance.model_copy(
            update={"energy_source": {"cpu": "modelled", "ram": "modelled"}}
        ),
        sessions=(),
    ),
    "replay": study(trial(0), trial(1, 2e-3, 4.0), raw=REPLAY, sessions=(), ended=None),
    "rewards": reward_study(HACKED, HONEST),
    "nasty names": study(trial(0), trial(1, 2e-3, 4.0), name=NASTY, raw={"workload": NASTY_STUDY}),
}
WITH_ALL = {"met", "nasty names"}


@functools.cache
def paper_of(name: str) -> tuple[dict[str, bytes], StudyView, Document]:
    """The files, and what they are made from; of most studies as few trials say little."""
    data = STUDIES[name]
    if name == "nasty names":
        hardware = Hardware(cpu=NASTY, cpu_cores=8, ram_gib=64, gpus=(NASTY,))
        intensity = Intensity(g_co2e_per_kwh=230.0, source=NASTY, place=NASTY, year=2023)
        provenance = data.provenance.model_copy(
            update={"hardware": hardware, "intensity": intensity}
        )
        data = data.model_copy(update={"provenance": provenance})
    made: dict[str, Any] = {"influence": NOT_KNOWN, "batch": None, "diminishing_returns": None}
    if name in WITH_ALL:
        made = {"influence": INFLUENCE, "batch": batch_effect(), "diminishing_returns": returns(1)}
    looked_at = StudyView(data, **made)
    document = whole(looked_at)
    return paper_files(looked_at, document), looked_at, document


def compiled(folder: Path, document: str = "main") -> str:
    """The log of the last of LaTeX's runs."""
    latex = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", document]
    for command in (latex, ["bibtex", document], latex, latex):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout[-3000:]
    return (folder / f"{document}.log").read_text(errors="replace")


def check_fonts(pdf: Path) -> None:
    """All are embedded, and as outlines."""
    table = subprocess.run(["pdffonts", pdf], capture_output=True, text=True, check=True).stdout
    rows = table.splitlines()[2:]
    assert rows and "Type 3" not in table
    for row in rows:
        assert row.split()[-5] == "yes", row  # emb, sub, uni, object, ID


@needs_latex
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.slow
def test_the_document_compiles_without_a_complaint(tmp_path: Path, name: str) -> None:
    for file, content in paper_of(name)[0].items():
        (tmp_path / file).write_bytes(content)
    log = compiled(tmp_path)
    for complaint in ("undefined", "Missing character", "multiply defined", "Float too large"):
        assert complaint not in log
    overfull = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
    assert max(overfull, default=0.0) <= LARGEST_OVERFULL_PT
    assert "Warning--" not in (tmp_path / "main.blg").read_text()
    check_fonts(tmp_path / "main.pdf")


@needs_latex
@needs_pdftotext
def test_every_sign_that_stays_itself_has_a_glyph(tmp_path: Path) -> None:
    main = paper_of("one trial")[0]["main.tex"].decode()
    preamble = main[: main.index(r"\title")]
    signs = " ".join(chr(code) for code in range(33, 127)) + " " + " ".join(sorted(_SHOWN))
    body = rf"{escape(signs)}\cite{{x}}\bibliographystyle{{plain}}\bibliography{{references}}"
    (tmp_path / "references.bib").write_text("@misc{x, author={X}, title={Y}}")
    (tmp_path / "main.tex").write_text(rf"{preamble}\begin{{document}}{body}\end{{document}}")
    assert "Missing character" not in compiled(tmp_path)
    check_fonts(tmp_path / "main.pdf")
    text = subprocess.run(
        ["pdftotext", "main.pdf", "-"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert {chr(code) for code in range(33, 127)} - set("'`") <= set(
        text
    )  # an apostrophe is a curly one


def test_escaping() -> None:
    assert escape(r"100%_&$#{}") == r"100\%\_\allowbreak{}\&\$\#\{\}"
    assert escape("a~^\\b") == r"a\textasciitilde{}\textasciicircum{}\textbackslash{}b"
    assert escape("éß漢ắ") == "éß[U+6F22]a".replace("[U", "{[}U")
    assert escape("a--b <<c>> ,, ''") == "a-{}-b <{}<c>{}> ,{}, '{}'"
    assert escape("[x]*") == "{[}x]{*}"
    assert escape("0.718 g CO2e, 25.2 %") == r"0.718~g~CO\textsubscript{2}e, 25.2~\%"
    assert escape("-12 % to 1e-3, gpt-2") == r"$-$12~\% to 1e-3, gpt-2"
    assert escape("two\nlines\x07") == "two lines"
    assert escape("x" * 50) == r"\allowbreak{}".join(["x" * 24, "x" * 24, "xx"])


def test_what_the_study_cant_show_has_no_file() -> None:
    assert set(paper_of("no trials")[0]) == {
        *("methods.tex", "statement.tex", "checklist.tex", "references.bib", "main.tex"),
        "table-energy.tex",
    }
    every = set(paper_of("met")[0])
    for name in ("pareto", "batch", "influence", "effects", "returns", "energy"):
        assert {f"figure-{name}.pdf", f"figure-{name}.png"} <= every
    assert {
        f"table-{name}.tex" for name in ("configuration", "pareto", "energy", "influence")
    } <= every


def test_the_same_study_gives_the_same_bytes() -> None:
    assert paper_of("met")[0] == paper_of.__wrapped__("met")[0]


def test_each_tex_says_what_becomes_of_edits() -> None:
    texts = [
        content.decode() for name, content in paper_of("met")[0].items() if name.endswith(".tex")
    ]
    assert len(texts) >= 7
    for text in texts:
        assert text.startswith(
            f"% Generated by carbonopt {__version__}; copy the folder before editing"
        )


SAYS = {
    "no trial feasible": (
        "No configuration was shown to meet the target perplexity of 6",
        "did not fit in memory",
    ),
    "one trial": ("one run: its spread is not known", "nothing pays the search back"),
    "all pruned": ("No trial completed: without a baseline no saving is stated", "2 pruned"),
    "three seeds": (
        "mean of 3 seeds",
        "run with up to 3 seeds each",
        "n = 3, ",
        "4 trials, 2 of them repeats",
    ),
    "no GPU": ("No GPU is in these figures",),
    "replay": (
        "Nothing was trained for this study",
        "Energy was not measured in this study",
        "not yet",
    ),
    "met": (
        "Modelled, not measured: the energy of the CPU and RAM",
        "Measured: the energy of the GPUs",
        "No offset",
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_the_text_says_what_the_study_cant_support(name: str) -> None:
    files = paper_of(name)[0]
    text = " ".join(
        (files["methods.tex"] + files["statement.tex"]).decode().replace("~", " ").split()
    )
    for said in SAYS[name]:
        assert said in text


def test_the_methods_say_how_the_energy_of_each_component_is_known() -> None:
    view = StudyView(gpu_study(on_gpu(0), on_gpu(1)))
    text = " ".join(methods(view, whole(view)).replace("~", " ").split())
    known = view.data.provenance.energy_source
    assert len(known) > 1
    assert all(f"{component.upper()} {how}" in text for component, how in known.items())


def checklist_of(data: StudyData) -> str:
    view = StudyView(data)
    return checklist(view, whole(view))


def test_attempts_whose_energy_counts_are_named_with_the_runs() -> None:
    lost = {"attempt": 3, "earlier_attempts_energy_kwh": 1e-3}
    data = gpu_study(on_gpu(0), on_gpu(1, **lost))
    assert data.run_counts == (2, 0, 0, 2)
    view = StudyView(data)
    described = str(json.loads(standard_text(view, "boamps"))["task"])
    texts = checklist_of(data), statement(view, whole(view)), described
    assert all("2 trials and 2 interrupted attempts" in text.replace("~", " ") for text in texts)


def answers(data: StudyData) -> dict[str, tuple[str, str]]:
    """The answer to each question of the checklist, and all that is said of it."""
    parts = re.split(r"\\paragraph\{(.*?)\.\}", checklist_of(data))
    asked = zip(parts[1::2], parts[2::2], strict=True)
    return {
        question: (re.search(r"\\answer(\w+)", said)[1], " ".join(said.replace("~", " ").split()))  # type: ignore[index]
        for question, said in asked
    }


def test_the_checklist_counts_every_run_and_states_the_ledgers_total() -> None:
    runs = (on_gpu(0, 20e3, perplexity=4.0), on_gpu(1, peak_memory_gib=7.25), pruned(2))
    data = gpu_study(*runs, probes=(probe(0),))
    answer, said = answers(data)["Compute resources"]
    assert answer == "Yes"
    assert "3 trials and 1 probe; of the trials, 2 complete and 1 pruned" in said
    assert "at most 7.25 GiB on a rank" in said
    assert fmt.energy_text(data.spent_kwh()) in said
    assert "1 min 10 s of one GPU" in said
    assert "took 36.0 s to 1 min 06 s" in said
    assert answers(data)["Code and data"][0] == "Yes"


def test_the_checklist_says_no_where_no_spread_is_known() -> None:
    assert answers(STUDIES["one trial"])["Statistical significance"][0] == "No"
    answer, said = answers(STUDIES["three seeds"])["Statistical significance"]
    assert answer == "Yes" and "mean of 3 seeds" in said and "with 95 \\% confidence" in said


def test_the_checklist_of_a_start_that_is_recommended_claims_a_bound_only_with_repeats() -> None:
    refuted = repeated(runs(0, [2.0], [9.0]), runs(1, [1.0] * 3, [9.0, 14.0, 15.0]), start=True)
    bounded = repeated(runs(0, [1.0] * 2, [9.0, 9.8]), start=True)
    for data, expected in ((refuted, "No"), (bounded, "Yes")):
        answer, said = answers(data)["Statistical significance"]
        assert answer == expected
        assert ("Student" in said) is (expected == "Yes")
        assert "no saving to bound" in said
        view = StudyView(data)
        critical = [each for each in whole(view).caveats if each.level is Level.CRITICAL]
        assert all(escape(caveat.finding).replace("~", " ") in said for caveat in critical)
    assert critical


@pytest.mark.parametrize(
    ("data", "of_logarithm", "sign"),
    [
        (STUDIES["three seeds"], True, "plus"),
        (of_shares([95, 93, 96]), False, "minus"),
    ],
)
def test_the_methods_have_the_statistics_of_the_quality(
    data: StudyData, of_logarithm: bool, sign: str
) -> None:
    view = StudyView(data)
    said = methods(view, whole(view))
    assert ("geometric" in said) is ("is its logarithm" in said) is of_logarithm
    assert f"{sign} $t_" in said and (r"1/\sqrt{12}$ of an example" in said) is not of_logarithm


def test_the_checklist_of_a_replay_and_of_no_result_claims_nothing() -> None:
    assert answers(STUDIES["replay"])["Compute resources"][0] == "NA"
    unmet = answers(STUDIES["all pruned"])
    assert unmet["Compute resources"][0] == "Yes"
    assert unmet["Statistical significance"][0] == unmet["Code and data"][0] == "NA"
    assert "This is a draft" in checklist_of(study(trial(0), ended=None))
    assert "draft: the study" not in checklist_of(study(trial(0)))


# Verbs in the imperative, which begin a sentence or follow a colon or semicolon.
ORDER = re.compile(
    r"(?:^|[.:;] )(allow|raise|run|read|train|lower|set|use|give|repeat|let|say|evaluate|look|see)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("key", TEMPLATES)
def test_what_a_paper_states_of_a_caveat_gives_no_orders(key: str) -> None:
    finding = TEMPLATES[key][1].partition("{then}")[0]
    assert not ORDER.search(finding) and "{advice}" not in finding


@pytest.mark.parametrize("name", STUDIES)
def test_a_paper_gives_its_reader_no_orders(name: str) -> None:
    """A page's caveats end in what its reader can do; whoever reads a paper can't."""
    files, _, document = paper_of(name)
    for caveat in document.caveats:
        assert caveat.text.startswith(caveat.finding.removesuffix(".")) and caveat.finding.endswith(
            "."
        )
        assert not ORDER.search(caveat.finding), caveat.finding
    for file in ("methods.tex", "statement.tex", "checklist.tex"):
        for line in files[file].decode().splitlines():
            assert line.startswith("%") or not ORDER.search(line), line


def test_the_statement_says_that_start_up_and_evaluations_are_not_in_a_runs_energy() -> None:
    run = on_gpu(0, 20e3)
    assert run.energy_kwh.total > run.energy_kwh.train
    view = StudyView(gpu_study(run))
    said = " ".join(statement(view, whole(view)).replace("~", " ").split())
    energy, took = fmt.energy_text(run.energy_kwh.train), human_duration(run.duration_s.total)
    assert f"The training of one run of the recommended configuration uses {energy}" in said
    assert f"The run took {took} with its start-up and evaluations, whose energy counts in" in said


@needs_latex
def test_the_statement_of_a_replay_claims_no_time_that_the_table_lacks() -> None:
    """A table has the time of steps alone: not that of start-up, evaluations or pauses."""
    files, study, _ = paper_of("replay")
    took = study.record(study.recommendation.trial).duration_s
    assert took.total > took.train
    said = " ".join(files["statement.tex"].decode().replace("~", " ").split())
    assert f"The training took {human_duration(took.train)}." in said
    assert "start-up" not in said and "pauses" not in said
    assert f"used at least {fmt.energy_text(study.recommendation.study_energy_kwh)}" in said
    runs = fmt.count_text(study.recommendation.break_even_runs, "run")
    assert f"paid back after at least {runs} of the recommendation" in said
    told = " ".join(files["methods.tex"].decode().split())
    assert "start-up, was not recorded" in told and "start-up and evaluation count" not in told


@pytest.mark.parametrize(
    ("seeds", "runners_up", "baseline", "of_the_search", "of_the_start"),
    [(4, 2, True, 9, 4), (3, 1, True, 4, 3), (2, 0, False, 1, None)],
)
def test_the_methods_have_all_runs_of_the_confirmation(
    seeds: int, runners_up: int, baseline: bool, of_the_search: int, of_the_start: int | None
) -> None:
    confirm = {"seeds": seeds, "runners_up": runners_up, "baseline": baseline}
    start = {"global_batch_size": 16, "learning_rate": 1e-3, "epochs": 2}
    space = study().config.search.space.model_dump(mode="json", exclude_none=True)
    search = {"space": space, "start": start}
    view = StudyView(study(trial(0), raw={"confirm": confirm, "search": search}))
    said = methods(view, whole(view)).replace("~", " ")
    counts = [int(number) for number in re.findall(r"in at most (\d+) further run", said)]
    of_baseline = [int(number) for number in re.findall(r"with up to (\d+) seeds, until", said)]
    assert counts == [of_the_search]
    assert of_baseline == ([] if of_the_start is None else [of_the_start])
    assert ("new ones" in said) is (runners_up > 0)


@needs_latex
@needs_pdftotext
def test_the_statement_has_one_heading(tmp_path: Path) -> None:
    for file, content in paper_of("three seeds")[0].items():
        (tmp_path / file).write_bytes(content)
    compiled(tmp_path)
    text = subprocess.run(
        ["pdftotext", "main.pdf", "-"], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert text.count("Carbon statement") == 1


def test_what_is_used_is_cited() -> None:
    def keys(text: str, pattern: str) -> set[str]:
        return set(re.findall(pattern, text))

    tpe = study(
        trial(0),
        raw={"search": {**study().config.search.model_dump(mode="json"), "sampler": "tpe"}},
    )
    text = methods(StudyView(tpe), whole(StudyView(tpe)))
    entries, cited = (
        keys(bibliography(tpe, learned=False), r"@\w+\{([^,]+),"),
        keys(text, r"\\cite\{([^}]+)\}"),
    )
    assert entries == cited
    assert tpe.provenance.energy_source["gpu"] == "measured" and "nvml" in cited
    assert {
        "bergstra2011tpe",
        "akiba2019optuna",
        "rajbhandari2020zero",
        "courty2024codecarbon",
    } <= cited
    assert "python-docs" in cited
    assert {"karpathy2015unreasonable", "pedregosa2011scikit"} <= keys(
        paper_of("nasty names")[0]["methods.tex"].decode(), r"\\cite\{([^}]+)\}"
    )


@pytest.mark.slow
def test_a_long_front_keeps_to_its_page_and_keeps_the_recommendation() -> None:
    data = study(*(trial(number, 1e-3 + 1e-5 * number, 7 - 0.01 * number) for number in range(200)))
    looked_at = StudyView(data)
    table = tables(whole(looked_at))["pareto"]
    rows = [line for line in table.splitlines() if line.endswith(r"\\")][1:]
    assert MOST_ROWS <= len(rows) <= MOST_ROWS + 1
    assert rf"\textbf{{{looked_at.recommendation.trial}}}" in table
    assert "left out" in table


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\d)")
SCALES = (1.0, 100.0, 1e3, 1e6, 3.6e3, 3.6e6)  # percent; g, mg; kJ, J


def shown_numbers(tex: str) -> set[str]:
    """All but those in commands: keys, labels, widths."""
    plain = re.sub(
        r"\\(cite|label|input|includegraphics|setlength)(\[[^]]*\])?\{[^}]*\}(\{[^}]*\})?", "", tex
    )
    plain = re.sub(
        r"CO\\textsubscript\{2\}e|U\+[0-9A-F]+|%.*$", "", re.sub(r"\\%", "", plain), flags=re.M
    )
    return {
        number.rstrip(",")
        for number in NUMBER.findall(plain.replace("~", " ").replace(r"\allowbreak{}", ""))
    }


def all_numbers(value: Any) -> set[float]:
    if isinstance(value, dict):
        return {number for child in value.values() for number in all_numbers(child)}
    if isinstance(value, list):
        return {number for child in value for number in all_numbers(child)}
    return (
        {abs(float(value))}
        if isinstance(value, int | float) and not isinstance(value, bool)
        else set()
    )


def unfounded(tex: str, results: Any, texts: str, config: Any) -> set[str]:
    """Numbers that neither a text of the document nor, rounded alike, a figure of the analyses or
    of the study file has.
    """
    texts_numbers = set(NUMBER.findall(texts))
    figures = all_numbers(results) | all_numbers(config)

    def is_figure(shown: str) -> bool:
        digits = len(re.sub(r"e.*|[.,]", "", shown).lstrip("0")) or 1
        value = float(shown.replace(",", ""))
        return any(
            float(f"{figure * scale:.{digits - 1}e}") == value
            for figure in figures
            for scale in SCALES
        )

    return {
        shown for shown in shown_numbers(tex) if shown not in texts_numbers and not is_figure(shown)
    }


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "nasty names"])
def test_every_number_is_one_of_the_results(name: str) -> None:
    files, looked_at, document = paper_of(name)
    texts = json.dumps(document.as_json()) + f" {__version__} "
    tex = {file: content.decode() for file, content in files.items() if file.endswith(".tex")}
    tex["main.tex"] = tex["main.tex"].partition(r"\maketitle")[2]
    config, results = looked_at.data.config.model_dump(mode="json"), looked_at.results()
    for file, text in tex.items():
        assert unfounded(text, results, texts, config) == set(), file
    assert unfounded("It emits 12.345~g, or 77.7~\\%", results, texts, config) == {"12.345", "77.7"}
