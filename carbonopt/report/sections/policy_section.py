"""Reward and divergence of trials that learnt from a reward.

The section shows whether what the reward stands for improved as well, and how far the policies
moved from their start.
"""

from collections.abc import Iterator

from carbonopt.analysis.overoptimisation import Overoptimisation, Ranking
from carbonopt.report.caveats import trials_text
from carbonopt.report.document import Caveat, Maker, Section, num, table
from carbonopt.report.figures.policy_figure import policy as policy_figure
from carbonopt.report.study_view import StudyView


def section(study: StudyView) -> Section | None:
    if (policies := study.overoptimisation) is None:
        return None
    caption = (
        "Trials at their first evaluation, or before their first step, and at their last: means"
        " over its prompts"
    )
    notes = " ".join(_notes(study, policies))
    made = table("policy", caption, policies.runs, _columns(study, policies), long=True, note=notes)
    figure = policy_figure(policies, study.recommendation.target.value)
    return Section(
        key="policy", title="Reward and divergence", blocks=(figure, made) if figure else (made,)
    )


def _columns(study: StudyView, policies: Overoptimisation) -> Iterator[Maker]:
    text = study.quality.text
    yield num("Trial", "trial", strong=lambda run: run == policies.shown)
    yield num("Reward, first", "first.reward", text)
    yield num("Reward, last", "last.reward", text)
    if any(run.best_gold for run in policies.runs):
        yield num("Gold reward, first", "first.gold_reward", text)
        yield num(
            "Gold reward, best", lambda run: run.best_gold and run.best_gold.gold_reward, text
        )
        yield num("Gold reward, last", "last.gold_reward", text)
    yield num("Divergence from the start (nats)", "last.kl_nats", "{:.3g}".format)
    yield num("Tokens of a completion", "last.completion_tokens", "{:.4g}".format)


def _notes(study: StudyView, policies: Overoptimisation) -> Iterator[str]:
    if fallen := [run.trial for run in policies.runs if run.fell_from]:
        yield f"The gold reward fell, and the reward did not, in {trials_text(fallen)}."
    if policies.ranking is not None:
        yield _ranked(policies.ranking)
    if (shown := policies.shown) is None:
        return
    if (
        shown.first.step
        and (record := study.record(shown.trial)) is not None
        and record.total_steps
    ):
        first = f"at step {shown.first.step} of {record.total_steps}"
        yield f"Trial {shown.trial} was first evaluated {first}: what came before is not known."


def _ranked(ranking: Ranking) -> str:
    of = f"Of {ranking.trials} complete trials,"
    if ranking.best_reward == ranking.best_gold:
        best = f"{of} none has more reward or more gold reward than trial {ranking.best_gold}"
    else:
        best = (
            f"{of} trial {ranking.best_reward} has the best reward, trial {ranking.best_gold} the"
            " best gold reward"
        )
    if ranking.correlation is None:
        return f"{best}."
    return f"{best}; Spearman's rank correlation of the two is {ranking.correlation:.2f}."


def caveats(study: StudyView) -> Iterator[Caveat]:
    if (policies := study.overoptimisation) is None:
        return
    if not any(run.best_gold for run in policies.runs):
        yield study.caveat("no_gold_reward")
    ranking, shown = policies.ranking, policies.shown
    if ranking is not None and ranking.correlation is not None and ranking.correlation <= 0:
        numbers = {
            "trials": ranking.trials,
            "correlation": ranking.correlation,
            "best": ranking.best_gold,
        }
        yield study.caveat("gold_ranks_otherwise", **numbers)
    if (
        shown is None
        or (best := shown.fell_from) is None
        or (record := study.record(shown.trial)) is None
    ):
        return
    rewards = {"reward_then": best.reward, "reward": shown.last.reward}
    golds = {
        "gold_then": best.gold_reward,
        "gold": shown.last.gold_reward,
        "prompts": record.evals[-1].count,
    }
    yield study.caveat("gold_reward_fell", trial=shown.trial, step=best.step, **rewards, **golds)
