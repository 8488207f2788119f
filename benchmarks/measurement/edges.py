"""What evaluations take from the measured energy of the training around them.

    python benchmarks/measurement/edges.py OUT.json [--gpus 0] [--pairs 5]

Trains one configuration with the study file's number of evaluations and with one, in turns and
with the same seeds. Evaluations are not part of the training, so that its energy should be the
same.
"""

import sys

import common


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    config = common.study(options.study, options.gpus)
    few = config.model_copy(
        update={"workload": config.workload.model_copy(update={"evaluations": 1})}
    )
    pairs = []
    for seed in range(options.pairs):
        pair = {}
        in_turns = [("many", config), ("one", few)]
        for name, of_pair in in_turns if seed % 2 == 0 else in_turns[::-1]:
            for record, _ in common.trained(of_pair, [common.Run({}, seed)]):
                if record.failure is not None:
                    sys.exit(record.failure.text)
                print(name, record.energy_kwh, flush=True)
                pair[name] = record.as_json()
        pairs.append(pair)
        common.write(options.out, options.gpus, {"pairs": pairs})


if __name__ == "__main__":
    main()
