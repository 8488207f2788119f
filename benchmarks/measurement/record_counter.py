"""Records how a GPU's energy counter moves, for tests that replay it where there is no GPU.

    python benchmarks/measurement/record_counter.py FILE.csv [GPU_INDEX ...]

Puts known loads on the GPUs (idle; long loads; short bursts), reads NVML's energy counter as fast
as it answers, and writes each change of it: seconds since the start, GPU index, millijoules since
the start. On standard output: the load's timetable, the counter's ticks and what one reading costs.
"""

import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path

import pynvml
import torch

FIRST_IDLE_S, IDLE_S, LOAD_S, BURSTS, BURST_S, PAUSE_S = 20.0, 4.0, 6.0, 8, 0.35, 0.25


def main(target: Path, indices: list[int]) -> None:
    pynvml.nvmlInit()
    handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
    began = time.perf_counter()
    start_mj = {
        index: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        for index, handle in handles.items()
    }
    rows: list[tuple[float, int, int]] = [(0.0, index, 0) for index in indices]
    costs_s: list[float] = []
    done = threading.Event()

    def watch() -> None:
        last = dict.fromkeys(indices, 0)
        while not done.is_set():
            for index, handle in handles.items():
                before = time.perf_counter()
                energy_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - start_mj[index]
                after = time.perf_counter()
                costs_s.append(after - before)
                if energy_mj != last[index]:
                    last[index] = energy_mj
                    rows.append((after - began, index, energy_mj))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    timetable: list[tuple[float, str]] = []

    def note(what: str) -> None:
        timetable.append((round(time.perf_counter() - began, 3), what))

    note("idle, no CUDA context")
    time.sleep(FIRST_IDLE_S)
    note("CUDA starts")
    matrices = {
        index: torch.randn(8192, 8192, device=f"cuda:{index}", dtype=torch.bfloat16)
        for index in indices
    }

    def load(duration_s: float, loaded: list[int]) -> None:
        until = time.perf_counter() + duration_s
        while time.perf_counter() < until:
            for _ in range(20):
                for index in loaded:
                    matrices[index] @ matrices[index]
            for index in loaded:
                torch.cuda.synchronize(index)

    load(0.1, indices)
    note("idle, with a CUDA context")
    time.sleep(IDLE_S)
    note("load on the first")
    load(LOAD_S, indices[:1])
    note("load on all")
    load(LOAD_S, indices)
    note("idle")
    time.sleep(IDLE_S)
    for _ in range(BURSTS):
        note("burst on the last")
        load(BURST_S, indices[-1:])
        note("pause")
        time.sleep(PAUSE_S)
    note("idle")
    time.sleep(IDLE_S)
    note("end")
    done.set()
    watcher.join()
    target.write_text(
        "seconds,gpu,energy_mj\n" + "".join(f"{t:.4f},{index},{mj}\n" for t, index, mj in rows)
    )
    first = [t for t, index, _ in rows if index == indices[0]]
    ticks_s = [b - a for a, b in itertools.pairwise(first[1:])]
    print(
        json.dumps(
            {
                "gpus": [pynvml.nvmlDeviceGetName(handle) for handle in handles.values()],
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "timetable": timetable,
                "tick_s": {
                    "median": statistics.median(ticks_s),
                    "max": max(ticks_s),
                    "min": min(ticks_s),
                },
                "reading_ms": {
                    "median": 1000 * statistics.median(costs_s),
                    "max": 1000 * max(costs_s),
                },
                "readings": len(costs_s),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(index) for index in sys.argv[2:]] or [0])
