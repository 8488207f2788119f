"""A study as Python programs read it."""

from collections.abc import Mapping
from functools import cached_property
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from carbonopt.api.export_forms import RECORDS, check_form, study_texts
from carbonopt.api.logging_display import LOG
from carbonopt.api.recommended import Recommended, TargetNotMet
from carbonopt.api.report_files import as_unwritable
from carbonopt.core.errors import BadInput, shortened
from carbonopt.core.files import user_path, write_bytes
from carbonopt.core.refusals import hint
from carbonopt.report.assemble import FIGURES, paper_figure, top
from carbonopt.report.data_files import evaluations_table, trials_table, usual_columns, wholes_of
from carbonopt.report.figures.style import drawn_as
from carbonopt.report.standards import DRAFT
from carbonopt.report.study_text import trials_text
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData
from carbonopt.storage.paths import StudyPaths

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class Study:
    """A study as it was stored when `carbonopt.run` ended or `carbonopt.load` read it.

    It does not follow a study that runs on; load it again.

    Attributes:
        name: The name in the study file.
        folder: The folder of the study.
        ended: Why the study ended. None: it still runs, or was interrupted.
    """

    def __init__(self, paths: StudyPaths, data: StudyData) -> None:
        self._paths, self._data = paths, data
        self.name: str = data.config.name
        self.folder: Path = paths.root
        self.ended: str | None = data.ended

    def __repr__(self) -> str:
        return f"Study({self.name!r}, {trials_text(self._data.records)}, {str(self.folder)!r})"

    @cached_property
    def trials(self) -> "pandas.DataFrame":
        """One row for each trial, whatever its state.

        The columns and units are those of `data/trials.csv` in the report: energies in kWh without
        PUE, emissions in kg CO2e with it, durations in s. What was not measured is missing (NaN,
        None), never 0. A parameter's column is there if a trial has the parameter. The others
        always are, even if they are empty in this study and its `data/trials.csv` lacks them.
        """
        is_replay = self._data.provenance.is_replay
        table = trials_table(self._data.records, is_replay=is_replay)
        return _with_columns(table.to_pandas(), usual_columns()[0])

    @cached_property
    def evaluations(self) -> "pandas.DataFrame":
        """One row for each evaluation of each trial.

        The columns and units are those of `data/evaluations.csv` in the report; `trial` is the
        trial's number, and `train_energy_kwh` is the training energy in kWh until then.
        """
        return _with_columns(evaluations_table(self._data.records).to_pandas(), usual_columns()[1])

    def recommend(self, target: float | None = None) -> Recommended:
        """Return the configuration that meets the target with the least emissions.

        If configurations were repeated with other seeds, a confirmed one is preferred to cheaper
        ones. It is the answer of `carbonopt recommend`. It may change while the study has not
        ended.

        Args:
            target: Another target of the same quality, which needs no new trial. None: the study's
                own.

        Raises:
            TargetNotMet: If no trial meets the target. It has the closest trial.
            BadInput: If it is no number, or the quality can't have such a value.
        """
        study = StudyView(self._data, None if target is None else _number(target))
        answer = study.recommendation
        if not answer.met:
            closest = answer.closest
            nearest = f"; the closest is trial {closest.trial}, {closest.why}" if closest else ""
            raise TargetNotMet(
                f"no configuration of {self.name} meets the target {answer.target}{nearest}.",
                closest,
            )
        fields = {name: getattr(answer, name) for name in type(answer).model_fields}
        return Recommended(**fields, caveats=top(study).caveats)

    def figure(self, name: str) -> "Figure":
        """Draw a figure of the report's `paper/` folder, to be changed or saved.

        A notebook shows it as the value of a cell.

        Args:
            name: `pareto`, `policy`, `batch`, `influence`, `effects`, `returns` or `energy`.

        Raises:
            BadInput: If there is no figure of this name, or this study has nothing to draw there.
        """
        if not isinstance(name, str) or name not in FIGURES:
            raise BadInput(f"unknown figure {shortened(name)}; {hint(name, tuple(FIGURES))}")
        with drawn_as("matplotlib"):
            drawn = paper_figure(StudyView(self._data), name)
        if drawn is None:
            raise BadInput(
                f"the study {self.name} has nothing to draw in the figure {name!r}; ask for one"
                f" that its report shows in {self._paths.report}."
            )
        figure: Figure = drawn.matplotlib
        return figure

    def export(
        self,
        format: str,
        folder: str | PathLike[str] | None = None,
        *,
        license: str | None = None,
        url: str | None = None,
        creator: str | None = None,
    ) -> list[Path]:
        """Write the study in a form of `carbonopt export`, in place of older files.

        Args:
            format: `jsonl`, `csv`, `codecarbon`, `boamps`, `sci`, `annex-xi`, `model-card` or
                `croissant`.
            folder: The folder to write into. None: `export` in the study's folder.
            license: For `croissant`: the license of the tables.
            url: For `croissant`: the page that publishes the tables.
            creator: For `croissant`: a person, or `Organization: NAME`.

        Returns:
            The files that were written. The first one is what the command prints.

        Raises:
            BadInput: If the format is unknown, the study lacks what it needs, or the folder can't
                be written.
            TargetNotMet: If the format describes a model, and no configuration is
                recommended.
        """
        publication = {"license": license, "url": url, "creator": creator}
        check_form(format, publication)
        into = self._paths.exports if folder is None else user_path(folder, "folder")
        texts = study_texts(self._data, format, publication)
        if self.ended is None and format not in RECORDS:
            LOG.warning("%s: %s", self.name, DRAFT)
        return _written(texts, into)


def _number(target: object) -> float:
    """Return a target as a float; raise BadInput if it is no number or too large for one."""
    if isinstance(target, bool) or not isinstance(target, Real):
        raise BadInput(f"target must be a number, but got {shortened(target)}.")
    try:
        return float(target)
    except OverflowError as error:
        raise BadInput(
            f"target must be a number that a float can hold, but got {shortened(target)}."
        ) from error


def _with_columns(table: "pandas.DataFrame", names: list[str]) -> "pandas.DataFrame":
    """Return a table with these columns, too, which are empty where it has none of the name."""
    missing = [name for name in names if name not in table]
    own = [name for name in table.columns if name not in wholes_of(missing)]
    return table.reindex(columns=[*own, *missing])


def _written(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files into a folder and return their paths."""
    files = {folder / name: text.encode() for name, text in texts.items()}
    with as_unwritable("export", folder):
        for path, content in files.items():
            write_bytes(path, content)
    return list(files)
