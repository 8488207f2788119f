"""What measuring costs a trial: steps with the study running and measuring, against steps with it
stopped, in turn.

    python benchmarks/measurement/overhead.py OUT.json [--gpus 0 1] [--block 50] [--epochs 100]
        [--dose 1]

A real study of one trial; its process stops the study (SIGSTOP) before every other block of steps,
so that nothing is measured, answered or stored, and lets it go on after. The two kinds of blocks
differ in nothing else. A block counts with the median of its steps, by the GPU's own clock, since
the host of a virtual machine stumbles now and then. What the trial waits for the study's answers,
at its phase changes and evaluations, is timed where it waits.

With --dose 10 the trial reports, and the study reads its meters, ten times as often: an effect too
small to be seen in its natural dose shows there. With --dose 0 the study is never stopped: what
differs then is the benchmark's own error.
"""

import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common

# environment variable: the study's process, steps of a block, file for the timings
PLAN = "OVERHEAD_PLAN"
WARM_UP_STEPS = 20


def trial(spec_file: str) -> int:
    """A trial's rank, with a clock in it."""
    from transformers import TrainerControl

    from carbonopt.train import rank_main, ranks, training_loop
    from carbonopt.train.client import Speaker

    study, block, dose, out = json.loads(os.environ[PLAN])
    timings: dict[str, list] = {"waits_s": [], "measured_s": [], "unmeasured_s": []}

    class TimedSpeaker(Speaker):
        PROGRESS_INTERVAL_S = Speaker.PROGRESS_INTERVAL_S / (dose or 1.0)

        def _answer(self) -> dict:
            began = time.perf_counter()
            answer = super()._answer()
            timings["waits_s"].append(time.perf_counter() - began)
            return answer

    class Blocks(training_loop.TrialCallback):
        measuring = True
        marks: list

        def on_step_end(self, args, state, control: TrainerControl, **kwargs) -> TrainerControl:
            evaluates = state.global_step in self._evaluation_steps
            if evaluates:
                self._go(measuring=True)
            speaker = self._speaker
            if dose and not self.measuring:
                self._speaker = None
            control = super().on_step_end(args, state, control, **kwargs)
            self._speaker = speaker
            if (
                evaluates and speaker is not None
            ):  # each time, since the study ends a trial that says it has finished
                Path(out).write_text(json.dumps(timings))
            if evaluates or state.global_step < WARM_UP_STEPS:
                self.marks = [_mark()]
                return control
            self.marks.append(_mark())
            if len(self.marks) > block:
                kind = "measured_s" if self.measuring else "unmeasured_s"
                timings[kind].append((state.global_step, statistics.median(_steps_s(self.marks))))
                # The study measures again well before an evaluation, whose answer shall not wait
                # for its waking up.
                next_evaluation = min(
                    step for step in self._evaluation_steps if step > state.global_step
                )
                self._go(
                    measuring=not self.measuring or next_evaluation - state.global_step < 2 * block
                )
                self.marks = [_mark()]
            return control

        def _go(self, *, measuring: bool) -> None:
            self.measuring = measuring
            if ranks.rank() == 0:
                os.kill(study, signal.SIGSTOP if dose and not measuring else signal.SIGCONT)
                time.sleep(0.05)  # until it runs or stands

    training_loop.TrialCallback = Blocks
    rank_main.Speaker = TimedSpeaker
    try:
        code = rank_main.main(spec_file)
    finally:
        if ranks.rank() == 0:
            os.kill(study, signal.SIGCONT)
    return code


def _mark():
    """This moment, in the order of the GPU's work; on the CPU simply now."""
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _steps_s(marks: list) -> list[float]:
    if isinstance(marks[0], float):
        return [b - a for a, b in itertools.pairwise(marks)]
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--block", type=int, default=50, help="steps")
    parser.add_argument("--epochs", type=float, default=100.0)
    parser.add_argument("--dose", type=float, default=1.0)
    options = parser.parse_args()

    from carbonopt.core.files import write_json
    from carbonopt.engines import local
    from carbonopt.engines.process.environment import Ranks
    from carbonopt.engines.process.launcher import ProcessLauncher
    from carbonopt.engines.process.processes import WorkProcesses
    from carbonopt.storage.paths import StudyPaths
    from carbonopt.study.run_study import run_study
    from carbonopt.study.session import Session
    from carbonopt.study.trackers import open_trackers
    from carbonopt.study_file.study_checks import check

    class Timed(ProcessLauncher):
        def start(self, spec, log):
            spec_file = Path(spec.trial_dir) / "spec.json"
            write_json(spec_file, spec.model_dump(mode="json"))
            plan = json.dumps([os.getpid(), options.block, options.dose, str(timings_file)])
            argv = [sys.executable, __file__, "--trial", str(spec_file)]
            environment = {**self._environment, PLAN: plan}
            return WorkProcesses(
                argv, Ranks.alone(self._launch.world_size).environments, environment, log
            )

    class Silent:
        def __getattr__(self, name):
            return lambda *_: None

    local.ProcessLauncher = Timed
    config = common.study(options.study, options.gpus)
    space = config.search.space.model_copy(
        update={"epochs": type(config.search.space.epochs)(value=options.epochs)}
    )
    config = config.model_copy(update={"search": config.search.model_copy(update={"space": space})})
    with tempfile.TemporaryDirectory() as folder:
        timings_file = Path(folder) / "timings.json"
        paths = StudyPaths(Path(folder) / "study")
        paths.root.mkdir()
        trackers = open_trackers(config, paths.trackers, print)
        data = run_study(Session(check(config), "", paths, Silent(), trackers, lambda: False))
        if data.records[0].failure is not None:
            sys.exit(data.records[0].failure.text)
        timings = json.loads(timings_file.read_text())
    # Each unmeasured block against the measured ones beside it, so that a drift cancels; by
    # logarithms, since a mean of quotients is too large by the noise of what it divides by.
    measured = dict(timings["measured_s"])
    ratios = [
        math.log(measured[step - options.block] * measured[step + options.block]) / 2
        - math.log(step_s)
        for step, step_s in timings["unmeasured_s"]
        if step - options.block in measured and step + options.block in measured
    ]
    results = {
        "block_steps": options.block,
        "dose": options.dose,
        "step_ms": 1000 * statistics.median(step_s for _, step_s in timings["unmeasured_s"]),
        "overhead_of_step_time": ratios,  # logarithms: 0.001 is 0.1 %
        "waits_ms": [1000 * wait_s for wait_s in timings["waits_s"]],
        "evaluations": len(data.records[0].evals),
    }
    common.write(options.out, options.gpus, results)
    print("overhead of step time, median:", statistics.median(ratios), "pairs:", len(ratios))
    print("waits of the trial, ms:", sum(results["waits_ms"]), len(results["waits_ms"]))


if __name__ == "__main__":
    if sys.argv[1] == "--trial":
        code = trial(sys.argv[2])
        sys.stdout.flush()
        os._exit(code)
    main()
