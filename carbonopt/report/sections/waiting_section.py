"""The waits for the hours of the study's schedule: what they cost and what they saved."""

from collections.abc import Iterator

from carbonopt.core import format as fmt
from carbonopt.core.units import human_duration
from carbonopt.report.document import Caveat, Section, table, word
from carbonopt.report.study_view import StudyView

_NOT_COVERED = "not known yet: carbon.trace does not cover these hours"
_WENT_ON = (
    "not known: a trial went on from a checkpoint in an earlier version of carbonopt, which stored"
    " no hours of its attempts"
)


def caveats(study: StudyView) -> Iterator[Caveat]:
    if (waited := study.waiting) is None:
        return
    saving, net, idle = waited.realised_saving, waited.realised_net_saving, waited.idle_kwh
    if saving is not None and net is not None:
        if net < 0:
            yield study.caveat("waiting_dearer", saving=saving, idle=idle, more=-net)
        return
    energies = [record.energy_kwh for record in study.data.records if record.energy_kwh]
    expected = waited.expected_saving
    if expected is None or not energies:
        return
    saved_kwh = expected * sum(energy.total for energy in energies)
    if idle > saved_kwh:
        yield study.caveat("waiting_perhaps_dearer", saving=expected, idle=idle, saved=saved_kwh)


def section(study: StudyView) -> Section | None:
    if (waited := study.waiting) is None:
        return None
    emissions = fmt.emissions_text(waited.idle_kg_co2e)
    rows = [
        ("Waits", fmt.count_text(waited.waits, "wait")),
        ("Waited", human_duration(waited.waited_s)),
        ("First trial began", waited.first_start or "not yet"),
        ("Energy while it waited", f"{fmt.energy_text(waited.idle_kwh)} ({emissions})"),
        ("Saving expected as the first wait began", fmt.percent_text(waited.expected_saving)),
        ("Saving by the hours as they were", _share(study, waited.realised_saving)),
        ("The same, less the energy while it waited", _share(study, waited.realised_net_saving)),
    ]
    columns = [word("Of the waits", lambda row: row[0]), word("Value", lambda row: row[1])]
    note = (
        "Savings are shares of the trials' emissions by the hour, against the same trials without"
        " the waits. The emissions in all other parts of this report use one fixed intensity. The"
        " energy while it waited is part of the study's own cost."
    )
    caption = "Waits for the hours of the schedule"
    return Section(
        key="waiting",
        title="Waiting for cleaner hours",
        blocks=(table("waiting", caption, rows, columns, note=note),),
    )


def _share(study: StudyView, saving: float | None) -> str:
    if saving is not None:
        return fmt.percent_text(saving)
    is_noted = all(
        record.spans is not None for record in study.data.records if record.continued_at_steps
    )
    return _NOT_COVERED if is_noted else _WENT_ON
