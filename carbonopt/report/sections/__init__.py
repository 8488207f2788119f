"""The sections of the report, in their order.

Each section is a file whose name stands in `SECTIONS`. The file's function `section` returns what
it shows, or None where the study has nothing to show there; its function `caveats` yields its
warnings. A file may have only one of the two.
"""

from importlib import import_module

SECTIONS = (
    *("shortfall", "contention", "trial_conduct"),  # these have caveats alone
    *("front", "policy", "comparison", "confirmation", "predictions", "citation"),  # the answer
    *("space", "influence", "batch", "scaling", "memory", "returns"),  # what decides it
    *("energy", "stages", "probes", "longer_runs", "elsewhere"),  # the energy that was used
    *("trials", "provenance"),
)
MODULES = tuple(import_module(f"{__name__}.{name}_section") for name in SECTIONS)
