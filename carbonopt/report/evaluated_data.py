"""The data that studies were evaluated on, as far as their storages say it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from carbonopt.report.sections.provenance_section import stated
from carbonopt.spec.study_data import StudyData

UNKNOWN = "not recorded"


class EvaluatedData(NamedTuple):
    """The data that one study was evaluated on."""

    text: str
    # Studies with equal names and amounts have the same data; None: nothing identifies it.
    names: tuple[str, ...] | None
    amount: str = ""
    length: int | None = None  # tokens of a sequence; None: not known, or there are none
    # SHA-256 of the files that are named; they decide where all studies have them.
    sha256s: tuple[str, ...] | None = None
    # False: equal names say that the data is the same, but other names don't say that it differs.
    is_stated: bool = True


def evaluated_data(data: StudyData) -> EvaluatedData:
    """Return what a study was evaluated on."""
    if (workload := data.config.workload) is None:
        return _of_replay(data)
    if data.config.is_script:
        return _of_script(data)
    dataset, rows = workload.dataset, stated(data)
    amount = rows.get("Evaluation data", UNKNOWN)
    source = rows.get("Data set", UNKNOWN)
    files = () if dataset is None else dataset.eval_files or dataset.train_files or ()
    names = tuple(Path(file).name for file in files) or (source,)
    has_own_files = dataset is not None and dataset.eval_files is not None
    text = ", ".join(names) if has_own_files else source
    if files and not has_own_files:
        text = f"held out of {text}"
    length, sha256s = workload.sequence_length, _sha256s(data, files)
    return EvaluatedData(f"{text}, {amount}", names, amount, length, sha256s)


def agreement(
    evaluated: Mapping[str, EvaluatedData],
) -> Literal["same", "different", "unknown", "other_lengths"]:
    """Return whether all studies were evaluated on the same data.

    With "other_lengths" the data is the same, but was cut into sequences of other lengths.
    """
    use_sha256s = all(each.sha256s for each in evaluated.values())
    kinds = {
        ((each.sha256s if use_sha256s else each.names), each.amount): each
        for each in evaluated.values()
    }
    if sum(each.is_stated for each in kinds.values()) > 1:
        contents = {content for content, _ in kinds}
        lengths = {each.length for each in kinds.values()}
        is_cut_otherwise = len(contents) == 1 and len(lengths) == len(kinds) and None not in lengths
        return "other_lengths" if is_cut_otherwise else "different"
    is_unknown = any(each.names is None for each in evaluated.values())
    return "unknown" if is_unknown or len(kinds) > 1 else "same"


def _of_replay(data: StudyData) -> EvaluatedData:
    """Return the data of a replay: only its files are known, as they don't name the data."""
    files = data.config.launch.files
    sha256s = _sha256s(data, files)
    text = f"that of the recorded runs in {', '.join(Path(file).name for file in files)}"
    return EvaluatedData(text, sha256s, sha256s=sha256s, is_stated=False)


def _of_script(data: StudyData) -> EvaluatedData:
    """Return the data of a script, which it chooses itself: only the same files show the same."""
    sha256s = tuple(sorted(script_files(data)))
    text = "that of its script"
    return EvaluatedData(text, sha256s or None, sha256s=sha256s or None, is_stated=False)


def script_files(data: StudyData) -> dict[str, str]:
    """Return the names of a script's files by their SHA-256, without those that trials wrote."""
    return {
        file.sha256: Path(file.path).name
        for file in data.inputs or ()
        if file.sha256 and not file.changed_by_trials
    }


def _sha256s(data: StudyData, files: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the SHA-256 of these files, sorted; None where one of them isn't known."""
    by_path = {file.path: file.sha256 for file in data.inputs or ()}
    known = [sha256 for file in files if (sha256 := by_path.get(file)) is not None]
    return tuple(sorted(known)) if known and len(known) == len(files) else None
