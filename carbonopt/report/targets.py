"""The answer for every target, as texts: what a reader moves a slider over."""

import math
from collections.abc import Sequence

from carbonopt.analysis.by_target import TargetRange
from carbonopt.analysis.confidence import LEVEL
from carbonopt.core.dimensions import TrialParams
from carbonopt.core.format import (
    count_text,
    emissions_text,
    energy_text,
    number_from,
    params_text,
    percent_text,
    quality_text,
)
from carbonopt.core.study import StudyData
from carbonopt.report.savings import compared, pays_back_from_to, sure_of
from carbonopt.report.view import TargetStep


def target_steps(data: StudyData, answers: Sequence[TargetRange]) -> tuple[TargetStep, ...]:
    """One for each answer, in their order."""
    params = {record.trial: record.params for record in data.records}
    steps = []
    for index, answer in enumerate(answers):
        begin = answer.from_perplexity
        end = _end(answers, index)
        if answer.study_target_only:
            number, label = repr(begin), f"the study's own target, {quality_text(begin)}, alone"
        else:
            number = number_from(begin, end)
            label = f"targets from {number}" + (
                f" to below {_next_number(answers, index)}" if end < math.inf else " on"
            )
        steps.append(TargetStep(number=number, label=label, text=_answer(answer, params)))
    return tuple(steps)


def _end(answers: Sequence[TargetRange], index: int) -> float:
    """Where the answer is first not the answer any more."""
    return next((one.from_perplexity for one in answers[index + 1 :] if not one.study_target_only), math.inf)


def _next_number(answers: Sequence[TargetRange], index: int) -> str:
    following = next(at for at in range(index + 1, len(answers)) if not answers[at].study_target_only)
    return number_from(answers[following].from_perplexity, _end(answers, following))


def _answer(answer: TargetRange, params: dict[int, TrialParams]) -> str:
    if answer.trial is None:
        return "No trial meets such a target."
    runs = "one run, which may have been lucky" if answer.seeds == 1 else f"means of {answer.seeds} seeds"
    if answer.perplexity_bound is not None:
        bound = quality_text(answer.perplexity_bound)
        runs += f"; with {percent_text(LEVEL)} confidence the mean perplexity is at most {bound}"
    found = [
        f"Trial {answer.trial} ({params_text(params[answer.trial])}): perplexity {quality_text(answer.perplexity)}, "
        f"{emissions_text(answer.emissions_kg_co2e)} a run ({energy_text(answer.energy_kwh)} in training); {runs}."
    ]
    if answer.trial == answer.baseline_trial:
        found.append("It is its own baseline.")
    elif answer.baseline_trial is not None and answer.saving_fraction is not None:
        sure = sure_of(answer.saving_fraction, answer.saving_interval)
        found.append(
            f"{compared(answer.saving_fraction).capitalize()} the baseline (trial {answer.baseline_trial}; {sure})."
        )
    if answer.break_even_runs is not None:
        known = pays_back_from_to(answer.break_even_interval)
        runs = count_text(answer.break_even_runs, "run")
        found.append(f"The study pays back after {runs}{f' ({known})' if known else ''}.")
    return " ".join(found)
