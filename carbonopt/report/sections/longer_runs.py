"""What compilation and warm-up, once a run, make of the recommendation where runs are longer, or come first."""

from collections.abc import Iterator
from itertools import pairwise

from carbonopt.analysis.amortisation import WORTH_SAYING, Amortisation, CheapestFrom
from carbonopt.core import format as fmt
from carbonopt.report.document import MISSING, Caveat, Section, Table, num, table, word
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import confidence_text

SHARE_TO_TELL = 0.05  # of a training's energy: a first step that took as much can turn a ranking round


def section(study: StudyView) -> Section | None:
    amortisation = study.amortisation
    if amortisation is None:
        return None
    return Section(
        key="longer-runs", title="Longer runs", blocks=(_by_length(amortisation), _first_steps(amortisation)), level=3
    )


def _by_length(amortisation: Amortisation) -> Table:
    excess = fmt.energy_scale(row.excess_kwh for row in amortisation.cheapest)
    rest = fmt.energy_scale(row.energy_per_length_kwh for row in amortisation.cheapest)
    starts = [_length(row.from_length) for row in amortisation.cheapest]
    labels = [low if low == high else f"{low} to {high}" for low, high in pairwise(starts)]
    labels.append("any" if len(starts) == 1 else f"beyond {starts[-1]}")

    def own(row: tuple[str, CheapestFrom]) -> bool:
        return row[1].trial == amortisation.trial

    def less(row: tuple[str, CheapestFrom]) -> float | None:
        return None if own(row) else row[1].less_in_the_limit

    interval = word("Interval", lambda row: MISSING if own(row) else confidence_text(row[1].less_interval))
    columns = [
        num("Times the steps", lambda row: row[1].from_length, shown=lambda row: row[0]),
        num("Cheapest: trial", lambda row: row[1].trial, strong=own),
        num(excess.label("Its first step's excess"), lambda row: row[1].excess_kwh, excess.text),
        num(rest.label("The rest"), lambda row: row[1].energy_per_length_kwh, rest.text),
        num(f"Less than trial {amortisation.trial} in the limit", less, fmt.percent_text),
        interval if len(amortisation.cheapest) > 1 else None,
    ]
    which = "may be recommended" if amortisation.met else "completed"
    note = f"Of {amortisation.compared} configurations that {which}"
    note += f", {amortisation.unknown} more without a measured first step" if amortisation.unknown else ""
    note += ". A run of k times the steps is taken to use its first step's excess once and the rest k times; which "
    note += "quality runs of that length reach is not known."
    caption = "Which configuration takes the least training energy where all runs are longer"
    return table("by-length", caption, zip(labels, amortisation.cheapest, strict=True), columns, note=note)


def _length(times: float) -> str:
    return "1" if fmt.rate_text(times) == "1.00" else fmt.rate_text(times)


def _first_steps(amortisation: Amortisation) -> Table:
    rows = [("beyond its mean step", amortisation.trial, amortisation.excess_kwh)]
    if first := amortisation.as_first:
        rows.append(("the largest of those that compile the same", first.like, first.excess_kwh))
        rows.append(("its training, charged with that", amortisation.trial, first.energy_kwh))
        rows.append(("the cheapest once each is charged so", first.cheapest, first.cheapest_energy_kwh))
    scale = fmt.energy_scale(energy_kwh for _, _, energy_kwh in rows)

    def share(row: tuple[str, int, float]) -> float | None:
        return row[2] / amortisation.energy_kwh if amortisation.energy_kwh else None

    columns = [
        word("What", lambda row: row[0]),
        num("Trial", lambda row: row[1]),
        num(scale.label("Energy"), lambda row: row[2], scale.text),
        num(f"of trial {amortisation.trial}'s training", share, fmt.percent_text),
    ]
    why = "compiling and warming up" if amortisation.compiles else "warming up"
    caption = f"The first step of trial {amortisation.trial}, for {why}"
    return table("first-steps", caption, rows, columns)


def caveats(study: StudyView) -> Iterator[Caveat]:
    amortisation = study.amortisation
    if amortisation is None:
        return
    if amortisation.met and amortisation.largest_excess_share > SHARE_TO_TELL and len(amortisation.cheapest) > 1:
        second, share = amortisation.cheapest[1], amortisation.largest_excess_share
        yield study.caveat("longer_runs", share=share, times=second.from_length, trial=second.trial)
    if amortisation.as_first is not None and amortisation.as_first.cheapest != amortisation.trial:
        yield study.caveat("first_compilation", trial=amortisation.as_first.cheapest)
    other = amortisation.not_compared
    if other is not None and other.less_a_token > WORTH_SAYING:
        numbers = {"other": other.trial, "count": other.of, "less": other.less_a_token, "trial": amortisation.trial}
        yield study.caveat("compiled_not_compared", **numbers)
