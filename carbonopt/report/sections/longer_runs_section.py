"""The recommendation where runs are longer, or come first.

Each run compiles and warms up once, so that another configuration may be the cheapest where runs
are longer, or where nothing has been compiled before.
"""

from collections.abc import Iterator
from itertools import pairwise

from carbonopt.analysis.stages import WORTH_SAYING, Amortisation, CheapestFrom
from carbonopt.core import format as fmt
from carbonopt.report.document import MISSING, Caveat, Section, Table, num, scaled, table, word
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import confidence_text

# Share of a training's energy: a first step that took as much can turn a ranking round.
SHARE_TO_TELL = 0.05


def section(study: StudyView) -> Section | None:
    if (amortisation := study.amortisation) is None:
        return None
    tables = [_first_steps(amortisation)]
    if amortisation.compared > 1:  # one alone is compared with nothing
        tables.insert(0, _by_length(amortisation))
    return Section(key="longer-runs", title="Longer runs", blocks=tuple(tables), level=3)


def _by_length(amortisation: Amortisation) -> Table:
    starts = [_length(row.from_length) for row in amortisation.cheapest]
    labels = [low if low == high else f"{low} to {high}" for low, high in pairwise(starts)]
    labels.append("any" if len(starts) == 1 else f"beyond {starts[-1]}")

    label_of = {row.trial: label for row, label in zip(amortisation.cheapest, labels, strict=True)}

    def own(row: CheapestFrom) -> bool:
        return row.trial == amortisation.trial

    def less(row: CheapestFrom) -> float | None:
        return None if own(row) else row.less_in_the_limit

    interval = word(
        "Interval", lambda row: MISSING if own(row) else confidence_text(row.less_interval)
    )
    columns = [
        num("Times the steps", "from_length", shown=lambda row: label_of[row.trial]),
        num("Cheapest: trial", "trial", strong=own),
        scaled("First step's excess", "excess_kwh", fmt.energy_scale, amortisation.cheapest),
        scaled(
            "Without the excess", "energy_per_length_kwh", fmt.energy_scale, amortisation.cheapest
        ),
        num(f"Less than trial {amortisation.trial} in very long runs", less, fmt.percent_text),
        interval if len(amortisation.cheapest) > 1 else None,
    ]
    which = "may be recommended" if amortisation.met else "completed"
    note = f"Compared: {fmt.count_text(amortisation.compared, 'configuration')} that {which}"
    note += (
        f", {amortisation.unknown} more without a measured first step"
        if amortisation.unknown
        else ""
    )
    note += (
        ". A run of k times the steps is taken to use its first step's excess once and the other"
        " energy k times; which quality runs of that length reach is not known."
    )
    caption = "Which configuration takes the least training energy where all runs are longer"
    return table("by-length", caption, amortisation.cheapest, columns, note=note)


def _length(times: float) -> str:
    return "1" if fmt.rate_text(times) == "1.00" else fmt.rate_text(times)


def _first_steps(amortisation: Amortisation) -> Table:
    rows: list[tuple[str, int | None, float]] = [
        ("beyond its mean step", amortisation.trial, amortisation.excess_kwh)
    ]
    if first := amortisation.as_first:
        by_probe = "" if first.like_probe is None else f", by probe {first.like_probe}"
        rows.append(
            (f"the largest of those that compile the same{by_probe}", first.like, first.excess_kwh)
        )
        rows.append(("its training, charged with that", amortisation.trial, first.energy_kwh))
        rows.append(
            ("the cheapest once each is charged so", first.cheapest, first.cheapest_energy_kwh)
        )
    whole_kwh, of_training = amortisation.energy_kwh, f"of trial {amortisation.trial}'s training"
    columns = [
        word("What", 0),
        num("Trial", 1),
        scaled("Energy", 2, fmt.energy_scale, rows),
        num(of_training, lambda row: row[2] / whole_kwh if whole_kwh else None, fmt.percent_text),
    ]
    why = "compiling and warming up" if amortisation.compiles else "warming up"
    caption = f"The first step of trial {amortisation.trial}, for {why}"
    return table("first-steps", caption, rows, columns)


def caveats(study: StudyView) -> Iterator[Caveat]:
    if (amortisation := study.amortisation) is None:
        return
    share = amortisation.largest_excess_share
    clearly = next(filter(_is_clearly_cheaper, amortisation.cheapest), None)
    if amortisation.met and share > SHARE_TO_TELL and clearly is not None:
        yield study.caveat(
            "longer_runs", share=share, times=clearly.from_length, trial=clearly.trial
        )
    first = amortisation.as_first
    if first is not None and first.energy_kwh > (1 + WORTH_SAYING) * first.cheapest_energy_kwh:
        yield study.caveat("first_compilation", trial=first.cheapest)
    other = amortisation.not_compared
    if other is not None and other.less_a_token > WORTH_SAYING:
        numbers = {
            "other": other.trial,
            "count": other.of,
            "less": other.less_a_token,
            "trial": amortisation.trial,
        }
        yield study.caveat("compiled_not_compared", **numbers)


def _is_clearly_cheaper(row: CheapestFrom) -> bool:
    """Return whether very long runs would take less energy by more than the noise, if it is known.

    Where nothing was repeated, WORTH_SAYING stands in for it.
    """
    if row.less_interval is not None:
        return row.less_interval[0] > 0
    return row.less_in_the_limit > WORTH_SAYING
