"""EnergyWindows of 2, 10 and 60 s under full load: the GPUs' counters against CodeCarbon's reading
of the same windows.

python benchmarks/measurement/windows.py OUT.json [--gpus 0 1]
"""

import time

import common
import torch

from carbonopt.core.trial import Phase
from carbonopt.core.units import joules_from_kwh
from carbonopt.energy.machine_meter import MachineMeter

REPEATS = {2.0: 5, 10.0: 2, 60.0: 1}  # by seconds of a window


def main() -> None:
    options = common.arguments(__doc__).parse_args()
    meter = MachineMeter(options.gpus)
    # CUDA numbers GPUs as NVML does where their order is that of the bus; here all of them are
    # used.
    matrices = [
        torch.randn(8192, 8192, device=f"cuda:{index}", dtype=torch.bfloat16)
        for index in options.gpus
    ]

    def work(duration_s: float) -> None:
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            for _ in range(20):
                for matrix in matrices:
                    matrix @ matrix
            for index in options.gpus:
                torch.cuda.synchronize(index)

    work(3.0)  # up to its clocks
    windows = []
    for window_s, repeats in REPEATS.items():
        for _ in range(repeats):
            meter.enter(Phase.TRAIN)
            work(window_s)
            meter.enter(Phase.GAP)
            reading = meter.take(Phase.TRAIN)[Phase.TRAIN]
            assert reading.gpu is not None
            in_joules = {
                name: joules_from_kwh(kwh) for name, kwh in reading.gpu.model_dump().items()
            }
            windows.append({"window_s": window_s, "duration_s": reading.duration_s, **in_joules})
            time.sleep(1.0)
    meter.close()
    common.write(
        options.out,
        options.gpus,
        {"idle": [idle_power.model_dump() for idle_power in meter.idle], "windows": windows},
    )


if __name__ == "__main__":
    main()
