"""The BibTeX entries of what studies use."""

from collections.abc import Collection
from importlib import resources

from carbonopt import __version__
from carbonopt.spec.study_data import StudyData

_ENTRIES = (
    resources.files("carbonopt.report.paper")
    .joinpath("templates/references.bib")
    .read_text()
    .split("\n\n")
)


def references(wanted: Collection[str], data: StudyData) -> str:
    """Return the entries with these keys as a BibTeX file.

    CodeCarbon's entry is the one that its authors ask for, of an archived version; its note names
    the version that the study used.
    """
    cited = [
        entry.strip() for entry in _ENTRIES if entry.partition("{")[2].partition(",")[0] in wanted
    ]
    used = data.provenance.versions.get("codecarbon")
    note = "" if used is None else f"The study used version {used}. "
    text = "\n\n".join(cited).replace("VERSION", __version__).replace("CODECARBON", note)
    return text + "\n"


def measured_with(data: StudyData) -> str:
    """Return the entries of carbonopt and of what it measured a study's energy with.

    CodeCarbon gives the energy of CPU and memory and the carbon intensity, and NVML counts the
    energy of GPUs. A replay has measured nothing.
    """
    used = {"carbonopt"}
    if not data.provenance.is_replay:
        used.add("courty2024codecarbon")
    if data.provenance.energy_source.get("gpu") == "measured":
        used.add("nvml")
    return references(used, data)
