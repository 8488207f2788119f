"""Write pairs of answers for reward models, one JSON object a line on standard output.

The answer with the larger share of vowels is the chosen one, so that the model learns a gold reward
that anybody can check.

python studies/vowel_pairs.py > studies/chat-small/pairs.jsonl                                #
    Python's documentation python studies/vowel_pairs.py studies/data/dialogue.jsonl >
    studies/data/dialogue-pairs.jsonl  # dialogue.py's speeches
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from vowels import share_of_vowels

APART = 0.06  # shares of vowels differ by so much at least

draw = random.Random(0)  # noqa: S311 – always the same


def beginnings(words_each: int = 8) -> Callable[[], tuple[str, str, str]]:
    """Return a function that draws a prompt and two answers from Python's documentation.

    Each has `words_each` words, from anywhere in it.
    """
    texts = (text.split() for name in sorted(topics) for text in topics[name].split("\n\n"))
    paragraphs = [words for words in texts if len(words) > words_each]

    def some_words() -> str:
        words = draw.choice(paragraphs)
        begin = draw.randrange(len(words) - words_each + 1)
        return " ".join(words[begin : begin + words_each])

    return lambda: (f"{some_words()} ", some_words(), some_words())


def speeches(path: Path, longest: int = 160) -> Callable[[], tuple[str, str, str]]:
    """Return a function that draws a prompt and two speeches, neither of which need answer it.

    Each has at most `longest` characters.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if max(len(row["prompt"]), len(row["response"])) <= longest]
    return lambda: (
        draw.choice(rows)["prompt"],
        draw.choice(rows)["response"],
        draw.choice(rows)["response"],
    )


def pairs(count: int, drawn: Callable[[], tuple[str, str, str]]) -> Iterator[dict[str, str]]:
    """Yield `count` pairs of answers whose shares of vowels are far enough apart."""
    while count:
        prompt, *answers = drawn()
        (low, fewer), (high, more) = sorted(
            zip(share_of_vowels([prompt] * 2, answers), answers, strict=True)
        )
        if high - low >= APART:
            yield {"prompt": prompt, "chosen": more, "rejected": fewer}
            count -= 1


for pair in (
    pairs(4000, speeches(Path(sys.argv[1]))) if len(sys.argv) > 1 else pairs(600, beginnings())
):
    print(json.dumps(pair))
