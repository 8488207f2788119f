"""Measurements that took a few steps instead of whole trials."""

from carbonopt.core import format as fmt
from carbonopt.core.dimensions import DIMENSIONS
from carbonopt.report.document import MISSING, Section, num, scaled, table, word
from carbonopt.report.sections.trials_section import setting
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    if (probes := study.probes) is None:
        return None
    rows = probes.results
    columns = [
        num("Probe", "probe"),
        *(
            setting(name, DIMENSIONS[name].label, lambda row: study.settings(row.params))
            for name in probes.settings
        ),
        word("Result", "became"),
        scaled("A step", "step_kwh", fmt.energy_scale, rows),
        scaled("First step's excess", "first_step_excess_kwh", fmt.energy_scale, rows),
        word("Kernels", lambda row: MISSING if row.kernels is None else row.kernels.value),
        num("Peak memory (GiB)", "peak_memory_gib", fmt.memory_text),
        scaled("Spent", "spent_kwh", fmt.energy_scale, rows),
    ]
    note = (
        f"{fmt.count_text(len(rows), 'probe')} took {fmt.percent_text(probes.spent_share)} of the"
        " study's energy. They measure what a step of other settings takes, so that trials begin"
        " with the cheapest ones known; and they compile what a trial needs, so that no trial pays"
        " for being the first: that is in the first step's excess."
    )
    made = table(
        "probes", "Probes: a few steps alone", rows, columns, note=note, long=True, folded=True
    )
    return Section(key="probes", title="Probes", blocks=(made,), level=3)
