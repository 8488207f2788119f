"""The references that a study's text cites."""

from importlib import resources
from pathlib import Path

from carbonopt import __version__
from carbonopt.core.config import Dataset, StudyConfig

_TEXT = resources.files("carbonopt.report.paper").joinpath("templates/references.bib").read_text()
_ENTRIES = {  # BibTeX by key, in the order of the bibliography
    entry.partition("{")[2].partition(",")[0]: entry.strip() for entry in _TEXT.split("\n\n")
}
_OF_SAMPLER = {  # Optuna's Gaussian process and grid have no paper but Optuna's
    "carbon": "carbonopt",
    "tpe": "bergstra2011tpe",
    "nsga2": "deb2002nsga2",
    "random": "bergstra2012random",
}
_OF_TRAINING = ("wolf2020transformers", "rasley2020deepspeed", "rajbhandari2020zero")
_OF_DATA = {"wikitext": "merity2017wikitext", "shakespeare": "karpathy2015unreasonable"}  # by what its name holds


def sampler_key(config: StudyConfig) -> str:
    return _OF_SAMPLER.get(config.search.sampler, "akiba2019optuna")


def dataset_key(dataset: Dataset) -> str | None:
    """Of a data set that is known by its name; None: it is not."""
    if dataset.builtin is not None:
        return dataset.builtin
    names = [dataset.name_or_path or "", *(Path(file).name for file in dataset.train_files or ())]
    keys = (key for part, key in _OF_DATA.items() if any(part in name.lower() for name in names))
    return next(keys, None)


def bibliography(config: StudyConfig, *, learned: bool) -> str:
    """The BibTeX file: what the text cites, so that a replay, which trains nothing, has no tools of training.

    `learned`: what each parameter does is known.
    """
    wanted: set[str | None] = {"carbonopt", "akiba2019optuna", "courty2024codecarbon", sampler_key(config)}
    if config.workload is not None:
        wanted |= {*_OF_TRAINING, dataset_key(config.workload.dataset)}
    if learned:
        wanted.add("pedregosa2011scikit")
    entries = "\n\n".join(entry for key, entry in _ENTRIES.items() if key in wanted)
    return entries.replace("VERSION", __version__) + "\n"
