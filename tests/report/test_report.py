"""The report of small studies: nothing of the user's becomes markup, every odd study renders, the
figures agree.
"""

import html
import json
import math
import re
import sys
import warnings
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import caveats_of, document_of, markdown_of, numbers_of
from small_studies import (
    HACKED,
    HONEST,
    INTENSITY_G_PER_KWH,
    REPLAY,
    SAME,
    TRACE,
    evaluation,
    gpu_study,
    on_gpu,
    on_two_machines,
    probe,
    pruned,
    reward_study,
    study,
    trial,
)

from carbonopt.analysis.recommend import recommend
from carbonopt.core.evaluations import EvalPoint
from carbonopt.core.format import percent_text
from carbonopt.core.quality import ACCURACY
from carbonopt.core.trial import (
    Failure,
    Prediction,
    QualityResult,
    StopReason,
    TrialRecord,
    TrialState,
)
from carbonopt.report.caveats import TEMPLATES
from carbonopt.report.render.markdown import escape
from carbonopt.report.sections.memory_section import section
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report
from carbonopt.spec.model_memory import PROFILED, Activations, MemoryProfile, ModelMemory, Moment
from carbonopt.spec.study_data import Intensity, Provenance, StudyData
from carbonopt.spec.trial_spec import Prepared

EVIL = """<script>alert(1)</script> | `x` [a](javascript:b) "'&{{7*7}} </script>"""

NO_STEPS = {"state": TrialState.FAILED, "stop_reason": None, "stages": None, "steps_done": None}
ODD_STUDIES = {
    "no trials": study(),
    "one trial": study(trial(0)),
    "all pruned": study(pruned(0), pruned(1)),
    "target missed": study(trial(0, perplexity=7.0), pruned(1)),
    "nothing measured": study(
        trial(
            0,
            perplexity=None,
            state=TrialState.FAILED,
            energy_kwh=None,
            emissions_kg_co2e=None,
            evals=(),
        )
    ),
    "zero emissions": study(trial(0, emissions_kg_co2e=0.0), trial(1, emissions_kg_co2e=0.0)),
    "none fits": study(
        *(trial(number, 0.0, None, state=TrialState.INFEASIBLE, evals=()) for number in (0, 1))
    ),
    "identical trials": study(trial(0), trial(1), trial(2)),
    "two machines": on_two_machines(),
    "predictions": study(
        trial(
            0, predictions=(Prediction(source="How many?", expected="SELECT 1.50", predicted=""),)
        ),
        trial(1),
    ),
    "probes": study(trial(0), trial(1, 2e-3, 4.0), probes=(probe(0), probe(1, **NO_STEPS))),
    "infinite perplexity": study(trial(0, perplexity=math.inf), trial(1), pruned(2, None)),
    "far apart": study(trial(0, 1e-6, 5.9), trial(1, 1e2, 2.0), trial(2, 1.0, 1e30)),
    "as far apart as floats go": study(
        trial(0), trial(1, 2e-3, 1e300), trial(2, 1e-310, sys.float_info.max)
    ),
    "replay": study(
        trial(0),
        trial(1, 2e-3, 4.0),
        provenance=Provenance(
            hardware=None,
            versions={},
            intensity=Intensity(
                g_co2e_per_kwh=INTENSITY_G_PER_KWH, source="given", place="somewhere"
            ),
            energy_source={"gpu": "recorded"},
            study_file="",
        ),
        sessions=(),
        ended=None,
        raw=REPLAY,
    ),
    "read twice": gpu_study(on_gpu(0), on_gpu(1, 20e3, disagreement=-0.04, perplexity=4.0)),
    "GPUs alone": gpu_study(on_gpu(0), raw={"carbon": {"country": "USA", "objective": "gpu"}}),
    "no GPU energy in a phase": gpu_study(on_gpu(0, 0.0), outer=0.0),
    "repeated": gpu_study(on_gpu(0, **SAME), on_gpu(1, 11e3, seed=4, **SAME), trace=TRACE),
    "repeated without spread": study(trial(0, **SAME), trial(1, **SAME), trial(2, perplexity=1e30)),
    "a trace of nothing": gpu_study(
        on_gpu(0), trace=TRACE.model_copy(update={"g_co2e_per_kwh": (None,)})
    ),
    "rewards": reward_study(HACKED, HONEST),
    "no GPU": study(
        trial(0),
        raw={"launch": {"kind": "local", "gpus": [], "cpu_ranks": 2}, "budget": {"hours": 1}},
        sessions=(),
    ),
}


class Page(HTMLParser):
    """Counts tags, collects the text outside scripts, and what the tags would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            value for name, value in attrs if name in ("src", "href", "data", "action") and value
        ]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def odd_report(tmp_path_factory):
    """The folder of an odd study's report, by its name: written once, without a warning, and left
    as it is.
    """

    @cache
    def folder(kind: str) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return write_report(ODD_STUDIES[kind], tmp_path_factory.mktemp("odd")).parent

    return folder


@pytest.mark.parametrize("kind", ODD_STUDIES)
def test_odd_studies_render(kind, odd_report):
    data, folder = ODD_STUDIES[kind], odd_report(kind)
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    headline = json.loads((folder / "data/report.json").read_text())["document"]["headline"]
    assert headline in page.text.replace("\N{NO-BREAK SPACE}", " ")
    for word in ("nan", "inf", "None"):
        assert not re.search(
            rf"(?<![\w.]){re.escape(word)}(?!\w)", (folder / "report.md").read_text()
        ), word
    for figure in folder.glob("paper/figure-*"):
        assert figure.read_bytes().startswith(b"%PDF" if figure.suffix == ".pdf" else b"\x89PNG")
    assert ("paper/figure-pareto.png" in (folder / "report.md").read_text()) == bool(
        list(folder.glob("paper/figure-pareto.p*"))
    )
    assert (folder / "winner").exists() == recommend(data).met


def evil_study() -> StudyData:
    failure = Failure(kind="crash", text=EVIL + "\nmore")
    failed = trial(1, perplexity=None, state=TrialState.FAILED, failure=failure)
    generated = trial(0, predictions=(Prediction(source=EVIL, expected=EVIL, predicted=EVIL),))
    return study(generated, failed, trial(2, 2e-3, 4.0), name=EVIL, ended=EVIL + "\n# heading")


def test_user_text_stays_text_on_the_page(tmp_path):
    plain = Page(
        write_report(study(trial(0), trial(1, 2e-3, 4.0)), tmp_path).read_text(encoding="utf-8")
    )
    page = Page(write_report(evil_study(), tmp_path / "evil").read_text(encoding="utf-8"))
    assert plain.tags.count("script") == page.tags.count("script") == 3
    assert "a" not in page.tags and "a" not in plain.tags
    assert (
        page.text.count("<script>alert(1)</script>") >= 6
    )  # name, state, end and a prediction's texts, as text
    assert not any("alert(1)" in script for script in page.scripts[1:])


def test_page_loads_nothing(tmp_path):
    page = Page(write_report(study(trial(0), trial(1)), tmp_path).read_text(encoding="utf-8"))
    assert page.loads and all(address.startswith("data:image/png") for address in page.loads)
    assert "link" not in page.tags
    assert "default-src 'none'" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'plotlyServerURL: ""' in page.scripts[-1] and "sendChartToCloud" not in page.scripts[-1]


def test_markdown_escapes_what_could_be_markup(tmp_path):
    write_report(evil_study(), tmp_path)
    text = (tmp_path / "report.md").read_text()
    before, _, rest = text.partition("The study file:")
    fenced, _, after = rest.rpartition("## More caveats")
    prose = before + after
    assert "<" not in prose
    assert not re.search(r"(?<!\\)`", prose)
    pictures = re.findall(r"(?<!\\)\]\(([^)]*)\)", prose)
    assert pictures and all(re.fullmatch(r"paper/figure-\w+\.png", picture) for picture in pictures)
    assert not re.search(r"^# heading", prose, re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table
    assert fenced.count("```") == 2


def prose_of(markdown: str) -> list[str]:
    """Headings and sentences as they read; tables, lists and the code block left out."""
    blocks = [
        " ".join(block.split())
        for block in markdown.split("\n\n")
        if not re.match(r"[|`!-]", block)
    ]
    plain = (html.unescape(re.sub(r"\\(.)", r"\1", block)) for block in blocks)
    return [text.strip("*").lstrip("#> ").removesuffix(":") for text in plain]


@pytest.mark.parametrize("kind", ["repeated", "replay", "read twice", "all pruned", "no trials"])
def test_markdown_has_the_pages_parts_in_the_pages_order(kind, odd_report):
    page = Page((odd_report(kind) / "index.html").read_text(encoding="utf-8"))
    text = " ".join(page.text.replace("\N{NO-BREAK SPACE}", " ").split())
    shown, _, others = (odd_report(kind) / "report.md").read_text().partition("## More caveats")
    parts, at = prose_of(shown), 0
    assert len(parts) > 12
    for part in parts:
        at = text.find(part, at)
        assert at >= 0, part
    assert all(part in text for part in prose_of(others))  # folded at the page's top


def test_study_file_can_not_leave_its_code_block():
    data = evil_study()
    provenance = data.provenance.model_copy(update={"study_file": "name: x\n```\n# out\n````\n"})
    block = markdown_of(data.model_copy(update={"provenance": provenance})).partition(
        "The study file:"
    )[2]
    block = block.rpartition("## More caveats")[0].strip().splitlines()
    assert block[0] == "`````yaml" and block[-1] == "`````" and "# out" in block[1:-1]


def test_escape_of_each_special_character():
    assert escape("a|b*c_d`e") == r"a\|b\*c\_d\`e"
    assert escape("<b>&\n# x") == r"&lt;b&gt;&amp; \# x"


@pytest.mark.parametrize("kind", ["replay", "read twice", "repeated", "rewards"])
def test_every_number_of_the_markdown_is_in_the_json(kind):
    shown = json.dumps(document_of(ODD_STUDIES[kind]), ensure_ascii=False)
    number = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
    markdown = set(number.findall(markdown_of(ODD_STUDIES[kind])))
    assert len(markdown) > 30
    assert markdown <= set(number.findall(shown))


def test_figures_of_the_answer(tmp_path):
    data = study(trial(0), trial(1, 2e-3, 4.0), pruned(2))
    write_report(data, tmp_path)
    values = json.loads((tmp_path / "data/report.json").read_text())
    assert values["document"] == document_of(data)
    assert values["recommendation"]["trial"] == 0
    assert values["recommendation"]["saving_fraction"] == pytest.approx(0.5)
    tiles = {tile["label"]: tile["text"] for tile in values["document"]["tiles"]}
    # 1e-3 + 2e-3 + 2e-4 training, 3 × 2e-4 beside it, 1e-5 in gaps: 3.81e-3 kWh; × 0.23 × 1.1 =
    # 0.964 g
    assert tiles["Emissions of a run"] == "0.253 g CO2e"
    assert tiles["The study itself"] == "0.964 g CO2e"
    assert tiles["Saving on a run"] == "50 %"
    assert tiles["Pays back after"] == "4 runs"


@pytest.mark.parametrize(
    ("right", "examples", "lowest"),
    # Wilson's interval: of 12 of 12, 12 ÷ (12 + 1.96²)
    [(12, 12, 12 / (12 + 1.959964**2)), (396, 399, None), (400, 400, None)],
)
def test_few_evaluation_examples_are_a_caveat_where_they_leave_the_target_open(
    right: int, examples: int, lowest: float | None
) -> None:
    reached = QualityResult(
        name="accuracy", value=right / examples, sum=float(right), count=examples
    )
    evals = (EvalPoint.of(ACCURACY, right, examples, step=10, tokens=None),)
    record = trial(0, perplexity=None, quality=reached, evals=evals, total_steps=10)
    raw = {
        "workload": {
            "task": "classification",
            "model": {"from_config": {"model_type": "vit"}},
            "dataset": {"builtin": "digits"},
        },
        "target": {"accuracy": 0.9},
    }
    prepared = Prepared(fingerprint="f", train_examples=9, eval_examples=examples, versions={})
    caveats = caveats_of(study(record, prepared=prepared, raw=raw))
    assert "selection_bias" not in caveats and "selection_bias_of_share" not in caveats, "no choice"
    other = trial(1, 2e-3, None, quality=reached, evals=evals, total_steps=10)
    chosen = caveats_of(study(record, other, prepared=prepared, raw=raw))["selection_bias_of_share"]
    share = (right + 2) / (examples + 4)
    most = 1.3 * math.sqrt(share * (1 - share) / (examples + 4))
    assert chosen.numbers["most"] == pytest.approx(most) and f"{most:.2g}" in chosen.text
    if lowest is None:
        assert "few_examples" not in caveats
    else:
        numbers = caveats["few_examples"].numbers
        assert numbers["examples"] == examples
        assert numbers["lowest"] == pytest.approx(lowest, rel=1e-6)


@pytest.mark.parametrize(("examples", "said"), [(50, True), (5000, False), (1, False)])
def test_examples_that_were_recorded_or_reported_count_as_those_of_a_task(
    examples: int, said: bool
) -> None:
    """A script that does not tell how many there were has 1."""
    right = 0.92 * examples
    reached = QualityResult(name="accuracy", value=0.92, sum=right, count=examples)
    evals = (EvalPoint.of(ACCURACY, right, examples, step=10, tokens=None),)
    changes = {"quality": reached, "evals": evals, "total_steps": 10}
    records = trial(0, perplexity=None, **changes), trial(1, 2e-3, None, **changes)
    caveats = caveats_of(study(*records, raw={**REPLAY, "target": {"accuracy": 0.9}}))
    assert ("few_examples" in caveats) == said
    if said:
        assert caveats["few_examples"].numbers["examples"] == examples
        assert "dataset." not in caveats["few_examples"].text
    assert ("selection_bias_of_share" in caveats) == (examples > 1)


def test_caveats_name_what_applies():
    caveats = caveats_of(ODD_STUDIES["replay"])
    assert {"replay", "few_trials", "running", "single_run", "baseline_not_given"} <= caveats.keys()
    assert caveats["few_trials"].numbers == {"completed": 2} and caveats["single_run"].numbers == {
        "candidates": 2
    }
    assert (
        not {"modelled_energy", "nothing_measured", "meter_setup", "own_optimizer_step"}
        & caveats.keys()
    )
    assert "/somewhere" not in markdown_of(ODD_STUDIES["replay"])
    caveats = caveats_of(study(trial(0, perplexity=5.99), trial(1, 2e-3, 4.0)))
    assert caveats["modelled_energy"].numbers == {"components": "CPU"} and "replay" not in caveats
    assert caveats["near_target_single_run"].numbers["margin"] == pytest.approx(1 - 5.99 / 6)
    assert "meter_setup" in caveats and "own_optimizer_step" not in caveats


def test_failed_trials_are_said_beside_ones_that_completed():
    failure = Failure(kind="crash", text="it broke.\nand more")
    failed = trial(1, perplexity=None, state=TrialState.FAILED, failure=failure)
    numbers = numbers_of(study(trial(0), failed, trial(2)), "some_failed")
    assert numbers == {"count": 1, "of": 3, "trial": 1, "text": "it broke"}
    interrupted = failed.model_copy(update={"stop_reason": StopReason.INTERRUPTED})
    assert "some_failed" not in caveats_of(study(trial(0), interrupted))


def test_trainings_that_broke_down_are_said():
    def of(number: int, *perplexities: float) -> TrialRecord:
        points = [
            evaluation(value, tokens=100).model_copy(update={"step": 10 * place})
            for place, value in enumerate(perplexities, start=1)
        ]
        return trial(number, perplexity=perplexities[-1], evals=tuple(points))

    broken = of(1, 10.0, 7.0, 20.0, 19.0)
    assert numbers_of(study(trial(0), broken), "broke_down") == {
        "trial": 1,
        "quality": "perplexity",
        "first": pytest.approx(10.0),
        "before": pytest.approx(7.0),
        "learned_at": 20,
        "after": pytest.approx(20.0),
        "lost_at": 30,
    }
    both = numbers_of(study(trial(0), broken, of(2, 9.0, 5.0, 30.0)), "broke_down_several")
    assert both == {"trials": [1, 2], "quality": "perplexity"}
    cheapest = of(1, 10.0, 5.0, 18.0).model_copy(update={"emissions_kg_co2e": 1e-9})
    recommended = caveats_of(study(trial(0), cheapest, target=20.0))
    assert recommended["recommended_broke_down"].numbers["trial"] == 1
    spike = caveats_of(study(trial(0), of(1, 10.0, 7.0, 20.0, 6.0)))
    assert not {"recommended_broke_down", "broke_down", "broke_down_several"} & (
        spike.keys() | (recommended.keys() - {"recommended_broke_down"})
    )


def test_evaluation_on_training_files_is_critical():
    def of(train: str, evaluation: str) -> StudyData:
        files = {"train_files": ["/a/x.txt", train], "eval_files": [evaluation]}
        raw = study().config.model_dump(mode="json")["workload"]
        return study(trial(0), raw={"workload": {**raw, "dataset": files}})

    assert numbers_of(of("/a/y.txt", "/a/y.txt"), "evaluated_on_training") == {"files": "y.txt"}
    assert "evaluated_on_training" not in caveats_of(of("/a/y.txt", "/b/y.txt"))


def test_a_stopped_trial_that_had_met_another_target_is_said():
    point = evaluation(4.4, tokens=10).model_copy(update={"train_energy_kwh": 1e-3})
    capped = pruned(2).model_copy(update={"stop_reason": StopReason.CAP, "evals": (point,)})
    data = study(trial(0), trial(1, 2e-3, 4.0), capped)
    assert numbers_of(data, "met_before_stopped", 4.5) == {"trials": [2], "own": 6.0}
    dearer = capped.model_copy(
        update={"evals": (point.model_copy(update={"train_energy_kwh": 3e-3}),)}
    )
    assert "met_before_stopped" not in caveats_of(study(trial(0), trial(1, 2e-3, 4.0), dearer), 4.5)
    assert "met_before_stopped" not in caveats_of(data)


def test_what_was_stopped_for_the_own_target_may_be_better_at_another():
    capped = pruned(4).model_copy(update={"stop_reason": StopReason.CAP})
    data = study(trial(0), trial(1, 2e-3, 4.0), pruned(2), pruned(3), capped)
    assert numbers_of(data, "stopped_for_own_target", 8.0) == {"stopped": 2, "own": 6.0}
    assert numbers_of(data, "stopped_for_own_target", 4.5) == {"stopped": 1, "own": 6.0}
    assert "stopped_for_own_target" not in caveats_of(data)


def test_a_target_that_rules_nothing_out_is_named_where_the_quality_suffers() -> None:
    """Trial 0 is the cheaper one; the most accurate one is the baseline."""
    key = "target_decided_nothing"
    numbers = numbers_of(study(trial(0, perplexity=5.5), trial(1, 2e-3, 4.0)), key)
    assert (numbers["value"], numbers["base"]) == (5.5, 4.0)
    assert numbers["worse"] == pytest.approx(0.375)
    for others in (
        [trial(1, 2e-3, 5.4)],  # hardly better
        [trial(1, 2e-3, 4.0), trial(2, 3e-3, 6.5)],  # one misses the target
        [trial(1, 2e-3, 4.0), pruned(2)],  # one was stopped for it
    ):
        assert key not in caveats_of(study(trial(0, perplexity=5.5), *others))


def test_repeats_are_no_other_configurations():
    repeats = [
        trial(number, repeat_of=0, seed=number, params={"learning_rate": 1e-3}) for number in (2, 3)
    ]
    assert numbers_of(study(trial(0), trial(1, 2e-3, 4.0), *repeats), "few_trials") == {
        "completed": 2
    }


@pytest.mark.parametrize("epochs", [2, {"low": 2, "high": 2}])
@pytest.mark.parametrize(("rates", "said"), [([1e-3, 2e-3], False), ([1e-3, 2e-3, 3e-3], True)])
def test_where_all_was_tried_nothing_cheaper_is_left(
    rates: list[float], said: bool, epochs: object
) -> None:
    space = {"global_batch_size": 16, "learning_rate": {"choices": rates}, "epochs": epochs}
    data = study(trial(0), trial(1, 2e-3, 4.0), raw={"search": {"space": space}})
    assert ("few_trials" in caveats_of(data)) is said


def test_every_caveat_has_a_level_and_a_template_and_the_gravest_come_first():
    for key, (level, template) in TEMPLATES.items():
        assert level in ("critical", "warning", "note") and template.endswith((".", "{advice}")), (
            key
        )
    for data in ODD_STUDIES.values():
        levels = [caveat.level for caveat in caveats_of(data).values()]
        assert levels == sorted(levels) and levels


@pytest.mark.parametrize(
    ("params", "deepspeed", "said"),
    [
        ({"zero_stage": 0, "precision": "bf16"}, {}, True),
        ({"zero_stage": 0, "precision": "bf16"}, {"bf16": {"check_grad_overflow": True}}, False),
        ({"zero_stage": 0, "precision": "fp32"}, {}, False),
        ({"zero_stage": 1, "precision": "bf16"}, {}, False),
    ],
)
def test_an_optimizer_step_that_is_not_deepspeeds_is_said_to_be_none(
    params, deepspeed, said, tmp_path
):
    data = study(trial(0, params=params), trial(1, 2e-3, 4.0))
    workload = data.config.workload.model_copy(update={"deepspeed": deepspeed})
    data = data.model_copy(update={"config": data.config.model_copy(update={"workload": workload})})
    write_report(data, tmp_path)
    assert ("own_optimizer_step" in caveats_of(data)) is said
    assert (
        "bf16 without ZeRO is carbonopt/train/speed/fast_step.py's."
        in (tmp_path / "winner" / "training_args.yaml").read_text()
    ) is said


@pytest.mark.slow
def test_same_data_same_bytes_and_a_new_report_replaces_the_old(tmp_path):
    data = study(trial(0), trial(1, 2e-3, 4.0))
    write_report(data, tmp_path, winner_files={"ds_config.json": "{}"})
    (tmp_path / "winner" / "mine.txt").write_text("keep")
    assert (tmp_path / "winner" / "run.sh").stat().st_mode & 0o111
    first = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_report(data, tmp_path, winner_files={"ds_config.json": "{}"})
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first
    write_report(study(pruned(0)), tmp_path)
    assert [path.name for path in (tmp_path / "winner").iterdir()] == ["mine.txt"]


def test_frame_holds_complete_trials_and_target_and_says_who_is_outside(tmp_path):
    data = study(trial(0), trial(1, 2e-3, 4.0), pruned(2, None), pruned(3))
    plot = StudyView(data).plot
    assert all(plot.x.holds(point.emissions) for point in plot.points if point.trial in (0, 1))
    assert plot.y.holds(6.0) and plot.unit == "g CO2e"
    assert [point.trial for point in plot.outside()] == [
        3
    ]  # trial 2's evaluation is not a number: no point
    assert [point.emissions for point in plot.of("front")] == sorted(
        point.emissions for point in plot.of("front")
    )


PERCENTS = {
    0.4234: "42.3 %",
    0.99996: "over 99.9 %",
    1.0: "100 %",
    12.3456: "1,235 %",
    1e300: "over 1,000,000 %",
    0.0: "0 %",
    None: "–",
}


@pytest.mark.parametrize(("fraction", "text"), PERCENTS.items())
def test_percent(fraction, text):
    assert percent_text(fraction) == text


def test_a_repeat_of_the_recommendation_that_failed_is_said():
    failed = trial(
        2,
        1e-4,
        None,
        state=TrialState.FAILED,
        repeat_of=1,
        seed=4,
        evals=(),
        params={"learning_rate": 2e-3},
    )
    caveat = caveats_of(study(trial(0, 2e-3), trial(1), failed))["failed_replicates"]
    assert caveat.text.endswith("without a result: trial 2.")


def test_measured_memory_stands_beside_the_estimate() -> None:
    numbers = {"precision": "bf16", "zero_stage": 2, "world_size": 2, "micro_batch_size_per_gpu": 8}
    records = [
        trial(number, params=numbers, rank_peak_memory_gib=(1.5 + number, 1.25))
        for number in (0, 1)
    ]
    profile = MemoryProfile(
        settings=dict.fromkeys(PROFILED) | {"precision": "bf16"},
        parameters=2**28,
        trained_parameters=2**28,
        largest_parameter=2**20,
        buffer_bytes=0,
        activations=(
            Activations(
                micro_batch_size=8,
                moments=(Moment(activation_bytes=2**30, gradient_elements=0),),
                evaluation_bytes=2**20,
            ),
        ),
    )
    memory = ModelMemory(
        profiles=(profile,),
        optimizer_bytes_per_parameter=8.0,
        optimizer_step_bytes_per_parameter=0.0,
    )
    prepared = Prepared(
        fingerprint="f", train_examples=9, eval_examples=9, versions={}, memory=memory
    )
    data = study(*records, prepared=prepared, raw={"launch": {"kind": "local", "gpus": [0, 1]}})
    assert section(StudyView(study(*records))) is None
    (shown,) = section(StudyView(data)).blocks
    (row,) = shown.rows
    cells = dict(
        zip((column.label for column in shown.columns), (cell.sort for cell in row), strict=True)
    )
    assert cells["Trials"] == 2 and cells["Parameters"] == 0.5 and cells["Optimizer"] == 1.5
    assert cells["Measured, rank 0"] == 2.5 and cells["Measured, rank 1"] == 1.25
    assert cells["Estimated ÷ measured"] == cells["Estimated peak"] / 2.5
    assert "Memory of each GPU" in markdown_of(data)


def test_what_a_replay_does_not_know_is_not_said_to_be_in_its_total() -> None:
    """A table has no energy of start-up."""
    caveats = caveats_of(ODD_STUDIES["replay"])
    kinds = {"fixed_intensity", "fixed_intensity_recorded"}
    assert caveats.keys() & kinds == {"fixed_intensity_recorded"}
    few = caveats_of(study(trial(0, 5e-3, 4.5), trial(1, 1.9e-4), raw=REPLAY))
    assert few["small_training"].numbers["rest"] == "Evaluations"


@pytest.mark.parametrize(("train_kwh", "said"), [(3e-4, False), (1.9e-4, True)])
def test_a_run_that_is_mostly_no_training_is_said(train_kwh: float, said: bool) -> None:
    """Of whose energy 0.2 Wh is start-up and evaluation."""
    data = study(trial(0, 5e-3, 4.5), trial(1, train_kwh))
    assert recommend(data).trial == 1
    assert ("small_training" in caveats_of(data)) is said
