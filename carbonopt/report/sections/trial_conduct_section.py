"""Caveats on trials that did not run as a trial should, as far as this is known."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.core.evaluations import broke_down_at
from carbonopt.core.format import visible_text
from carbonopt.core.trial import Stage, StopReason, TrialRecord, TrialState
from carbonopt.core.units import human_duration
from carbonopt.report.document import Caveat
from carbonopt.report.study_view import StudyView
from carbonopt.spec.study_data import StudyData

# Share of a trial's energy after its last step from which on it is more than loading weights.
_UNCHARGED = 0.1
_MOST_FILES = 3  # files that a caveat names; the others are counted


def caveats(study: StudyView) -> Iterator[Caveat]:
    inheriting = [record for record in study.data.records if record.inherited_files]
    if inheriting:
        files = sorted({file for record in inheriting for file in record.inherited_files})
        named = ", ".join(files[:_MOST_FILES]) + (
            f" and {len(files) - _MOST_FILES} more" * (len(files) > _MOST_FILES)
        )
        yield study.caveat(
            "inherited_files", trials=[record.trial for record in inheriting], files=named
        )
    yield from _scale_caveats(study)
    failed = [record for record in study.data.records if record.state is TrialState.FAILED]
    failed = [record for record in failed if record.stop_reason is not StopReason.INTERRUPTED]
    ended = [record for record in study.data.records if record.state is TrialState.COMPLETE]
    if failed and ended:  # where none completed, the shortfall says why
        first = failed[0]
        text = first.failure.sentence if first.failure else "the reason is not known"
        numbers = {"count": len(failed), "of": len(study.data.records)}
        yield study.caveat("some_failed", **numbers, trial=first.trial, text=text)
    yield from _breakdown_caveats(study)
    if shared := _files_of_both(study.data):
        yield study.caveat("evaluated_on_training", files=", ".join(map(visible_text, shared)))
    yield from _uncharged_work_caveats(study)
    yield from _quality_lines_caveats(study)
    for same in study.alike:
        one, other = map(visible_text, same.values)
        yield study.caveat(
            "alike", dimension=same.dimension, first=one, second=other, trials=same.trials
        )
    ranks = max((record.params.world_size for record in study.data.records), default=1)
    if ranks > 1 and counts_whole_processes(study.data):
        yield study.caveat("ranks_unseen", ranks=ranks)
    still = [record for record in study.data.records if record.standstill_s]
    if still:
        seconds = sum(record.standstill_s or 0.0 for record in still)
        yield study.caveat(
            "standstill",
            trials=[record.trial for record in still],
            duration=human_duration(seconds),
        )
    continued = [record for record in study.data.records if record.continued_at_steps]
    if any(not record.unmeasured_steps for record in continued):
        yield study.caveat(
            "continued_script" if study.data.config.is_script else "continued",
            trials=[record.trial for record in continued if not record.unmeasured_steps],
            kwh=math.fsum(record.earlier_attempts_energy_kwh for record in continued),
        )
    unmeasured = [record for record in continued if record.unmeasured_steps and record.total_steps]
    if unmeasured:
        yield study.caveat(
            "unmeasured_steps",
            trials=[record.trial for record in unmeasured],
            steps=sum(record.unmeasured_steps or 0 for record in unmeasured),
            total=sum(record.total_steps or 0 for record in unmeasured),
        )
    # A script's lost steps count as the trial's, and so towards its cap.
    capped = [record.trial for record in continued if record.stop_reason is StopReason.CAP]
    if capped and study.data.config.is_script and study.recommendation.met:
        yield study.caveat("continued_script_pruned", trials=capped)
    yield from _planned_steps_caveats(study)


def _uncharged_work_caveats(study: StudyView) -> Iterator[Caveat]:
    """Yield a caveat if the quality became better by work that doesn't count as training."""
    rank = study.quality.rank
    for record in study.data.records:
        before, value = record.replaced_value, record.value
        after = (record.stages or {}).get(Stage.AFTER)
        if before is None or value is None or after is None or record.energy_kwh is None:
            continue
        share = after.energy_kwh / record.energy_kwh.total if record.energy_kwh.total else 0.0
        if rank(value) < rank(before) and share > _UNCHARGED:
            numbers = {"trial": record.trial, "share": share, "before": before, "value": value}
            yield study.caveat("uncharged_work", quality=study.quality.name, **numbers)
            return


def _quality_lines_caveats(study: StudyView) -> Iterator[Caveat]:
    """Yield a caveat on scripts that wrote several values, of which the last one counts."""
    several = [
        record
        for record in study.data.records
        if record.state is TrialState.COMPLETE and record.quality_lines is not None
    ]
    unlike = [record for record in several if _is_unlike(record)]
    for key, records in (("unlike_lines", unlike), ("several_lines", several)):
        if not records:
            continue
        recommended = (record for record in records if record.trial == study.recommendation.trial)
        shown = next(recommended, records[0])
        lines = shown.quality_lines
        assert lines is not None
        yield study.caveat(
            key,
            trials=[record.trial for record in records],
            quality=study.quality.name,
            example=(
                f"trial {shown.trial}'s first is “{visible_text(lines.first)}”, and its last"
                f" “{visible_text(lines.last)}”"
            ),
        )
        return


def _is_unlike(record: TrialRecord) -> bool:
    """Return whether the last line with the quality has other words than the first one."""
    lines = record.quality_lines
    assert lines is not None
    first, last = (re.findall("[^\\W\\d_]{2,}", line) for line in (lines.first, lines.last))
    return first != last


def _breakdown_caveats(study: StudyView) -> Iterator[Caveat]:
    """Yield caveats on trainings that lost what they had learned."""
    quality = study.data.config.quality
    broken = {
        record.trial: (record, place)
        for record in study.data.records
        if (place := broke_down_at(record.evals, quality)) is not None
    }
    recommended = study.recommendation.trial
    if recommended is not None and recommended in broken:
        yield _breakdown_caveat(study, "recommended_broke_down", *broken.pop(recommended))
    if len(broken) == 1:
        yield _breakdown_caveat(study, "broke_down", *next(iter(broken.values())))
    elif broken:
        yield study.caveat("broke_down_several", trials=list(broken), quality=quality.name)


def _breakdown_caveat(study: StudyView, key: str, record: TrialRecord, place: int) -> Caveat:
    first, before, after = (record.evals[index] for index in (0, place - 1, place))
    return study.caveat(
        key,
        trial=record.trial,
        quality=study.data.config.quality.name,
        first=first.value,
        before=before.value,
        learned_at=before.step,
        after=after.value,
        lost_at=after.step,
    )


def _planned_steps_caveats(study: StudyView) -> Iterator[Caveat]:
    """Yield a caveat if a script made another number of steps than it had announced."""
    misplanned = [
        record
        for record in study.data.records
        if record.state is TrialState.COMPLETE and record.planned_steps is not None
    ]
    if misplanned:
        first, trials = misplanned[0], [record.trial for record in misplanned]
        yield study.caveat(
            "planned_steps",
            trials=trials,
            first=first.trial,
            planned=first.planned_steps,
            made=first.steps_done,
        )


def _scale_caveats(study: StudyView) -> Iterator[Caveat]:
    """Yield a caveat if the target or the values seem to be in percent."""
    target = study.data.config.target.at()
    values = [record.value for record in study.data.records if record.value is not None]
    if study.data.config.is_script and target.is_on_other_scale(values):
        yield study.caveat(
            "other_scale",
            name=target.quality.name,
            target=f"{target.value:g}",
            lowest=f"{min(values):.4g}",
            highest=f"{max(values):.4g}",
        )


def _files_of_both(data: StudyData) -> list[str]:
    """Return the names of the files that are both training and evaluation data."""
    dataset = None if data.config.workload is None else data.config.workload.dataset
    if dataset is None:
        return []
    both = {*(dataset.train_files or ())} & {*(dataset.eval_files or ())}
    return sorted(Path(file).name for file in both)
