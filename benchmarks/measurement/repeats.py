"""One configuration over and over, each time with another seed, in a trial's own fresh processes.

python benchmarks/measurement/repeats.py OUT.json [--gpus 0 1] [--repeats 10]
"""

import sys
import tempfile
from pathlib import Path

import common

from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import Phase, TrialSpec
from carbonopt.engines.local import LocalEngine
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.supervisor import Rules, TrialWatch


class Observer:
    def warn(self, text: str) -> None:
        print(text, flush=True)

    def preparing(self, anything: bool) -> None:
        print("preparing" if anything else "starting", flush=True)


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    config = common.study(options.study, options.gpus)
    space = SearchSpace(config.search.space, config.launch.world_size, bool(options.gpus))
    params = space.params({})
    rules = Rules(None, False, None, lambda energy_kwh: energy_kwh, lambda: False, lambda: False, 300.0)
    records = []
    with tempfile.TemporaryDirectory() as folder:
        paths = StudyPaths(Path(folder))
        engine = LocalEngine(config)
        engine.begin(paths, "benchmark", Observer(), lambda: False)
        engine.prepare(lambda: False)
        for number in range(options.repeats):
            spec = TrialSpec(
                number=number,
                attempt=1,
                seed=number,
                params=params,
                workload=config.workload.model_dump(mode="json"),
                prepared_dir=str(paths.prepared),
                trial_dir=str(paths.trial(number)),
            )
            engine.meter.enter(Phase.SETUP)
            trial = engine.start(spec, paths.trial_log(number, 1))
            quality = config.quality.name
            watch = TrialWatch(spec, quality, trial, engine.meter, rules, [], lambda *_: None, lambda record: None)
            record = watch.run()
            if record.failure is not None:
                sys.exit(record.failure.text)
            print(record.value, record.energy_kwh, flush=True)
            records.append(record.as_json())
            idle = [idle_power.model_dump() for idle_power in engine.meter.idle]
            common.write(options.out, options.gpus, {"idle": idle, "trials": records})
        engine.close()


if __name__ == "__main__":
    main()
