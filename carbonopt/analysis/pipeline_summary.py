"""Summary of a pipeline: the cost of one run of all its steps, and of the searches for it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from carbonopt.analysis.confidence import (
    Evidence,
    Standing,
    less_interval,
    saved_interval_kg_co2e,
)
from carbonopt.analysis.footprint import footprint, known_sum
from carbonopt.analysis.recommend import (
    Recommendation,
    break_even,
    break_even_interval,
    recommend,
)
from carbonopt.analysis.study_comparison import ComparedRun, run_of
from carbonopt.core.quality import Target
from carbonopt.core.values import Frozen
from carbonopt.spec.pipeline_file import PipelineData, PipelineStep
from carbonopt.spec.study_data import StudyData, union_s


def handed_on(data: StudyData, count: int) -> tuple[int, ...]:
    """Return the trials that the next steps of a pipeline begin with, at most so many.

    The recommended one is first; then come others that meet the target, those on the Pareto front
    first, each part by emissions. Empty: no configuration is recommended.
    """
    rec = recommend(data)
    if rec.trial is None or not count:
        return ()
    evidence = Evidence.of(data, rec.target)
    meeting = [
        config
        for config in evidence.configurations
        if config.trial != rec.trial
        and evidence.standing(config) is not Standing.REJECTED
        and rec.target.is_met_by(config.value)
    ]
    meeting.sort(key=lambda config: (config.trial not in rec.pareto_front, config.mean_rank))
    return rec.trial, *(config.trial for config in meeting[: count - 1])


class StepRun(Frozen):
    """A step of one run of the whole pipeline: the configuration taken, and its baseline."""

    step: str
    study: str  # folder of the study
    rank: int  # 1: the study's recommendation; 2: the next trial that was handed on
    target: Target
    taken: ComparedRun
    confirmed: bool | None  # whether it is confirmed for its target; None: it ran with one seed
    baseline: ComparedRun | None  # None: no trial completed that could be the baseline
    baseline_is_start: bool
    # At LEVEL, how far the logarithms of the two mean emissions may lie from the truth. None: the
    # run-to-run spread is not known.
    taken_log_margin: float | None
    baseline_log_margin: float | None


class PathRun(Frozen):
    """One run of all steps; sums are None where one of their parts is not known."""

    steps: tuple[StepRun, ...]
    emissions_kg_co2e: float
    energy_kwh: float | None
    duration_s: float | None
    baseline_emissions_kg_co2e: float | None
    baseline_energy_kwh: float | None
    baseline_duration_s: float | None

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of the trials that are taken, by step."""
        return {run.step: run.rank for run in self.steps}


class StudySpent(Frozen):
    study: str  # folder of the study
    trials: int  # number of finished trials, repeats included
    energy_kwh: float
    emissions_kg_co2e: float
    duration_s: float  # duration of all calls
    ended: bool
    met: bool


class PipelineSummary(Frozen):
    name: str
    # paths through all steps on which each target is met; the least emissions first
    paths: tuple[PathRun, ...]
    saving_fraction: float | None  # 1 − the first path's emissions ÷ its baseline's
    saving_interval: tuple[float, float] | None  # interval of that fraction
    # runs of all steps that pay the searches back; None: a run saves nothing, or none is known
    break_even_runs: int | None
    # Fewest and most of these runs, at the ends of the interval of what a run saves; most is None
    # if a run may save nothing. None: there is no interval, or none of it is a saving.
    break_even_interval: tuple[int, int | None] | None
    spent: tuple[StudySpent, ...]  # in the order in which they ran
    not_begun: tuple[str, ...]  # folders of the pipeline's studies that have not begun
    # those of them that `carbonopt run` will begin; others need what an earlier step did not reach
    to_begin: tuple[str, ...]
    between_kwh: float  # energy between the studies, in all calls
    energy_kwh: float  # energy of the studies and of what lies between them, without PUE
    emissions_kg_co2e: float  # emissions of everything, PUE included
    duration_s: float  # duration of all calls
    # energy read once at each call's begin and end; None: a call was killed
    outer_kwh: float | None
    closure: float | None  # (energy_kwh + what other work on the same cores used) ÷ outer_kwh
    gpu_kwh: float | None  # like energy_kwh, by the GPUs' counters; None: a part is not known
    outer_gpu_kwh: float | None
    gpu_closure: float | None

    @property
    def met(self) -> bool:
        return bool(self.paths)

    @property
    def ended(self) -> bool:
        return not self.to_begin and all(study.ended for study in self.spent)

    def as_json(self) -> dict[str, Any]:
        """Return what `carbonopt recommend --json` prints for a pipeline, except the caveats."""
        dumped = self.model_dump(mode="json")
        for path, fields in zip(self.paths, dumped["paths"], strict=True):
            for run, of_step in zip(path.steps, fields["steps"], strict=True):
                of_step["target"] = run.target.as_json()
        return {"met": self.met, **dumped}


def summarise(data: PipelineData) -> PipelineSummary:
    """Summarise a pipeline.

    Raises:
        StopIteration: if no study has begun.
    """
    recommendations = {folder: recommend(study) for folder, study in data.studies.items()}
    paths = [
        path for ranks in data.pipeline.paths() if (path := _path(data, recommendations, ranks))
    ]
    paths.sort(key=lambda path: path.emissions_kg_co2e)
    spent = tuple(
        _spent(folder, study, recommendations[folder]) for folder, study in data.studies.items()
    )
    footprints = [footprint(study) for study in data.studies.values()]
    between_kwh = math.fsum(session.between_kwh for session in data.sessions)
    energy_kwh = math.fsum([*(study.energy_kwh for study in spent), between_kwh])
    gpu_kwh = known_sum(
        [
            *(each.gpu_kwh for each in footprints),
            *(session.between_gpu_kwh for session in data.sessions),
        ]
    )
    others_between_kwh = [session.others_between_kwh for session in data.sessions]
    other_kwh = math.fsum([*(each.other_kwh or 0.0 for each in footprints), *others_between_kwh])
    outer_kwh = known_sum((session.outer_kwh for session in data.sessions), of_none=None)
    outer_gpu_kwh = known_sum((session.outer_gpu_kwh for session in data.sessions), of_none=None)
    any_study = next(iter(data.studies.values()))
    between_kg = any_study.emissions_kg_co2e(between_kwh)
    emissions_kg = math.fsum([*(study.emissions_kg_co2e for study in spent), between_kg])
    fraction, interval, saved_kg = _saving(paths[0]) if paths else (None, None, None)
    saved_ends_kg = _saved_interval_kg(paths[0], interval) if interval else None
    return PipelineSummary(
        name=data.pipeline.name,
        paths=tuple(paths),
        saving_fraction=fraction,
        saving_interval=interval,
        break_even_runs=None if saved_kg is None else break_even(emissions_kg, saved_kg),
        break_even_interval=break_even_interval(emissions_kg, saved_ends_kg),
        spent=spent,
        not_begun=tuple(folder for folder in data.pipeline.folders() if folder not in data.studies),
        to_begin=_to_begin(data, recommendations),
        between_kwh=between_kwh,
        energy_kwh=energy_kwh,
        emissions_kg_co2e=emissions_kg,
        duration_s=_duration_s(data),
        outer_kwh=outer_kwh,
        closure=(energy_kwh + other_kwh) / outer_kwh if outer_kwh else None,
        gpu_kwh=gpu_kwh,
        outer_gpu_kwh=outer_gpu_kwh,
        gpu_closure=gpu_kwh / outer_gpu_kwh if gpu_kwh is not None and outer_gpu_kwh else None,
    )


def _to_begin(data: PipelineData, recommendations: Mapping[str, Recommendation]) -> tuple[str, ...]:
    """Return the folders of the studies that will still begin if the pipeline is run on.

    The pipeline ends with a step of which no study has met its target.
    """
    waiting: list[str] = []
    for step in data.pipeline.pipeline:
        possible = [
            data.pipeline.folder(step, taken)
            for taken in data.pipeline.beginnings(step)
            if _may_begin(data, step, taken, waiting)
        ]
        waiting += [folder for folder in possible if folder not in data.studies]
        missed = [
            folder in data.studies
            and data.studies[folder].ended is not None
            and not recommendations[folder].met
            for folder in possible
        ]
        if all(missed):
            break
    return tuple(waiting)


def _may_begin(
    data: PipelineData, step: PipelineStep, taken: Mapping[str, int], waiting: Sequence[str]
) -> bool:
    """Return whether a step's study has, or may still get, all models that it begins with.

    Args:
        waiting: the folders of earlier steps' studies that will still begin.
    """
    by_name = {other.step: other for other in data.pipeline.pipeline}
    for name in step.needs.values():
        folder, rank = data.pipeline.folder(by_name[name], taken), taken[name]
        if (study := data.studies.get(folder)) is None:
            if folder not in waiting:
                return False
        elif study.ended is not None:
            trials = handed_on(study, rank)
            # Only the weights of a repeat are handed on; without the first ones the call fails.
            repeated = {record.repeat_of for record in study.records}
            if len(trials) < rank or (rank > 1 and trials[-1] not in repeated):
                return False
    return True


def _duration_s(data: PipelineData) -> float:
    """Return the duration of all calls.

    A call that was killed, or still runs, has stored its own duration only until its latest study
    began. The study has stored the rest.
    """
    calls = [session.span for session in data.sessions]
    of_studies = [session.span for study in data.studies.values() for session in study.sessions]
    return union_s([*calls, *of_studies])


def _path(
    data: PipelineData, recommendations: Mapping[str, Recommendation], ranks: Mapping[str, int]
) -> PathRun | None:
    """Return one run of all steps; None if not all of its steps have met their targets."""
    runs = []
    for step in data.pipeline.pipeline:
        folder = data.pipeline.folder(step, ranks)
        if (study := data.studies.get(folder)) is None:
            return None
        if (
            run := _step_run(step, folder, study, recommendations[folder], ranks[step.step])
        ) is None:
            return None
        runs.append(run)
    baselines = [run.baseline for run in runs]
    return PathRun(
        steps=tuple(runs),
        emissions_kg_co2e=math.fsum(run.taken.emissions_kg_co2e for run in runs),
        energy_kwh=known_sum(run.taken.energy_kwh for run in runs),
        duration_s=known_sum(run.taken.duration_s for run in runs),
        baseline_emissions_kg_co2e=known_sum(
            run.emissions_kg_co2e if run else None for run in baselines
        ),
        baseline_energy_kwh=known_sum(run.energy_kwh if run else None for run in baselines),
        baseline_duration_s=known_sum(run.duration_s if run else None for run in baselines),
    )


def _step_run(
    step: PipelineStep, folder: str, study: StudyData, rec: Recommendation, rank: int
) -> StepRun | None:
    trials = handed_on(study, rank)
    if len(trials) < rank:
        return None
    evidence = Evidence.of(study, rec.target)
    by_trial = {config.trial: config for config in evidence.configurations}
    taken = by_trial[trials[rank - 1]]
    baseline = by_trial.get(rec.baseline.trial) if rec.baseline else None
    own = study.provenance.intensity.g_co2e_per_kwh, study.config.carbon.pue
    return StepRun(
        step=step.step,
        study=folder,
        rank=rank,
        target=rec.target,
        taken=run_of(taken, own),
        confirmed=None if len(taken.runs) == 1 else evidence.standing(taken) is Standing.CONFIRMED,
        baseline=None if baseline is None else run_of(baseline, own),
        baseline_is_start=rec.baseline is not None and rec.baseline.is_start,
        taken_log_margin=evidence.log_emissions_margin(taken.n),
        baseline_log_margin=None if baseline is None else evidence.log_emissions_margin(baseline.n),
    )


def _saving(path: PathRun) -> tuple[float | None, tuple[float, float] | None, float | None]:
    """Return the saved fraction, its interval, and the saved kg CO2e.

    The interval is that of 1 − a ratio of two sums. A step whose mean has a relative error moves
    the logarithm of its sum by that error × its share of the sum. Different steps, and a step's
    taken configuration and its baseline, err independently, so that their shares add up in squares
    (JCGM 100:2008, 5.1.2). Where a step takes its baseline, one error moves both sums.
    """
    baseline_kg = path.baseline_emissions_kg_co2e
    if not baseline_kg:
        return None, None, None
    saved_kg = baseline_kg - path.emissions_kg_co2e
    if not path.emissions_kg_co2e > 0:  # no ratio to take the logarithm of
        return saved_kg / baseline_kg, None, saved_kg
    errors = []
    for run in path.steps:
        if run.baseline is None or run.taken_log_margin is None or run.baseline_log_margin is None:
            return saved_kg / baseline_kg, None, saved_kg
        taken = run.taken.emissions_kg_co2e / path.emissions_kg_co2e * run.taken_log_margin
        baseline = run.baseline.emissions_kg_co2e / baseline_kg * run.baseline_log_margin
        same = run.taken.trial == run.baseline.trial
        errors += [taken - baseline] if same else [taken, baseline]
    interval = less_interval(path.emissions_kg_co2e / baseline_kg, math.hypot(*errors))
    return saved_kg / baseline_kg, interval, saved_kg


def _saved_interval_kg(path: PathRun, share: tuple[float, float]) -> tuple[float, float]:
    """Return the interval of the kg CO2e that a run of all steps saves.

    A step that takes its baseline saves nothing for sure.
    """
    parts = [
        (
            run.taken.emissions_kg_co2e,
            run.baseline.emissions_kg_co2e,
            run.taken_log_margin or 0.0,
            run.baseline_log_margin or 0.0,
        )
        for run in path.steps
        if run.baseline is not None and run.taken.trial != run.baseline.trial
    ]
    return saved_interval_kg_co2e(parts, share)


def _spent(folder: str, study: StudyData, rec: Recommendation) -> StudySpent:
    return StudySpent(
        study=folder,
        trials=sum(record.has_finished for record in study.records),
        energy_kwh=rec.study_energy_kwh,
        emissions_kg_co2e=rec.study_emissions_kg_co2e,
        duration_s=sum(session.duration_s for session in study.sessions),
        ended=study.ended is not None,
        met=rec.met,
    )
