"""The effect of the number of GPUs on time and energy."""

from carbonopt.analysis.scaling import AtWorldSize, Scaling
from carbonopt.core import format as fmt
from carbonopt.report.caveats import trials_text
from carbonopt.report.document import Section, num, table
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import AT_LEVEL, SPREAD_UNKNOWN


def section(study: StudyView) -> Section | None:
    if (effect := study.scaling) is None:
        return None
    unit = "GPUs" if study.data.config.launch.gpus else "ranks"
    energy = fmt.energy_scale(row.energy_kwh for row in effect.rows)
    emissions = fmt.emissions_scale(row.emissions_kg_co2e for row in effect.rows)
    columns = [
        num(unit.capitalize() if unit == "ranks" else unit, "world_size"),
        num(
            "Trial",
            "trial",
            shown=lambda row: f"{row.trial}{' (slowed)' if row.slowed else ''}",
        ),
        num("Runs", "seeds") if any(row.seeds > 1 for row in effect.rows) else None,
        num(
            study.quality.label,
            "quality",
            shown=lambda row: (
                study.quality.text(row.quality) + ("" if row.met else " (missed the target)")
            ),
        ),
        num(
            "Time (s)",
            "duration_s",
            shown=lambda row: fmt.seconds_text(row.duration_s),
            strong=lambda row: row.world_size == effect.fastest,
        ),
        num(
            "Step (ms)",
            "step_s",
            shown=lambda row: "–" if row.step_s is None else f"{1000 * row.step_s:.3g}",
        ),
        num(
            energy.label("Energy"),
            "energy_kwh",
            shown=lambda row: energy.text(row.energy_kwh),
            strong=lambda row: row.world_size == effect.least_energy,
        ),
        num(
            emissions.label("Emissions"),
            "emissions_kg_co2e",
            shown=lambda row: emissions.text(row.emissions_kg_co2e),
        ),
        num("Speed-up", "speed_up", shown=lambda row: f"{row.speed_up:.2f} ×"),
        num("Energy ratio", "energy_ratio", shown=_ratio_text),
    ]
    first = effect.rows[0].world_size
    caption = (
        f"The configuration to take, by the number of {unit}; speed-up and energy against {first}"
    )
    made = table("scaling", caption, effect.rows, columns, note=_note(effect, unit))
    return Section(key="scaling", title=f"How many {unit}", blocks=(made,))


def _ratio_text(row: AtWorldSize) -> str:
    text = f"{row.energy_ratio:.2f} ×"
    if row.energy_ratio_interval is None:
        return text
    lowest, highest = row.energy_ratio_interval
    return f"{text} ({lowest:.2f} to {highest:.2f})"


def _note(effect: Scaling, unit: str) -> str:
    fastest = next(row for row in effect.rows if row.world_size == effect.fastest)
    least = next(row for row in effect.rows if row.world_size == effect.least_energy)
    note = f"Least energy with {effect.least_energy}, least time with {effect.fastest}"
    if effect.least_energy != effect.fastest:
        faster, dearer = (
            least.duration_s / fastest.duration_s,
            fastest.energy_kwh / least.energy_kwh,
        )
        note += f", which is {faster:.2g} × as fast at {dearer:.2g} × the energy"
    if effect.ties is None:
        note += f". {SPREAD_UNKNOWN.capitalize()}: a small difference may be noise"
    elif effect.ties:
        others = " and ".join(map(str, effect.ties))
        note += f". {others} differ{'s' * (len(effect.ties) == 1)} from the least energy by less"
        note += f" than the error {AT_LEVEL}"
    if slowed := [row.trial for row in effect.rows if row.slowed]:
        note += (
            f". Other work slowed {trials_text(slowed)}: alone, another number of {unit} may be the"
            " best"
        )
    return f"{note}."
