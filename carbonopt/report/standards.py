"""The forms of others' standards in which a study is exported.

Each form is a file of `carbonopt.export` and a line of `STANDARDS`, and of `FORMATS` in
`api/export_forms.py`. Croissant has a function of its own, as it describes a report's tables. For a
pipeline, `pipeline_text` joins forms in JSON; a form in another one needs a branch there.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from carbonopt.core.errors import BadInput
from carbonopt.export import annex_xi, boamps, model_card, sci
from carbonopt.export.croissant import Publication, croissant_text
from carbonopt.export.emissions_csv import emissions_csv
from carbonopt.export.exported_study import ExportedStudy
from carbonopt.report.assemble import top
from carbonopt.report.data_files import EVALUATIONS_CSV, TRIALS_CSV, data_files
from carbonopt.report.document import Level
from carbonopt.report.pipeline_report import PipelineView
from carbonopt.report.study_view import StudyView

DRAFT = "This is a draft: the study has not ended, and its figures will change."


class Standard(NamedTuple):
    """A form of an export."""

    text: Callable[[StudyView], str]  # as `carbonopt export` prints it
    # text by file name, in the folder of a report
    files: Mapping[str, Callable[[StudyView], str]]
    describes_model: bool  # it needs a recommendation; the others are of the whole study
    missing: Callable[[ExportedStudy], str | None]  # says why a study can't have this form


def exported(study: StudyView) -> ExportedStudy:
    return ExportedStudy(study.data, study.recommendation, study.spent, study.work)


def _nothing(study: ExportedStudy) -> None:
    """Return None: nothing that the form needs can be missing."""


def _card(study: StudyView) -> str:
    record = study.record(study.recommendation.trial)
    assert record is not None
    serious = [caveat.text for caveat in top(study).caveats if caveat.level is Level.CRITICAL]
    draft = [DRAFT] if study.data.ended is None else []
    return model_card.model_card(study.data, study.recommendation, record, None, [*draft, *serious])


def _of(make: Callable[[ExportedStudy], str]) -> Callable[[StudyView], str]:
    return lambda study: make(exported(study))


_EMISSIONS = _of(lambda study: emissions_csv([study]))
_ANNEX, _ANNEX_JSON = _of(annex_xi.annex_xi), _of(annex_xi.annex_xi_json)
STANDARDS = {
    "codecarbon": Standard(_EMISSIONS, {"emissions.csv": _EMISSIONS}, False, _nothing),
    "boamps": Standard(
        _of(boamps.boamps), {"boamps.json": _of(boamps.boamps)}, False, boamps.missing
    ),
    "sci": Standard(_of(sci.sci), {"sci.json": _of(sci.sci)}, False, _nothing),
    "annex-xi": Standard(
        _ANNEX, {"annex-xi.md": _ANNEX, "annex-xi.json": _ANNEX_JSON}, True, annex_xi.missing
    ),
    "model-card": Standard(_card, {}, True, _nothing),  # the winner's folder has one
}
FILES = tuple(name for standard in STANDARDS.values() for name in standard.files)


def standard_text(study: StudyView, form: str) -> str:
    """Return a study in a standard's form.

    Raises:
        BadInput: If the study lacks what the form needs.
    """
    standard = STANDARDS[form]
    if why := standard.missing(exported(study)):
        raise BadInput(f"{study.data.config.name} can't be exported as {form}: {why}.")
    return standard.text(study)


def croissant_of(study: StudyView, publication: Mapping[str, str | None]) -> str:
    """Return the description of the tables in the report's `data/`, in Croissant.

    Args:
        study: The study.
        publication: The fields of `Publication` by name.
    """
    tables = data_files(study.data.records, is_replay=study.data.provenance.is_replay)
    csv_tables = {name: tables[name] for name in (TRIALS_CSV, EVALUATIONS_CSV)}
    return croissant_text(exported(study), csv_tables, Publication.model_validate(publication))


def standard_files(study: StudyView) -> dict[str, bytes]:
    """Return the files of all forms that the study can have, by name."""
    return {
        name: make(study).encode()
        for standard in STANDARDS.values()
        if study.recommendation.met or not standard.describes_model
        if standard.missing(exported(study)) is None
        for name, make in standard.files.items()
    }


def pipeline_text(view: PipelineView, form: str) -> str:
    """Return a pipeline in a standard's form: a report for each step's study, and the sum.

    Studies without a recommendation have no report of their own in a form that describes a model;
    what they spent is in the sum.

    Raises:
        BadInput: If a study lacks what the form needs, or the form is of one model.
    """
    if form == "codecarbon":
        studies = map(exported, view.studies.values())
        return emissions_csv(studies, of_draft=not view.summary.ended)
    if form == "model-card":
        raise BadInput(
            f"a model card is of one model, but {view.summary.name} trains several; give the folder"
            f" of one: {', '.join(view.studies)}."
        )
    texts = {
        folder: standard_text(study, form)
        for folder, study in view.studies.items()
        if study.recommendation.met or not STANDARDS[form].describes_model
    }
    total = {
        "energy_kwh": view.summary.energy_kwh,
        "emissions_kg_co2e": view.summary.emissions_kg_co2e,
        "of": "all studies of the pipeline and the time between them, in every call",
    }
    status = "final" if view.summary.ended else "draft"
    if form == "annex-xi":
        steps = "\n".join(texts.values())
        return f"{steps}\n# Sum of {len(view.studies)} studies ({status})\n\n{_json_block(total)}"
    stated = {
        "pipeline": view.summary.name,
        "status": status,
        "steps": {folder: json.loads(text) for folder, text in texts.items()},
        "sum": total,
    }
    return json.dumps(stated, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _json_block(value: dict[str, Any]) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```\n"
