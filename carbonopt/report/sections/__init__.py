"""The sections of the report, in their order: a file each, and its name here. `section` of a file is what it shows,
None where the study has nothing of it, and `caveats` is what it warns of; it may have one of them alone."""

from importlib import import_module

SECTIONS = (
    *("shortfall", "contention"),  # caveats alone
    *("front", "policy", "comparison", "confirmation", "predictions", "citation"),  # the answer
    *("space", "influence", "batch", "scaling", "memory", "returns"),  # what decides it
    *("energy", "stages", "probes", "longer_runs", "elsewhere"),  # what was used
    *("trials", "provenance"),
)
MODULES = tuple(import_module(f"{__name__}.{name}") for name in SECTIONS)
