"""The machines of a study that used several."""

from carbonopt.core import format as fmt
from carbonopt.report.document import MISSING, Section, num, scaled, table, word
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    rows = study.by_node
    if not rows:
        return None
    has_gpus = any(row.gpus is not None for row in rows)
    measured = any(row.train_gpu_kwh is not None for row in rows)
    columns = [
        word("Machine", "name"),
        num("GPUs", "gpus", shown=lambda row: MISSING if row.gpus is None else str(row.gpus))
        if has_gpus
        else None,
        num("Trials", "trials"),
        num(
            "Most ranks of a trial",
            "most_ranks",
            shown=lambda row: MISSING if row.most_ranks is None else str(row.most_ranks),
        ),
        scaled("Training", "train_kwh", fmt.energy_scale, rows),
        scaled("GPUs' part", "train_gpu_kwh", fmt.energy_scale, rows) if measured else None,
        scaled("Trials in all", "total_kwh", fmt.energy_scale, rows),
    ]
    note = (
        "Each machine has a meter of its own. Their readings add up to the energy of the trials:"
        " each trial's last attempt, without the study's other cost."
    )
    caption = "The trials and their energy by machine"
    return Section(
        key="nodes", title="By machine", blocks=(table("nodes", caption, rows, columns, note=note),)
    )
