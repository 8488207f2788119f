"""One configuration over and over, each time with another seed, in a trial's own fresh processes.

python benchmarks/measurement/repeats.py OUT.json [--gpus 0 1] [--repeats 10]
"""

import sys
import tempfile
from pathlib import Path

import common

from carbonopt.core.space import SearchSpace
from carbonopt.core.trial import Phase, TrialSpec
from carbonopt.energy.hardware import gpu_uuids
from carbonopt.energy.machine import MachineMeter
from carbonopt.engines.local import LocalLauncher
from carbonopt.storage.paths import StudyPaths
from carbonopt.study.supervisor import Rules, TrialWatch


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
        launcher = LocalLauncher(config.launch, gpu_uuids(options.gpus), print)
        launcher.begin(config, paths, "benchmark")
        meter = MachineMeter(options.gpus)
        launcher.prepare(lambda: False)
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
            meter.enter(Phase.SETUP)
            processes = launcher.start(spec, paths.trial_log(number, 1))
            watch = TrialWatch(spec, processes, meter, rules, [], lambda *_: None, lambda record: None)
            record = watch.run()
            if record.failure is not None:
                sys.exit(record.failure.text)
            print(record.perplexity, record.energy_kwh, flush=True)
            records.append(record.as_json())
            idle = [one.model_dump() for one in meter.idle]
            common.write(options.out, options.gpus, {"idle": idle, "trials": records})
        launcher.close()
        meter.close()


if __name__ == "__main__":
    main()
