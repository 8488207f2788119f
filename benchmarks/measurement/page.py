"""Writes reports/measurement.md from the results of the benchmarks beside this file.

    python benchmarks/measurement/page.py [FOLDER OF RESULTS]

The folder (default: reports/measurement) holds what windows.py, closure.py, repeats.py, overhead.py
and neighbours.py wrote, and edges-*.json, taken from the reports of studies on a GPU; a table is
made of each that is there. All numbers come from those files.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from carbonopt.core.units import joules_from_kwh

REPORTS = Path(__file__).parent.parent.parent / "reports"
PHASES = ("setup", "train", "eval")

Result = dict


def main(folder: Path) -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    parts = ["# How well the energy is measured", INTRODUCTION, _machines(results)]
    sections: tuple[tuple[str, Callable[[dict[str, Result]], str]], ...] = (
        ("windows", _windows),
        ("closure", _closure),
        ("repeats", _repeats),
        ("edges", _edges),
        ("overhead", _overhead),
        ("neighbours", _neighbours),
    )
    for name, section in sections:
        section_results = {
            stem: result for stem, result in results.items() if stem.startswith(name)
        }
        if section_results:
            parts.append(section(section_results))
    (REPORTS / "measurement.md").write_text("\n\n".join(parts) + "\n")


INTRODUCTION = """\
This page shows how exact carbonopt's energy figures are, and what measuring costs. It is made by
`benchmarks/measurement/page.py` from the results in [measurement/](measurement/). Each section names the benchmark that
measured it. GPU energy is that of the GPUs' own counters (NVML). CodeCarbon reads the same counters by itself, at the
same windows' edges, a few milliseconds later: it checks the reading, not the sensor. Whether the counters themselves
are right can't be told from inside the machine. ± is one standard deviation unless it says otherwise."""


def _machines(results: dict[str, Result]) -> str:
    lines = set()
    for result in results.values():
        hardware = result["hardware"]
        gpus = f"{len(hardware['gpus'])} × {hardware['gpus'][0]}" if hardware["gpus"] else "no GPU"
        driver = f", driver {hardware['driver']}" if hardware["driver"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines.add(f"- {gpus}{driver}; {hardware['cpu']}, {hardware['cpu_cores']} cores; {versions}")
    return "Measured on:\n\n" + "\n".join(sorted(lines))


def _windows(results: dict[str, Result]) -> str:
    rows, idle = [], []
    for result in results.values():
        gpus = len(result["hardware"]["gpus"])
        for window_s in sorted({window["window_s"] for window in result["windows"]}):
            windows = [window for window in result["windows"] if window["window_s"] == window_s]
            differences = [
                100 * (window["codecarbon"] / window["counter"] - 1) for window in windows
            ]
            rows.append(
                [
                    gpus,
                    f"{window_s:g}",
                    len(windows),
                    f"{statistics.fmean(window['counter'] for window in windows) / 1000:.3f}",
                    f"{statistics.fmean(window['codecarbon'] for window in windows) / 1000:.3f}",
                    f"{min(differences):+.2f} to {max(differences):+.2f}",
                    (
                        f"{100 * statistics.fmean(reading['uncertainty'] / reading['counter'] for reading in windows):.2f}"
                    ),
                ]
            )
        idle += [
            [
                gpus,
                idle_power["gpu"],
                f"{idle_power['power_w']:.1f} ± {idle_power['spread_w']:.1f}",
                idle_power["windows"],
                f"{idle_power['tick_s']:.3f}",
            ]
            for idle_power in result["idle"]
        ]
    return "\n\n".join(
        [
            "## Two readings of the same windows",
            "`windows.py`: full load (matrix products), the device synchronised at both ends.",
            _table(
                ["GPUs", "Window (s)", "Windows", "Counter (kJ)", "CodeCarbon (kJ)", "Difference (%)",
                 "Counter's ticks (± %)"],
                rows,
            ),
            "Where the readings differ, a counter ticked between them; where none did, they agree to the joule. The "
            "last column is what the counter's own ticks leave open at full power: tick × power ÷ √6 of a window's "
            "energy. Here it is an upper bound, since the GPUs stand still at a window's edge.",
            "Idle, before the load and with no CUDA context:",
            _table(["GPUs", "GPU", "Idle power (W)", "Windows of 1 s", "Counter's tick (s)"], idle),
        ]
    )  # fmt: skip


def _closure(results: dict[str, Result]) -> str:
    parts = [
        "## Do the parts add up to the whole?",
        (
            "`closure.py`: a study of ten trials (a GPT-2 of 300 million parameters; the same"
            " command that users run), two of which can't fit in the memory, and one killed from"
            " outside (SIGKILL to its ranks)."
        ),
    ]
    for result in results.values():
        footprint, (session,) = result["footprint"], result["sessions"]
        gpus = len(result["hardware"]["gpus"])
        rows = [
            [
                trial["trial"],
                trial["state"] + (f" ({trial['stop_reason']})" if trial["stop_reason"] else ""),
                trial["failure"] or "",
                *(
                    f"{joules_from_kwh(trial['gpu_energy_kwh'][phase]['counter']):,.0f}"
                    for phase in PHASES
                ),
                f"{_differs(trial):+.2f}",
            ]
            for trial in result["trials"]
        ]
        labels = [
            "Trial",
            "State",
            "Failure",
            *(f"GPU, {phase} (J)" for phase in PHASES),
            "CodeCarbon, whole trial (%)",
        ]
        trials_kwh = sum(
            trial["gpu_energy_kwh"][phase]["counter"]
            for trial in result["trials"]
            for phase in PHASES
        )
        sums = [
            ["trials", f"{joules_from_kwh(trials_kwh):,.0f}"],
            ["preparation", f"{joules_from_kwh(session['prepare_gpu_kwh']):,.0f}"],
            ["between trials", f"{joules_from_kwh(session['gap_gpu_kwh']):,.0f}"],
            ["**sum of the parts**", f"{joules_from_kwh(footprint['gpu_kwh']):,.0f}"],
            ["one outer reading", f"{joules_from_kwh(footprint['outer_gpu_kwh']):,.0f}"],
            ["**parts ÷ outer, GPUs**", f"{footprint['gpu_closure']:.5f}"],
            ["parts ÷ outer, with CPU and RAM (modelled)", f"{footprint['closure']:.5f}"],
        ]
        parts += [
            f"On {_count(gpus)}:",
            _table(labels, rows),
            _table(["Energy of the GPUs", "J"], sums),
        ]
    parts.append(
        "Every window begins where the last one ended, and the outer reading is of the same"
        " counters: this checks the book-keeping, that no window was lost or counted twice, through"
        " kills and failures too. The two may differ by a tick of each counter (0.1 s at its power)"
        " at the study's end: a window that ends between two ticks is given what was used until"
        " then. What is used while the meter sets itself up, before the first window, is in"
        " neither."
    )
    return "\n\n".join(parts)


def _differs(trial: Result, phases: tuple[str, ...] = PHASES) -> float:
    """CodeCarbon's reading ÷ the counters' − 1 over these phases of a trial together, in percent."""
    codecarbon, counter = (
        sum(trial["gpu_energy_kwh"][phase][reading] for phase in phases)
        for reading in ("codecarbon", "counter")
    )
    return 100 * (codecarbon / counter - 1)


def _repeats(results: dict[str, Result]) -> str:
    parts = [
        "## One configuration, over and over",
        (
            "`repeats.py`: nanoGPT's character model, 300 steps of batch 128, each time in fresh"
            " processes and with another seed."
        ),
    ]
    for result in results.values():
        trials = result["trials"]
        quantities: dict[str, list[float]] = {
            "training, GPU (J)": [
                joules_from_kwh(trial["gpu_energy_kwh"]["train"]["counter"]) for trial in trials
            ],
            "training, GPU net of idle (J)": [
                joules_from_kwh(
                    trial["gpu_energy_kwh"]["train"]["counter"]
                    - trial["gpu_energy_kwh"]["train"]["idle"]
                )
                for trial in trials
            ],
            "training, CPU and RAM, modelled (J)": [
                joules_from_kwh(trial["energy_kwh"]["train_cpu"] + trial["energy_kwh"]["train_ram"])
                for trial in trials
            ],
            "training, all of it (J)": [
                joules_from_kwh(trial["energy_kwh"]["train"]) for trial in trials
            ],
            "training (s)": [trial["duration_s"]["train"] for trial in trials],
            "set-up, GPU (J)": [
                joules_from_kwh(trial["gpu_energy_kwh"]["setup"]["counter"]) for trial in trials
            ],
            "perplexity": [trial["quality"]["value"] for trial in trials],
        }
        rows = [
            [
                name,
                f"{statistics.fmean(values):,.5g}",
                f"{100 * statistics.stdev(values) / statistics.fmean(values):.1f}",
                f"{min(values):,.5g} to {max(values):,.5g}",
            ]
            for name, values in quantities.items()
        ]
        ticks = statistics.fmean(
            trial["gpu_energy_kwh"]["train"]["uncertainty"]
            / trial["gpu_energy_kwh"]["train"]["counter"]
            for trial in trials
        )
        parts += [
            f"On {_count(len(result['hardware']['gpus']))}, {len(trials)} times:",
            _table(["Quantity", "Mean", "± (%)", "Range"], rows),
            (
                f"The counter's ticks leave ± {100 * ticks:.1f} % open on the training's eight"
                " windows of a run: less than the runs differ by."
            ),
            _by_phase(trials),
        ]
    parts.append(
        "CodeCarbon does not measure again so soon after it last did, so that the energy of a short"
        " evaluation falls into the training beside it, and that of the first moments of training"
        " into the set-up. That is why the counters' own windows are the ones that are used. Over"
        " whole trials the two agree."
    )
    return "\n\n".join(parts)


def _by_phase(trials: list[Result]) -> str:
    rows = [
        [name, f"{statistics.fmean(values):+.2f}", f"{min(values):+.2f} to {max(values):+.2f}"]
        for name, phases in (*((phase, (phase,)) for phase in PHASES), ("whole trial", PHASES))
        for values in ([_differs(trial, phases) for trial in trials],)
    ]
    return _table(["Phase", "CodeCarbon differs, mean (%)", "Range (%)"], rows)


def _edges(results: dict[str, Result]) -> str:
    rows = []
    for result in results.values():
        ratios, spreads = [], []
        for configuration in result["configurations"]:
            one_j = configuration["one_j"]
            ratios.append(configuration["many_j"] / statistics.fmean(one_j))
            if len(one_j) >= 5:
                spreads.append(100 * statistics.stdev(one_j) / statistics.fmean(one_j))
        rows.append(
            [
                result["edges"],
                len(ratios),
                _range([c["training_s"] for c in result["configurations"]], 1),
                f"{statistics.fmean(ratios):.3f} ({_range(ratios, 3)})",
                _range(spreads, 1),
            ]
        )
    return f"""\
## Trainings between evaluations

From studies/shakespeare-char.yaml on an H200, run three times: trainings that were interrupted by {result["evaluations"]} evaluations, and the same configurations with other seeds and one evaluation, at the end. Evaluations are no part of the training, so that its energy should be the same.

{_table(["A window's edge", "Configurations", "Training (s)", f"GPU energy, {result['evaluations']} evaluations ÷ 1", "± of five runs with 1 (%)"], rows)}

A counter's last tick is half a tick old on average. As read, 0.05 s of the training's power before each evaluation counted as the evaluation's, and those of the evaluation as the training's. In a simulation of this counter with trainings of 0.5 s at 600 W between evaluations of 0.12 s at 250 W, the training was 11 % too low as read, and 0.2 to 0.7 % too high with the time since the last tick (three runs of each of two versions). What is left here are a few milliseconds before each reading, and the next trial's processes: from half a second of the training on they open the GPU and load kernels, for one to two seconds. With eight evaluations, the first one falls into that time; with one, the training is slower then. Seen by the training process's own clock on 30 November 2026 (H200, batch 16, 6 epochs, Muon; 1,470 steps): after the first step, trainings with eight evaluations took 4.192 and 4.200 s (two runs), those with one 4.303 to 4.313 s (six runs), 2.7 % more; steps 185 to 368 took 2.22 to 2.30 ms to launch instead of 1.92, and the median step was as long in both. Their energy was 1.5 % more (2,042 and 2,058 J, and 2,066 to 2,105 J). So a training of a few seconds has some 0.1 s and 30 J too much; of one of a minute, that is 0.2 % of the time. Whether it goes away without the next trial's processes was not tried.

Up to 29 November 2026, carbonopt counted windows as read, and evaluated repeats as often as other trials. In the same study, runs of one configuration then differed by ± 3.3 and 2.6 % (trainings of 4 s) and 0.5 % (11 s)."""


def _overhead(results: dict[str, Result]) -> str:
    rows = []
    for stem, result in results.items():
        ratios = [100 * ratio for ratio in result["overhead_of_step_time"]]
        more, of_one_dose = "not measured", "not measured"
        if len(ratios) > 1:
            mean, error = statistics.fmean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
            more = f"{mean:+.2f} ± {error:.2f}"
            dose = result["dose"]
            of_one_dose = f"{mean / dose:+.3f} ± {error / dose:.3f}" if dose else "(control)"
        rows.append(
            [
                stem.removeprefix("overhead-"),
                len(result["hardware"]["gpus"]) or "CPU",
                f"{result['dose']:g}",
                f"{result['step_ms']:.1f}",
                len(ratios),
                more,
                of_one_dose,
                f"{sum(result['waits_ms']):.1f} in {len(result['waits_ms'])}",
                f"{max(result['waits_ms']):.1f}",
            ]
        )
    return "\n\n".join(
        [
            "## What measuring costs",
            "`overhead.py`: what a trial of eight evaluations waits for the study's answers, at its 16 phase changes "
            "and 8 evaluations; and blocks of steps with the study running and measuring, against blocks of the same "
            "run with the study stopped. ± is the standard error of the mean over the pairs of blocks. A dose of 10 "
            "reads the meters ten times as often as a study does: a tenth of its effect is a study's, and a tenth of "
            "its error. A dose of 0 never stops the study: the benchmark's own error.",
            _table(
                ["Run", "GPUs", "Dose", "Step (ms)", "Pairs", "Step time, more (%)", "Of dose 1 (%)",
                 "Waits of a trial (ms)", "Longest (ms)"],
                rows,
            ),
        ]
    )  # fmt: skip


def _neighbours(results: dict[str, Result]) -> str:
    parts = [
        "## Beside other work",
        (
            "`neighbours.py`: the first demo (`make demo`) on the CPU beside none, one and two"
            " processes that are busy all the time."
        ),
        (
            "The cores are those of a virtual machine, whose host has other guests. The recommended"
            " configuration's figures are means of its three seeds; the baseline ran once."
        ),
    ]
    for result in results.values():
        runs = sorted(result["runs"], key=lambda run: (run["busy"], run["number"]))
        by_busy = {
            busy: [run for run in runs if run["busy"] == busy]
            for busy in sorted({run["busy"] for run in runs})
        }
        rows = [_beside(busy, beside, by_busy[min(by_busy)]) for busy, beside in by_busy.items()]
        labels = [
            "Busy processes",
            "Runs",
            "Time (s)",
            "Recommendations",
            "Saving (%)",
            "Mean saving (%)",
            "Baseline's training (J)",
            "Recommended training (J)",
            "Stopped as too costly",
            "of which cheaper alone",
            "Parts ÷ outer",
        ]
        each = [
            [
                run["busy"],
                run["number"] + 1,
                _named(run["params"]),
                f"{100 * run['saving_fraction']:.1f}",
            ]
            for run in runs
            if run["met"]
        ]
        parts += [
            f"On {result['hardware']['cpu_cores']} cores of {result['hardware']['cpu']}"
            f" ({result['study']}):",
            _table(labels, rows),
            _table(["Busy processes", "Run", "Recommended", "Saving (%)"], each),
        ]
    parts.append(
        "The runs on the Intel Xeon are of 2026-11-29. Short programs ran beside some of them."
        " Fifteen earlier runs of that day had the same recommendation, too, and saved 82.1 to"
        " 87.4, 79.4 to 85.6 and 79.1 to 86.3 % beside none, one and two busy processes. The day"
        " before, five runs beside no busy process saved 85.3, 82.8, 82.6, 72.7 (by another"
        " recommendation) and 62.0 %. The likely cause, which other runs of the same configuration"
        " showed: threads that had waited for a core once slept sooner to the trial's end, which"
        " took up to seven times the energy"
        " ([measured](performance.md#tokens-a-second-on-two-cpu-cores)). They now look for work"
        " again as soon as nobody else wants the cores. One more run after that recommended another"
        " configuration for 80.5 %: the cheapest one had been stopped after seven steps, by what"
        " they took. The cap now projects nothing from less than two seconds."
    )
    parts.append(
        "An earlier version repeated the 15 runs on the AMD EPYC beside light work: the same"
        " recommendation in all 15; mean savings of 83.8, 82.8 and 83.1 % beside none, one and two"
        " busy processes (single runs 81.5 to 87.2, 81.3 to 84.5 and 78.3 to 85.4); of the 81"
        " trials stopped as too costly, none of the 21 whose settings also ran alone to their end"
        " would have been cheaper than the recommendation."
    )
    parts.append(
        "Ranges are from the lowest to the highest. A trial that was stopped as too costly counts"
        " as cheaper alone if, by what a step of its batch, optimizer and ZeRO settings took where"
        " nothing else ran, its training would have taken less there than that of the"
        " recommendation; in brackets, for how many no run alone tells it."
    )
    return "\n\n".join(parts)


def _beside(busy: int, runs: list[Result], alone: list[Result]) -> list:
    met = [run for run in runs if run["met"]]
    savings = [100 * run["saving_fraction"] for run in met]
    capped = [trial for run in runs for trial in run["trials"] if trial["stop_reason"] == "cap"]
    step_j = _step_joules(alone)
    recommended_j = statistics.fmean(
        joules_from_kwh(run["energy_kwh"]) for run in alone if run["met"]
    )
    known = [trial for trial in capped if _system(trial) in step_j]
    cheaper = [
        trial for trial in known if step_j[_system(trial)] * trial["total_steps"] < recommended_j
    ]
    return [
        busy,
        len(runs),
        _range([run["seconds"] for run in runs], 0),
        "; ".join(sorted({_named(run["params"]) for run in met}))
        + ("" if len(met) == len(runs) else "; not all met"),
        _range(savings, 1),
        f"{statistics.fmean(savings):.1f}",
        _range([joules_from_kwh(run["trials"][0]["energy_kwh"]["train"]) for run in runs], 0),
        _range([joules_from_kwh(run["energy_kwh"]) for run in met], 1),
        len(capped),
        f"{len(cheaper)} ({len(capped) - len(known)})",
        _range([run["closure"] for run in runs], 5),
    ]


def _step_joules(runs: list[Result]) -> dict[tuple, float]:
    """By what decides the energy of a step: its mean over the trials of these runs that made twenty
    and more.
    """
    steps: dict[tuple, list[float]] = {}
    for trial in (
        trial for run in runs for trial in run["trials"] if (trial["steps_done"] or 0) >= 20
    ):
        joules = joules_from_kwh(trial["energy_kwh"]["train"]) / trial["steps_done"]
        steps.setdefault(_system(trial), []).append(joules)
    return {system: statistics.fmean(joules) for system, joules in steps.items()}


def _system(trial: Result) -> tuple:
    names = ("global_batch_size", "micro_batch_size_per_gpu", "optimizer", "zero_stage", "offload")
    return tuple(trial["params"][name] for name in names)


def _named(params: Result) -> str:
    micro = params["micro_batch_size_per_gpu"]
    batch = f"batch {params['global_batch_size']} (micro {micro})"
    rest = (
        f"lr {params['learning_rate']:g}, {params['epochs']:g} epochs, ZeRO {params['zero_stage']}"
    )
    return f"{batch}, {rest}, {params['optimizer']}"


def _range(values: list[float], decimals: int) -> str:
    low, high = (f"{value:.{decimals}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _count(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"{gpus} GPUs" if gpus else "the CPU"


def _table(labels: list[str], rows: list[list]) -> str:
    lines = [labels, ["---"] * len(labels), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPORTS / "measurement")
