"""CodeCarbon's running totals: the energy of CPU and RAM, and a second reading of the GPUs' energy.

CodeCarbon's own tasks are not used: `flush()` fails while one is open, so a running window could
not be read, and energy used between two tasks is in neither. Totals read at the windows' edges lose
nothing.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from carbonopt.core.errors import MeasurementError
from carbonopt.core.trial import READINGS_APART_S
from carbonopt.energy.hardware import cpu_model
from carbonopt.energy.host_attribution import IDLE, Powers

if TYPE_CHECKING:
    from codecarbon.output_methods.emissions_data import EmissionsData

# All arguments that CodeCarbon would otherwise take from CODECARBON_* variables or a
# .codecarbon.config file in the home or working directory, where a stray `pue=1.5` changes each
# figure. We apply PUE and carbon intensity: at 1,000 g/kWh, CodeCarbon's emissions in kg are its
# energy in kWh.
_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        ("cloud_provider", "cloud_region", "country_2letter_iso_code", "emissions_endpoint"), None
    ),
    **dict.fromkeys(
        ("force_cpu_power", "force_ram_power", "logging_logger", "metadata", "region"), None
    ),
    **dict.fromkeys(
        ("api_endpoint", "api_key", "logger_preamble", "output_file", "prometheus_url"), ""
    ),
    **dict.fromkeys(("force_mode_cpu_load", "rapl_include_dram", "rapl_prefer_psys"), False),
    **dict.fromkeys(("experiment_id", "experiment_name", "project_name"), "carbonopt"),
    "allow_multiple_runs": True,
    "api_call_interval": -1,  # never
    "country_iso_code": "USA",  # required, but not used with a forced intensity
    # With None, CodeCarbon would look for the token's older name, and with a token go online.
    "electricitymaps_api_token": "",
    "force_carbon_intensity_g_co2e_kwh": 1000.0,
    "log_level": "warning",
    # CodeCarbon's own timer must never measure: it would race with our readings from another thread
    # and count an interval twice. CPU load is sampled every second all the same.
    "measure_power_secs": 1e9,
    "on_csv_write": "append",
    "output_methods": [],
    "pue": 1.0,
    "tracking_mode": "machine",
    "wue": 0.0,
}


class _Complaints(logging.Filter):
    """A log filter that keeps CodeCarbon's complaints for our error messages.

    It lets nothing through to the terminal.
    """

    cause = latest = ""

    def forget(self) -> None:
        self.cause = self.latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.latest = record.getMessage()
            if record.exc_info and not self.cause:  # the first exception caused those that follow
                self.cause = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return False


_COMPLAINTS = _Complaints()
# The filter is set before the first import, since importing and constructing a tracker log at INFO,
# whatever `log_level` says later.
logging.getLogger("codecarbon").addFilter(_COMPLAINTS)


class CodeCarbonTotals:
    """A started CodeCarbon tracker for the GPUs of these NVML indices, all CPUs and the RAM.

    Starting takes one to three seconds. Raises MeasurementError if CodeCarbon can't measure here.
    """

    def __init__(self, gpu_indices: Sequence[int]) -> None:
        if gpu_indices and shutil.which("nvidia-smi") is None:
            why = "without it CodeCarbon takes every GPU for absent and its energy for 0"
            advice = "Add its folder to PATH (often /usr/bin, in WSL /usr/lib/wsl/lib)"
            raise MeasurementError(f"nvidia-smi must be on PATH, but is not: {why}. {advice}.")
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.output_methods.base_output import BaseOutput
        from codecarbon.output_methods.emissions_data import EmissionsData

        class Latest(BaseOutput):
            """An output of CodeCarbon that keeps the latest total that `flush()` gives it.

            This is the only public way to a running total by component.
            """

            total: EmissionsData | None = None

            def out(self, total: EmissionsData, delta: EmissionsData) -> None:
                self.total = total

        _leave_slurm_out()
        _tell_cpu_model()
        self._latest = Latest()
        _COMPLAINTS.forget()
        self._tracker = OfflineEmissionsTracker(
            **_SETTINGS,
            gpu_ids=list(gpu_indices),
            output_dir=tempfile.gettempdir(),  # must exist, though nothing is written
            output_handlers=[self._latest],
        )
        self._tracker.start()
        try:
            self.read()  # the first reading imports more and takes 60 ms
        except MeasurementError:
            self.close()
            raise
        # After this pause the first window doesn't begin with energy from before it.
        time.sleep(READINGS_APART_S)

    def read(self) -> "EmissionsData":
        """Return the energy since the start, in kWh.

        Readings less than READINGS_APART_S apart give the same. CodeCarbon's methods swallow every
        exception, and a missing reading is the only sign of one: it raises MeasurementError.
        """
        self._latest.total = None
        self._tracker.flush()
        if (total := self._latest.total) is None:
            said = _COMPLAINTS.cause or _COMPLAINTS.latest or "nothing"
            raise MeasurementError(
                f"CodeCarbon must give an energy reading, but gave none; it said: {said}"
            )
        _COMPLAINTS.forget()
        return total

    def powers(self) -> Powers:
        """Return the powers with which CodeCarbon models the CPU and the RAM."""
        from codecarbon.external.hardware import CPU, MODE_CPU_LOAD
        from codecarbon.external.ram import RAM

        parts = self._tracker._hardware  # no public attribute has it
        ram_w = sum(part.total_power().W for part in parts if isinstance(part, RAM))
        cpu = next(
            (part for part in parts if isinstance(part, CPU) and part._mode == MODE_CPU_LOAD), None
        )
        return Powers(cpu_w=None if cpu is None else float(cpu._tdp), ram_w=ram_w)

    def close(self) -> None:
        self._tracker.stop()


def _leave_slurm_out() -> None:
    """Make CodeCarbon count the whole machine's CPUs and RAM in a Slurm job, too.

    CodeCarbon 3.3 counts the job's CPUs and RAM there, of all its nodes on each of them. Here it
    counts the machine's, of which `carbonopt.energy.host_attribution` takes the study's share.
    """
    from codecarbon.core import util
    from codecarbon.external import ram

    for module in (util, ram):  # each module has its own copy of the variable
        vars(module)["SLURM_JOB_ID"] = None


def _tell_cpu_model() -> None:
    """Give CodeCarbon the CPU's name from Linux, where Linux has it.

    CodeCarbon would ask py-cpuinfo for the name, which takes a second to measure the clock as well.
    It keeps the name.
    """
    if (name := cpu_model()) is None:
        return
    import cpuinfo
    from codecarbon.core.util import detect_cpu_model

    asked = cpuinfo.get_cpu_info
    cpuinfo.get_cpu_info = lambda: {"brand_raw": name}
    try:
        detect_cpu_model()
    finally:
        cpuinfo.get_cpu_info = asked


def has_rapl() -> bool:
    """Return whether the CPU counts its own energy and we may read it.

    This is CodeCarbon's own test on Linux.
    """
    from codecarbon.core.cpu import is_rapl_available

    return bool(is_rapl_available())


def power_models() -> dict[str, str]:
    """Describe how CodeCarbon models the components (cpu, ram) that it can't measure here."""
    from codecarbon.core.cpu import TDP
    from codecarbon.core.util import count_physical_cpus
    from codecarbon.external.ram import RAM

    _leave_slurm_out()
    _tell_cpu_model()
    models = {
        "ram": (
            f"{RAM(tracking_mode='machine').total_power().W:.0f} W by its size, whatever is done"
            " with it; a trial is not charged while other work keeps it waiting"
        )
    }
    if not has_rapl():
        _COMPLAINTS.forget()
        cpu = TDP()  # type: ignore[no-untyped-call]
        full_load_w = cpu.tdp * count_physical_cpus()  # type: ignore[no-untyped-call]
        models["cpu"] = (
            f"{full_load_w:.0f} W at full load, {100 * IDLE:.0f} % of it idle, and what is between"
            " by CPU time"
        )
        if _COMPLAINTS.latest:  # CodeCarbon says so only in a warning, which nobody would see
            models["cpu"] += ", a guess of 4 W a thread, because CodeCarbon's table lacks this CPU"
        _COMPLAINTS.forget()
    return models
