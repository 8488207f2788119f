"""The forms in which `carbonopt export` and `Study.export` pass a study on."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.refusals import hint

if TYPE_CHECKING:
    from carbonopt.report.pipeline_report import PipelineView
    from carbonopt.spec.study_data import StudyData

RECORDS, CROISSANT = ("jsonl", "csv"), "croissant"
FORMATS = (*RECORDS, "codecarbon", "boamps", "sci", "annex-xi", "model-card", CROISSANT)


def check_form(form: str, asked: Mapping[str, str | None]) -> None:
    """Check that a form is known, and that Croissant, and it alone, has what it asks for.

    Args:
        form: The name of the form.
        asked: The license, the URL and the creator, by their names in the caller's words.

    Raises:
        BadInput: If that is not so.
    """
    if form not in FORMATS:
        raise BadInput(f"unknown format {shortened(form)}; {hint(form, FORMATS)}")
    given = [name for name, value in asked.items() if value is not None]
    if form != CROISSANT:
        if given:
            raise BadInput(
                f"{given[0]} goes with the format {CROISSANT} only, but the format is {form}; leave"
                " it out."
            )
        return
    for name, value in asked.items():
        is_text = isinstance(value, str) and value.isprintable() and bool(value.strip())
        if not is_text:
            raise BadInput(
                f"the format {CROISSANT} needs {', '.join(asked)}, each one line of text, but"
                f" {name} is {shortened(value)}; give it."
            )
    name, url = next((name, value or "") for name, value in asked.items() if "url" in name)
    if not _is_page(url):
        shown = "one with a user" if "@" in url else repr(url)  # which may have a password
        raise BadInput(
            f"{name} must be a web page's address without a user or a password, such as"
            f" https://example.org, but got {shown}."
        )


def _is_page(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_user = parts.username is not None or parts.password is not None
    except ValueError:
        return False
    known = parts.scheme in ("http", "https") and parts.hostname
    return bool(known) and not has_user and not any(map(str.isspace, url))


def study_texts(
    data: "StudyData", form: str, publication: Mapping[str, str | None]
) -> dict[str, str]:
    """Return a study in a form: the text that the command prints, and others that go with it.

    Args:
        data: The study.
        form: One of `FORMATS`.
        publication: For Croissant, the fields of `Publication` by name.

    Returns:
        The texts by file name, the one that the command prints first.

    Raises:
        BadInput: If the study lacks what the form needs.
        TargetNotMet: If the form is of a model, and no configuration is recommended.
    """
    if form in RECORDS:
        return {f"records.{form}": _records_text(data, form)}
    from carbonopt.api.recommended import TargetNotMet
    from carbonopt.report.data_files import EVALUATIONS_CSV, TRIALS_CSV, data_files
    from carbonopt.report.standards import STANDARDS, croissant_of, standard_text
    from carbonopt.report.study_view import StudyView

    study = StudyView(data)
    if form == CROISSANT:
        tables = data_files(data.records, is_replay=data.provenance.is_replay)
        names = (TRIALS_CSV, EVALUATIONS_CSV)  # a description lies beside what it describes
        beside = {name: tables[name].decode() for name in names if tables[name]}
        return {"croissant.json": croissant_of(study, publication), **beside}
    standard = STANDARDS[form]
    if standard.describes_model and not study.recommendation.met:
        raise TargetNotMet(
            f"no configuration of {data.config.name} meets the target, and {form} describes a"
            " recommended run.",
            study.recommendation.closest,
        )
    text = standard_text(study, form)
    first, *others = standard.files or ("model_card.md",)
    return {first: text, **{name: standard.files[name](study) for name in others}}


def pipeline_text(view: "PipelineView", form: str) -> str:
    """Return a pipeline in a form that can have one: a report for each step, and the sum.

    Raises:
        BadInput: If the form is of one study, or a study lacks what the form needs.
        TargetNotMet: If the form is of a model, and no run of all steps met every target.
    """
    if form in (*RECORDS, CROISSANT):
        raise BadInput(
            f"{form} is of one study, but {view.summary.name} has several; give the folder of one:"
            f" {', '.join(view.studies)}."
        )
    from carbonopt.api.recommended import TargetNotMet
    from carbonopt.report import standards

    if standards.STANDARDS[form].describes_model and not view.summary.met:
        raise TargetNotMet(
            f"no run of all steps of {view.summary.name} met every target, and {form} describes"
            " recommended runs."
        )
    return standards.pipeline_text(view, form)


def _records_text(data: "StudyData", form: str) -> str:
    is_replay = data.provenance.is_replay
    records = [record.as_exported(is_replay=is_replay) for record in data.records]
    if form == "jsonl":
        return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    from carbonopt.report.data_files import csv_text

    return csv_text(records)
