"""The page of a pipeline: its tables, its figure and its caveats."""

import json

from analysis.test_pipeline import DPO, SFT, pipeline, session, with_start
from documents import rows_of, tables_of
from pydantic_core import to_json
from small_studies import trial

from carbonopt.core.trial import TrialState
from carbonopt.report.document import Document
from carbonopt.report.pipeline_report import PipelineView, page
from carbonopt.report.writing import PIPELINE_NAMES, write_pipeline
from carbonopt.spec.pipeline_file import PipelineData
from carbonopt.spec.study_data import StudyData


def view_of(carry: int = 1, outer_kwh: float | None = None, **studies: StudyData) -> PipelineView:
    sessions = (session(outer_kwh=outer_kwh),)
    return PipelineView(PipelineData(pipeline=pipeline(carry), studies=studies, sessions=sessions))


def shown(document: Document) -> dict:
    return tables_of(json.loads(to_json(document.as_json())))


def test_each_step_has_its_share_of_one_run():
    document = page(view_of(sft=SFT, dpo=DPO))
    assert document.headline == "60 % less CO2e for one run of all 2 steps"
    tables = shown(document)
    rows = rows_of(tables["recommended"])
    assert [row["Step"] for row in rows] == ["sft", "dpo", "sum"]
    assert [row["Share"] for row in rows] == ["25 %", "75 %", "100 %"]
    assert [row["Share"] for row in rows_of(tables["start"])] == ["40 %", "60 %", "100 %"]
    spent = rows_of(tables["spent"])
    assert [row["Study"] for row in spent][-1] == "sum" and spent[-1]["Trials and repeats"] == "5"
    assert "closure" not in tables and "paths" not in tables
    assert {caveat.key for caveat in document.caveats} >= {
        "steps_run_once",
        "steps_frozen",
        "call_killed",
    }


def test_a_pipeline_whose_excess_is_within_the_noise_may_pay_back():
    def step(*taken_kwh: float) -> StudyData:
        taken = [
            trial(1 + seed, kwh, 5.0, seed=3 + seed, repeat_of=1 if seed else None)
            for seed, kwh in enumerate(taken_kwh)
        ]
        again = [run.model_copy(update={"params": taken[0].params}) for run in taken]
        return with_start(trial(0, 1e-3, 9.0), *again)  # the start misses the target

    def paid(*taken_kwh: float) -> str:
        study = step(*taken_kwh)
        view = view_of(sft=study, dpo=study)
        assert view.summary.saving_fraction < 0
        return next(tile.text for tile in page(view).tiles if tile.label == "Pays back after")

    assert paid(1.1e-3, 0.98e-3, 1e-3) == "not known"
    assert paid(2e-3, 1.98e-3, 2.02e-3) == "never"


def test_trials_whose_energy_the_sums_lack_are_named():
    lost = trial(4, energy_kwh=None, emissions_kg_co2e=None, state=TrialState.FAILED)
    document = page(view_of(sft=SFT, dpo=with_start(trial(0), lost)))
    (caveat,) = [one for one in document.caveats if one.key == "unmeasured_trials_of"]
    assert caveat.numbers == {"study": "dpo", "trials": (4,)}


def test_whether_carrying_mattered_is_said():
    better = with_start(trial(0, 6e-3, 5.0), trial(1, 1e-3, 5.0))
    section = next(
        s
        for s in page(view_of(2, sft=SFT, dpo=DPO, **{"dpo@sft-2": better})).sections
        if s.key == "paths"
    )
    assert section.blocks[0].text.startswith("It did: 25 % less CO2e")
    assert [
        row["Relative to the least"]
        for row in rows_of(
            shown(page(view_of(2, sft=SFT, dpo=DPO, **{"dpo@sft-2": better})))["paths"]
        )
    ] == ["1.00", "1.33"]
    section = next(
        s
        for s in page(view_of(2, sft=SFT, dpo=better, **{"dpo@sft-2": DPO})).sections
        if s.key == "paths"
    )
    assert (
        section.blocks[0].text.startswith("It did not: ") and "2.50 times" in section.blocks[0].text
    )


def test_a_pipeline_that_met_no_target_says_where():
    missed = with_start(trial(0, perplexity=9.0))
    document = page(view_of(sft=SFT, dpo=missed))
    assert document.headline == "No run of all 2 steps: dpo met no target"
    assert (
        "recommended" not in shown(document)
        and rows_of(shown(document)["spent"])[-1]["Trials and repeats"] == "4"
    )


def test_parts_that_do_not_add_up_are_a_caveat(tmp_path):
    whole_kwh = SFT.spent_kwh() + DPO.spent_kwh() + 1e-4
    assert "closure_whole" not in {
        caveat.key for caveat in page(view_of(1, whole_kwh, sft=SFT, dpo=DPO)).caveats
    }
    view = view_of(1, 1.01 * whole_kwh, sft=SFT, dpo=DPO)
    document = page(view)
    assert "closure_whole" in {caveat.key for caveat in document.caveats}
    assert [row["The parts add up to"] for row in rows_of(shown(document)["closure"])] == [
        "99.01 %"
    ]
    write_pipeline(view, document, tmp_path / "page")
    files = {
        path.relative_to(tmp_path / "page").as_posix()
        for path in (tmp_path / "page").rglob("*")
        if path.is_file()
    }
    assert files == PIPELINE_NAMES
    assert json.loads((tmp_path / "page" / "data" / "pipeline.json").read_text())["met"] is True
