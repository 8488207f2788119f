"""CodeCarbon's running totals: the CPU's and RAM's energy, and a second reading of the GPUs'.

Its own tasks are not used: `flush()` fails while one is open, so a running window could not be read, and what is used
between two tasks is in neither. EnergyTotals read at the windows' edges lose nothing.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from carbonopt.core.errors import MeasurementError
from carbonopt.core.values import Frozen

# CodeCarbon measures anew only this long after it last did.
FRESH_AFTER_S = 0.05

# Every argument that CodeCarbon would otherwise take from CODECARBON_* variables or a .codecarbon.config file in the
# home or working directory, where a stray `pue=1.5` changes each figure. PUE and carbon intensity are applied by us:
# at 1,000 g/kWh its emissions in kg are its energy in kWh.
_SETTINGS: dict[str, Any] = {
    "allow_multiple_runs": True,
    "api_call_interval": -1,  # never
    "api_endpoint": "",
    "api_key": "",
    "cloud_provider": None,
    "cloud_region": None,
    "country_2letter_iso_code": None,
    "country_iso_code": "USA",  # it wants one; not used at a forced intensity
    "electricitymaps_api_token": "",  # with None it would look for the token's older name, and with a token go online
    "emissions_endpoint": None,
    "experiment_id": "carbonopt",
    "experiment_name": "carbonopt",
    "force_carbon_intensity_g_co2e_kwh": 1000.0,
    "force_cpu_power": None,
    "force_mode_cpu_load": False,
    "force_ram_power": None,
    "log_level": "warning",
    "logger_preamble": "",
    "logging_logger": None,
    # Never by its own timer, which would race with our readings in another thread and count an interval twice. CPU
    # load is sampled every second all the same.
    "measure_power_secs": 1e9,
    "metadata": None,
    "on_csv_write": "append",
    "output_file": "",
    "output_methods": [],
    "project_name": "carbonopt",
    "prometheus_url": "",
    "pue": 1.0,
    "rapl_include_dram": False,
    "rapl_prefer_psys": False,
    "region": None,
    "tracking_mode": "machine",
    "wue": 0.0,
}


class _Complaints(logging.Filter):
    """Keeps what CodeCarbon complains of for our own error's text, and lets nothing through to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self._cause = ""
        self._latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self._latest = record.getMessage()
            if record.exc_info and not self._cause:  # the first exception caused those that follow
                self._cause = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return False

    @property
    def heard(self) -> bool:
        return bool(self._cause or self._latest)

    def __str__(self) -> str:
        return self._cause or self._latest or "nothing"


def _hush_codecarbon() -> _Complaints:
    # A filter, and before the first import: importing and constructing log at INFO whatever log_level says later.
    logger = logging.getLogger("codecarbon")
    for known in logger.filters:
        if isinstance(known, _Complaints):
            return known
    complaints = _Complaints()
    logger.addFilter(complaints)
    return complaints


class EnergyTotals(Frozen):
    """Energy in kWh since the start."""

    gpu_kwh: float | None  # None: no GPU is measured
    cpu_kwh: float
    ram_kwh: float


class CodeCarbonTotals:
    """One CodeCarbon tracker for the GPUs of these NVML indices, all CPUs and RAM, started and warm.

    Takes one to three seconds to set up.

    Raises:
        MeasurementError: if CodeCarbon can't measure here.
    """

    def __init__(self, gpu_indices: Sequence[int]) -> None:
        if gpu_indices and shutil.which("nvidia-smi") is None:
            raise MeasurementError(
                "nvidia-smi must be on PATH, but is not: without it CodeCarbon takes every GPU for absent and its "
                "energy for 0. Add its folder to PATH (often /usr/bin, in WSL /usr/lib/wsl/lib)."
            )
        self._complaints = _hush_codecarbon()

        from codecarbon import OfflineEmissionsTracker
        from codecarbon.output_methods.base_output import BaseOutput
        from codecarbon.output_methods.emissions_data import EmissionsData

        class Latest(BaseOutput):
            """What `flush()` hands to its outputs: the only public way to a running total by component."""

            total: EmissionsData | None = None

            def out(self, total: EmissionsData, delta: EmissionsData) -> None:
                self.total = total

        self._has_gpus = bool(gpu_indices)
        self._latest = Latest()
        self._complaints.forget()
        self._tracker = OfflineEmissionsTracker(
            **_SETTINGS,
            gpu_ids=list(gpu_indices),
            output_dir=tempfile.gettempdir(),  # must exist; nothing is written
            output_handlers=[self._latest],
        )
        self._tracker.start()
        try:
            self.read()  # the first reading imports more and takes 60 ms
        except MeasurementError:
            self.close()
            raise
        time.sleep(FRESH_AFTER_S)  # so that the first window doesn't begin with energy from before it

    def read(self) -> EnergyTotals:
        """Energy since the start; readings less than FRESH_AFTER_S apart give the same.

        Raises:
            MeasurementError: CodeCarbon's methods swallow every exception, so silence is the only sign of one.
        """
        self._latest.total = None
        self._tracker.flush()
        data = self._latest.total
        if data is None:
            raise MeasurementError(
                f"CodeCarbon must give an energy reading, but gave none; it said: {self._complaints}"
            )
        self._complaints.forget()
        return EnergyTotals(
            # On a machine with GPUs CodeCarbon counts them all when asked for none.
            gpu_kwh=data.gpu_energy if self._has_gpus else None,
            cpu_kwh=data.cpu_energy,
            ram_kwh=data.ram_energy,
        )

    def close(self) -> None:
        self._tracker.stop()


def has_rapl() -> bool:
    """Whether the CPU counts its own energy and we may read it: the test by which CodeCarbon chooses, on Linux."""
    from codecarbon.core.cpu import is_rapl_available

    return bool(is_rapl_available())


def power_models() -> dict[str, str]:
    """How CodeCarbon models what it can't measure here, by component (cpu, ram), in words for people."""
    complaints = _hush_codecarbon()

    from codecarbon.core.cpu import TDP
    from codecarbon.external.ram import RAM

    models = {"ram": f"{RAM(tracking_mode='machine').total_power().W:.0f} W by its size, whatever is done with it"}
    if not has_rapl():
        complaints.forget()
        cpu = TDP()  # type: ignore[no-untyped-call]
        full_w = f"{cpu.tdp:.0f} W at full load and a tenth of it idle"
        # It says so in a warning alone, which nobody would see.
        guess = ", a guess of 4 W a thread, because CodeCarbon's table lacks this CPU" if complaints.heard else ""
        models["cpu"] = f"{full_w}{guess}"
        complaints.forget()
    return models
