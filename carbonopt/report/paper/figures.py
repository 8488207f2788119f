"""All figures of the paper, by name; what the study can't show has none."""

from matplotlib.figure import Figure
from matplotlib.text import Text

from carbonopt.report.facts import Facts
from carbonopt.report.paper import charts, influence, pareto
from carbonopt.report.paper.style import Draw, pictures
from carbonopt.report.points import Scatter


def figures(facts: Facts, plot: Scatter) -> dict[str, dict[str, bytes]]:
    """`pdf` and `png` by the figure's name, in the order of the document."""
    rec, learned = facts.recommendation, facts.influence
    drawn = {
        "pareto": (pareto.pareto(plot, rec, facts.knee), pareto.HEIGHT_IN),
        "batch": (charts.batch(facts.batch), charts.BATCH_HEIGHT_IN),
        "influence": (influence.importance(learned), influence.importance_height_in(learned)),
        "effects": (influence.effects(learned), influence.effects_height_in(learned)),
        "returns": (charts.returns(facts.diminishing_returns, rec.target_perplexity), charts.RETURNS_HEIGHT_IN),
        "energy": (charts.energy(facts.spent), charts.ENERGY_HEIGHT_IN),
    }
    return {name: pictures(typeset(draw), height_in) for name, (draw, height_in) in drawn.items() if draw is not None}


def typeset(draw: Draw) -> Draw:
    """The same figure with the 2 of CO2e lowered, as in the paper around it."""

    def lowered(figure: Figure) -> None:
        draw(figure)
        for text in figure.findobj(Text):
            if isinstance(text, Text) and "CO2e" in text.get_text():  # findobj's result is of any artist
                text.set_text(text.get_text().replace("CO2e", "CO₂e"))

    return lowered
