"""What a report says of repeats with other seeds: what was set aside, how each stands, and what the
repeats cost.
"""

import math
import re
from pathlib import Path

import pytest
from analysis.test_confirmation import CLEAR, Replayed, batch, rows
from documents import caveats_of, markdown_of, texts_of
from small_studies import study, trial

from carbonopt.analysis.confidence import Evidence
from carbonopt.analysis.recommend import recommend
from carbonopt.core.quality import PERPLEXITY
from carbonopt.report.document import Steps
from carbonopt.report.sections.confirmation_section import caveats, section
from carbonopt.report.sections.front_section import section as front
from carbonopt.report.study_view import StudyView
from carbonopt.report.writing import write_report


def test_what_was_set_aside_is_said_of_a_winner_that_ran_once_too(tmp_path: Path) -> None:
    lucky = [rows(2**k, 100 * k, s0=9.9, s1=10.4, s2=10.1) for k in (3, 4, 5)]
    data = Replayed(tmp_path, *lucky, rows(64, 600, s0=9.9)).run()
    rec = recommend(data)
    assert batch(rec) == 64 and rec.confidence is not None and rec.confidence.seeds == 1
    caveats = caveats_of(data)
    assert (
        caveats["rejected"].numbers["trials"] == [rejected.trial for rejected in rec.rejected]
        and len(rec.rejected) == 3
    )
    assert "only_run" in caveats, "the others that met the target are known to miss it"
    assert "not_confirmed" not in caveats
    shown = texts_of(section(StudyView(data)), "considered")
    assert [row[:2] for row in shown[1:]] == [
        [str(rejected.trial), "cheaper, but its mean misses the target"]
        for rejected in rec.rejected
    ]


def test_one_whose_other_seed_diverged_is_set_aside_for_that(tmp_path: Path) -> None:
    table = (rows(16, 100, s0=9.0, s1=math.inf, s2=9.2), rows(32, 200, s0=9.3, s1=9.33, s2=9.31))
    data = Replayed(tmp_path, *table).run()
    shown = texts_of(section(StudyView(data)), "considered")
    assert [row[1] for row in shown] == ["recommended", "failed with another seed"]
    caveats = caveats_of(data)
    assert "rejected" not in caveats, "it met the target with seeds 0 and 2"
    assert caveats["rejected_failed"].numbers["trials"] == [0]
    (diverged,) = (record.failure for record in data.records if record.failure is not None)
    assert (diverged.kind, diverged.log) == ("diverged", None), "a replay writes no log"


@pytest.mark.slow
def test_the_repeats_cost_is_said_beside_the_studys(tmp_path: Path) -> None:
    """6 repeats of 2 × (100 + 200 + 300) J and an evaluation of 1 J each; 1,050 J and 5 J before
    them.
    """
    data = Replayed(tmp_path, *CLEAR).run()
    rec = recommend(data)
    assert rec.repeats == 6
    assert rec.repeats_energy_kwh == pytest.approx(1206 / 3.6e6)
    assert rec.repeats_emissions_kg_co2e == pytest.approx(1206 / 3.6e6 * 0.5)
    assert rec.study_energy_kwh == pytest.approx((1206 + 1055) / 3.6e6)
    write_report(data, tmp_path / "report")
    page = (tmp_path / "report/report.md").read_text()
    assert (
        "**0.314 g CO2e** (2.26 kJ, 5 trials and 6 repeats; the repeats: 0.168 g CO2e of it)"
        in page
    )
    assert "Of 5 trials and 6 repeats with carbonopt" in page.partition("## For a paper")[2]
    statement = (tmp_path / "report/paper/statement.tex").read_text().replace("~", " ")
    assert "5 trials and 6 repeats" in statement and "1.21 kJ of it, or 0.168 g CO" in statement


def test_the_table_of_repeats_says_how_each_stands(tmp_path: Path) -> None:
    table = (
        rows(16, 100, s0=9.99, s1=10.3, s2=10.2),
        rows(32, 200, s0=9.98, s1=10.0, s2=9.97),
        rows(64, 300, s0=9.10, s1=9.12, s2=9.14),
    )
    data = Replayed(tmp_path, *table).run()
    page = markdown_of(data)
    said = re.findall(
        r"^\| [^|]* \| [23] \| 0, [12](?:, [12])? \|[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|",
        page,
        re.MULTILINE,
    )
    evidence = Evidence.of(data, data.config.target.at())
    by_batch = sorted(
        evidence.configurations,
        key=lambda configuration: configuration.first.params.global_batch_size,
    )
    bounds = [evidence.confidence(configuration).value_bound for configuration in by_batch]
    standings = ["refuted", "in doubt", "confirmed"]
    assert sorted(said) == sorted(zip(map(PERPLEXITY.text, bounds), standings, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_repeated_configurations_are_as_many_chances(count: int) -> None:
    """One alone is one chance, as anyone expects."""
    runs = [trial(number, 1e-3 * (1 + number)) for number in range(count)]
    repeats = [
        trial(
            number + count * seed,
            1e-3 * (1 + number),
            5.0 + 0.01 * seed,
            repeat_of=number,
            seed=3 + seed,
            params={"learning_rate": 1e-3 * (1 + number)},
        )
        for seed in (1, 2)
        for number in range(count)
    ]
    view = StudyView(study(*runs, *repeats))
    assert view.recommendation.confidence.confirmed
    found = [caveat.numbers for caveat in caveats(view) if caveat.key == "many_confirmed"]
    assert found == ([] if count == 1 else [{"tried": count}])


def test_what_was_decided_against_is_listed_beside_the_recommendation(tmp_path: Path) -> None:
    in_doubt = rows(8, 100, s0=9.99, s1=9.995, s2=9.99)
    clear = rows(16, 200, s0=9.10, s1=9.12, s2=9.14)
    data = Replayed(tmp_path, in_doubt, clear).run()
    rec, view = recommend(data), StudyView(data)
    evidence = Evidence.of(data, rec.target)
    (cheaper,) = (each for each in evidence.configurations if each.trial != rec.trial)
    assert cheaper.n > 1 and not evidence.confirmed(cheaper)
    shown = texts_of(section(view), "considered")
    assert [row[:3] for row in shown] == [
        [str(rec.trial), "recommended", "3"],
        [str(cheaper.trial), "cheaper, but not confirmed", str(cheaper.n)],
    ]
    assert shown[1][5].startswith("-")


def test_one_configuration_alone_was_not_decided_between(tmp_path: Path) -> None:
    data = Replayed(tmp_path, rows(16, 200, s0=9.10, s1=9.12, s2=9.14)).run()
    made = section(StudyView(data))
    assert made is not None and [block.key for block in made.blocks] == ["repeats"]
    assert "standard deviation, pooled or its own" in made.blocks[0].note


def test_the_studys_own_target_says_why_a_cheaper_trial_comes_second(tmp_path: Path) -> None:
    in_doubt = rows(8, 100, s0=9.99, s1=9.995, s2=9.99)
    clear = rows(16, 200, s0=9.10, s1=9.12, s2=9.14)
    view = StudyView(Replayed(tmp_path, in_doubt, clear).run())
    (own,) = (answer for answer in view.recommendation_by_target if answer.study_target_only)
    (steps,) = (block for block in front(view).blocks if isinstance(block, Steps))
    (step,) = (step for step in steps.steps if step.alone)
    cheaper = {record.trial for record in view.data.records if record.repeat_of is None}
    (second,) = cheaper - {own.trial}
    assert f"it comes before trial {second}, which is cheaper" in step.text
    assert not any("comes before" in step.text for step in steps.steps if not step.alone)
