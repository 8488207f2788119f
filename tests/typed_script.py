"""A user's script that `make types` checks in mypy's strict mode; nothing runs it.

What is right in it passes. Each line of `wrong` has the error that its comment names: without it
the comment would be unused, which is an error here (see pyproject.toml).
"""

import carbonopt


def right() -> None:
    config = {"name": "x", "target": {"perplexity": 40.0}}
    study: carbonopt.Study = carbonopt.run(config, "out")
    try:
        best: carbonopt.Recommended = study.recommend(target=38.5)
    except carbonopt.TargetNotMet as error:
        if error.closest is not None:
            print(error.closest.trial + 1, error.closest.params.epochs)
        raise
    saved: float = 1 - best.emissions_kg_co2e / best.baseline.emissions_kg_co2e
    print(best.trial + 1, best.params.learning_rate, best.caveats[0].text.upper(), saved)
    print(study.trials["energy_kwh.train"].sum(), study.evaluations.groupby("trial").size())
    study.figure("pareto").savefig("pareto.pdf")
    for path in study.export("codecarbon"):
        print(path.read_text())


def wrong() -> None:
    carbonopt.lod("out")  # type: ignore[attr-defined]
    carbonopt.load("out").recommend("38.5")  # type: ignore[arg-type]
    carbonopt.run("study.yaml", output="out")  # type: ignore[call-arg]
