"""Several studies side by side, as a document.

It shows what each study recommends, what that takes on its machine, and the Pareto fronts of all in
one figure.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

from carbonopt.analysis.confidence import configurations
from carbonopt.analysis.stages import counts_whole_processes
from carbonopt.analysis.study_comparison import ComparedStudy, compare_studies
from carbonopt.core import format as fmt
from carbonopt.core.units import human_duration
from carbonopt.report.assemble import critical_caveats
from carbonopt.report.document import (
    Block,
    Caveat,
    Document,
    Maker,
    Of,
    Section,
    Table,
    num,
    scaled,
    table,
    word,
)
from carbonopt.report.evaluated_data import UNKNOWN, agreement, evaluated_data, script_files
from carbonopt.report.figures.fronts_figure import fronts
from carbonopt.report.sections.contention_section import most_slowed
from carbonopt.report.sections.provenance_section import stated
from carbonopt.report.study_view import StudyView
from carbonopt.report.summary import AT_LEVEL, confidence_text, is_within_noise, short_params

# Keys of caveats with which no saving is stated, and nothing is ranked.
_INCOMPARABLE = {
    "different_objectives",
    "different_data",
    "unknown_data",
    "other_lengths",
    "different_energy_sources",
    "different_windows",
    "same_trials",
}


class StudiesView:
    """Several studies and their comparison, from which the document is made.

    Args:
        studies: The studies by the name that each is shown under; all names differ.
    """

    def __init__(self, studies: Mapping[str, StudyView]) -> None:
        self.by_name = dict(studies)
        recommendations = {name: study.recommendation for name, study in self.by_name.items()}
        self.comparison = compare_studies(
            {name: study.data for name, study in self.by_name.items()}, recommendations
        )
        self.quality = next(iter(self.by_name.values())).quality

    stated = cached_property(
        lambda self: {name: stated(study.data) for name, study in self.by_name.items()}
    )

    @property
    def at_common(self) -> str:
        return f"at {fmt.intensity_text(self.comparison.g_co2e_per_kwh)} g CO2e/kWh"

    @property
    def have_different_targets(self) -> bool:
        return len({study.target.value for study in self.comparison.studies}) > 1

    def results(self) -> dict[str, Any]:
        """Return the comparison in full precision, for the JSON file.

        It includes what is stated of each study's machine, model and data.
        """
        return {**self.comparison.as_json(), "provenance": self.stated}

    def caveat(self, key: str, **numbers: Any) -> Caveat:
        return next(iter(self.by_name.values())).caveat(key, **numbers)


def compared(view: StudiesView) -> Document:
    """Return the document that compares the studies.

    Raises:
        BadInput: Unless all studies have the same task and the same quality.
    """
    common, first = view.comparison, view.comparison.studies[0].name
    figure = fronts(common, view.quality)
    front_blocks: tuple[Block, ...] = () if figure is None else (figure,)
    intensity = f"{fmt.intensity_text(common.g_co2e_per_kwh)} g CO2e/kWh"
    priced = f"The common intensity, {intensity}, and PUE, {common.pue:.3g}, are those of {first}"
    caveats = tuple(sorted(_caveats(view), key=lambda caveat: caveat.level))
    recommended = _recommended(view, ranks=_are_comparable(caveats))
    return Document(
        name=", ".join(view.by_name),
        headline=_headline(view, caveats),
        details=(f"{priced}. With these, emissions rank as energies do.",),
        tiles=(),
        caveats=caveats,
        sections=(
            Section(key="studies", title="What is compared", blocks=(_studies(view),)),
            Section(key="recommended", title="What each study recommends", blocks=(recommended,)),
            Section(
                key="fronts",
                title="The Pareto front of each study",
                blocks=(*front_blocks, _fronts(view)),
            ),
            Section(key="spent", title="What the searches spent", blocks=(_spent(view),)),
        ),
    )


def _are_comparable(caveats: Iterable[Caveat]) -> bool:
    return not {caveat.key for caveat in caveats} & _INCOMPARABLE


def _headline(view: StudiesView, caveats: Iterable[Caveat]) -> str:
    ranked = view.comparison.by_emissions
    if not ranked:
        return "No study met its target"
    if not _are_comparable(caveats):
        return "What these studies recommend can't be compared"
    if len(ranked) == 1:
        return f"{ranked[0].name} alone met its target"
    least, following = (study.recommended for study in ranked[:2])
    assert least is not None and following is not None
    least_kg, next_kg = (
        least.common_emissions_kg_co2e or 0.0,
        following.common_emissions_kg_co2e or 0.0,
    )
    saving = 1 - least_kg / next_kg if next_kg else 0.0
    than = f"{ranked[1].name}{', the next best' if len(ranked) > 2 else ''}"
    interval = view.comparison.less_interval
    less = f"{ranked[0].name}: {fmt.less_text(saving)} CO2e a run ({confidence_text(interval)})"
    differ = "; their targets differ" if view.have_different_targets else ""
    compared_text = f"{less}, {view.at_common}, than {than}{differ}"
    if is_within_noise(interval):
        return f"No difference in CO2e is shown {AT_LEVEL}; {compared_text}"
    return compared_text


def _caveats(view: StudiesView) -> Iterator[Caveat]:
    common, quality = view.comparison, view.quality
    if view.have_different_targets:
        targets = _listed(
            {study.name: quality.target_text(study.target.value) for study in common.studies}
        )
        yield view.caveat("different_targets", targets=targets)
    yield from _of_evaluated_data(view)
    counted = {name: study.data.config.carbon.objective for name, study in view.by_name.items()}
    if len(set(counted.values())) > 1:
        yield view.caveat("different_objectives", objectives=_listed(counted))
    yield from _of_windows(view)
    yield from _of_scripts(view)
    yield from _of_copies(view)
    yield from _of_recorded_runs(view)
    yield from _of_energy_sources(view)
    yield from _of_contention(view)
    yield from critical_caveats(view.by_name)
    for name, study in view.by_name.items():
        if trials := study.spent.unmeasured_trials:
            yield view.caveat("unmeasured_trials_of", study=name, trials=trials)
    for name in (study.name for study in common.studies if not study.ended):
        yield view.caveat("compared_before_its_end", study=name)
    if once := [
        study.name for study in common.studies if study.recommended and study.recommended.seeds == 1
    ]:
        yield view.caveat("compared_single_runs", studies=", ".join(once))


def _of_evaluated_data(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat unless all studies are known to have been evaluated on the same data."""
    evaluated = {name: evaluated_data(study.data) for name, study in view.by_name.items()}
    found = agreement(evaluated)
    if found == "other_lengths":
        lengths = sorted({each.length for each in evaluated.values() if each.length is not None})
        texts = " and of ".join(map(str, lengths))
        yield view.caveat("other_lengths", lengths=texts, quality=view.quality.name)
    elif found != "same":
        texts = _listed({name: each.text for name, each in evaluated.items()})
        yield view.caveat(f"{found}_data", data=texts, quality=view.quality.name)


def _of_energy_sources(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat where other components are counted, or are known in another way."""
    texts = {name: rows.get("Energy sources", UNKNOWN) for name, rows in view.stated.items()}
    first, *others = view.by_name.values()
    if any(
        _counted(other, "energy_source") != _counted(first, "energy_source") for other in others
    ):
        yield view.caveat("different_energy_sources", sources=_listed(texts))
    elif any(_counted(other, "models") != _counted(first, "models") for other in others):
        yield view.caveat("different_energy_models", sources=_listed(texts))


def _counted(study: StudyView, field: str) -> dict[str, str]:
    """Return a field of the provenance for the components that emissions count."""
    by_component: dict[str, str] = getattr(study.data.provenance, field)
    is_gpu_alone = study.data.config.carbon.objective == "gpu"
    return {name: text for name, text in by_component.items() if name == "gpu" or not is_gpu_alone}


def _of_windows(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat where some studies count the training alone, and others a whole process."""
    whole = {name: counts_whole_processes(study.data) for name, study in view.by_name.items()}
    if len(set(whole.values())) > 1:
        texts = {
            name: "the whole process, with its start-up and evaluations" if is_whole else "training"
            for name, is_whole in whole.items()
        }
        yield view.caveat("different_windows", windows=_listed(texts))


def _of_scripts(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat where the studies' scripts, or the files that they read, differ."""
    contents = {
        name: script_files(study.data)
        for name, study in view.by_name.items()
        if study.data.config.is_script
    }
    known = {name: names for name, names in contents.items() if names}
    everywhere = set.intersection(*(set(names) for names in known.values())) if known else set()
    own = {
        name: [names[sha256] for sha256 in names.keys() - everywhere]
        for name, names in known.items()
    }
    if differing := {name: ", ".join(sorted(names)) for name, names in own.items() if names}:
        yield view.caveat("different_scripts", files=_listed(differing), quality=view.quality.name)


def _of_contention(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat where other work slowed a run of what is compared."""
    slowed: dict[str, str] = {}
    for name, study in view.by_name.items():
        chosen = {study.recommendation.trial}
        if worst := most_slowed(study.data.records, chosen):
            share = fmt.percent_text(worst.cpu_wait_fraction)
            slowed[name] = f"trial {worst.trial} waited for {share} of its time"
    if slowed:
        yield view.caveat("compared_contention", trials=_listed(slowed))


def _of_copies(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat for each two studies with the same trials: one is a copy of the other."""
    began = {
        name: {
            (row.trial, row.started_at) for row in study.data.records if row.started_at is not None
        }
        for name, study in view.by_name.items()
    }
    for first, second in combinations(began, 2):
        if common := began[first] & began[second]:
            yield view.caveat("same_trials", studies=f"{first} and {second}", count=len(common))


def _of_recorded_runs(view: StudiesView) -> Iterator[Caveat]:
    """Yield a caveat for each two replays that recommend what the same recorded runs are of."""
    recorded = {
        name: _recommended_runs(study)
        for name, study in view.by_name.items()
        if study.data.provenance.is_replay
    }
    for first, second in combinations(recorded, 2):
        if common := [run for run in recorded[first] if run in recorded[second]]:
            names = f"{first} and {second}"
            yield view.caveat("same_recorded_runs", studies=names, count=len(common))


def _recommended_runs(study: StudyView) -> list[tuple[Any, ...]]:
    """Return the runs of the recommended configuration, by which a recorded run is known again."""
    return [
        (run.params, run.seed, run.energy_kwh.train if run.energy_kwh else None, run.value)
        for tried in configurations(study.data.records)
        if tried.trial == study.recommendation.trial
        for run in tried.runs
    ]


def _listed(text_by_study: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in text_by_study.items())


def _of_run(name: str) -> Callable[[ComparedStudy], Any]:
    """Return a function that reads one field of a study's recommended run.

    It returns None for a study without such a run.
    """
    return lambda study: None if study.recommended is None else getattr(study.recommended, name)


def _studies(view: StudiesView) -> Table:
    def said(*labels: str) -> Callable[[ComparedStudy], str]:
        """Return a function that gives the first of these labels' texts that a study states."""
        return lambda study: next(filter(None, map(view.stated[study.name].get, labels)), UNKNOWN)

    described = {
        "Machine": said("Hardware"),
        "Model": said("Model"),
        "Data": said("Data set", "Table"),
    }
    studies = view.comparison.studies
    alike = {
        title: of(studies[0]) for title, of in described.items() if len(set(map(of, studies))) == 1
    }
    columns = [
        word("Study", "name"),
        *(None if title in alike else word(title, of) for title, of in described.items()),
        num(f"Target ({view.quality.bound_word})", "target.value", view.quality.target_text),
        num("g CO2e/kWh", "g_co2e_per_kwh", fmt.intensity_text),
        num("PUE", "pue", "{:.3g}".format),
    ]
    task = "" if view.comparison.task is None else f" of the task {view.comparison.task}"
    note = " ".join(f"{title} of all: {text}." for title, text in alike.items())
    return table(
        "studies", f"Studies{task}, with their own intensity and PUE", studies, columns, note=note
    )


def _recommended(view: StudiesView, *, ranks: bool) -> Table:
    """Show what each study recommends.

    Args:
        ranks: Whether the studies can be compared, so that one of them has the least emissions.
    """
    studies, quality, ranked = view.comparison.studies, view.quality, view.comparison.by_emissions
    common_kg = _of_run("common_emissions_kg_co2e")
    least_kg = common_kg(ranked[0]) if ranked else None

    def configuration(study: ComparedStudy) -> str:
        return (
            "none meets the target"
            if study.recommended is None
            else short_params(study.recommended.params)
        )

    def ratio(study: ComparedStudy) -> float | None:
        kg = common_kg(study)
        return kg / least_kg if least_kg and kg is not None else None

    def is_least(study: ComparedStudy) -> bool:
        return ranks and bool(ranked) and study.name == ranked[0].name

    columns: list[Maker | None] = [
        word("Study", "name", strong=is_least),
        word("Configuration", configuration),
        num("Runs", _of_run("seeds")),
        num(quality.label, _of_run("value"), quality.text),
        scaled("Energy", _of_run("energy_kwh"), fmt.energy_scale, studies),
        num("Time", _of_run("duration_s"), human_duration),
        _at_own_intensity(studies, _of_run("emissions_kg_co2e")),
        scaled(f"CO2e {view.at_common}", common_kg, fmt.emissions_scale, studies, strong=is_least),
        num("Relative to the least", ratio, fmt.rate_text) if ranks else None,
    ]
    caption = "A run of what each study recommends: its training; means where repeated"
    return table("recommended", caption, studies, columns)


def _at_own_intensity(studies: Sequence[ComparedStudy], emissions: Of) -> Maker | None:
    """Make the column of emissions at each study's own carbon intensity.

    Return None where all studies have the same intensity and PUE.
    """
    if len({(study.g_co2e_per_kwh, study.pue) for study in studies}) == 1:
        return None
    return scaled("CO2e at its own intensity", emissions, fmt.emissions_scale, studies)


def _spent(view: StudiesView) -> Table:
    studies = view.comparison.studies
    columns = [
        word("Study", "name"),
        num("Trials and repeats", "trials"),
        num("Time", "spent_duration_s", human_duration),
        scaled("Energy", "spent_energy_kwh", fmt.energy_scale, studies),
        _at_own_intensity(studies, "spent_emissions_kg_co2e"),
        scaled(
            f"CO2e {view.at_common}", "spent_common_emissions_kg_co2e", fmt.emissions_scale, studies
        ),
    ]
    return table("spent", "What each study spent", studies, columns, note=_what_is_spent(view))


def _what_is_spent(view: StudiesView) -> str:
    """Say what the energy of a whole study has in it."""
    replays = [name for name, study in view.by_name.items() if study.data.provenance.is_replay]
    trained = "All of a study: preparation, stopped and failed trials, repeats, evaluations, gaps."
    if not replays:
        return trained
    recorded = (
        "the training and evaluations of all trials and repeats, as recorded; what their start-up"
        " used is not known."
    )
    if len(replays) == len(view.by_name):
        return f"All that was replayed: {recorded}"
    return f"{trained} Of {' and '.join(replays)}: {recorded}"


def _fronts(view: StudiesView) -> Table:
    rows = [(study.name, run) for study in view.comparison.studies for run in study.front]

    def of(name: str) -> Callable[[Any], Any]:
        return lambda row: getattr(row[1], name)

    columns = [
        word("Study", 0),
        num("Trial", of("trial")),
        word("Configuration", lambda row: short_params(row[1].params)),
        num("Runs", of("seeds")),
        num(view.quality.label, of("value"), view.quality.text),
        scaled("Energy", of("energy_kwh"), fmt.energy_scale, rows),
        num("Time", of("duration_s"), human_duration),
        scaled(f"CO2e {view.at_common}", of("common_emissions_kg_co2e"), fmt.emissions_scale, rows),
    ]
    caption = (
        "The front of each study: no other complete trial of it is better in one objective without"
        " being worse in "
    )
    caption += "the other"
    return table("fronts", caption, rows, columns, folded=True)
