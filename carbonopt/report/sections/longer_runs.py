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
    found = study.amortisation
    if found is None:
        return None
    return Section(key="longer-runs", title="Longer runs", blocks=(_by_length(found), _first_steps(found)), level=3)


def _by_length(found: Amortisation) -> Table:
    excess = fmt.energy_scale(row.excess_kwh for row in found.cheapest)
    rest = fmt.energy_scale(row.energy_per_length_kwh for row in found.cheapest)
    starts = [_length(row.from_length) for row in found.cheapest]
    labels = [low if low == high else f"{low} to {high}" for low, high in pairwise(starts)]
    labels.append("any" if len(starts) == 1 else f"beyond {starts[-1]}")

    def own(row: tuple[str, CheapestFrom]) -> bool:
        return row[1].trial == found.trial

    def less(row: tuple[str, CheapestFrom]) -> float | None:
        return None if own(row) else row[1].less_in_the_limit

    interval = word("Interval", lambda row: MISSING if own(row) else confidence_text(row[1].less_interval))
    columns = [
        num("Times the steps", lambda row: row[1].from_length, shown=lambda row: row[0]),
        num("Cheapest: trial", lambda row: row[1].trial, strong=own),
        num(excess.label("Its first step's excess"), lambda row: row[1].excess_kwh, excess.text),
        num(rest.label("The rest"), lambda row: row[1].energy_per_length_kwh, rest.text),
        num(f"Less than trial {found.trial} in the limit", less, fmt.percent_text),
        interval if len(found.cheapest) > 1 else None,
    ]
    note = f"Of {found.compared} configurations {'that may be recommended' if found.met else 'that completed'}"
    note += f", {found.unknown} more without a measured first step" if found.unknown else ""
    note += ". A run of k times the steps is taken to use its first step's excess once and the rest k times; which "
    note += "quality runs of that length reach is not known."
    caption = "Which configuration takes the least training energy where all runs are longer"
    return table("by-length", caption, zip(labels, found.cheapest, strict=True), columns, note=note)


def _length(times: float) -> str:
    return "1" if fmt.rate_text(times) == "1.00" else fmt.rate_text(times)


def _first_steps(found: Amortisation) -> Table:
    rows = [("beyond its mean step", found.trial, found.excess_kwh)]
    if first := found.as_first:
        rows.append(("the largest of those that compile the same", first.like, first.excess_kwh))
        rows.append(("its training, charged with that", found.trial, first.energy_kwh))
        rows.append(("the cheapest once each is charged so", first.cheapest, first.cheapest_energy_kwh))
    scale = fmt.energy_scale(energy_kwh for _, _, energy_kwh in rows)

    def share(row: tuple[str, int, float]) -> float | None:
        return row[2] / found.energy_kwh if found.energy_kwh else None

    columns = [
        word("What", lambda row: row[0]),
        num("Trial", lambda row: row[1]),
        num(scale.label("Energy"), lambda row: row[2], scale.text),
        num(f"of trial {found.trial}'s training", share, fmt.percent_text),
    ]
    caption = f"The first step of trial {found.trial}, for {'compiling and ' if found.compiles else ''}warming up"
    return table("first-steps", caption, rows, columns)


def caveats(study: StudyView) -> Iterator[Caveat]:
    found = study.amortisation
    if found is None:
        return
    if found.met and found.largest_excess_share > SHARE_TO_TELL and len(found.cheapest) > 1:
        second, share = found.cheapest[1], found.largest_excess_share
        yield study.caveat("longer_runs", share=share, times=second.from_length, trial=second.trial)
    if found.as_first is not None and found.as_first.cheapest != found.trial:
        yield study.caveat("first_compilation", trial=found.as_first.cheapest)
    other = found.not_compared
    if other is not None and other.less_a_token > WORTH_SAYING:
        numbers = {"other": other.trial, "count": other.of, "less": other.less_a_token, "trial": found.trial}
        yield study.caveat("compiled_not_compared", **numbers)
