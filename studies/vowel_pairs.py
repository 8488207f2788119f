"""Writes chat-small/pairs.jsonl: beginnings of sentences of Python's documentation, each with two continuations of
eight words. The one with the larger share of vowels is chosen, so that what is learnt from them has a gold reward.

python studies/vowel_pairs.py
"""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

from vowels import share_of_vowels

PAIRS, WORDS, APART = 600, 8, 0.06

draw = random.Random(0)  # noqa: S311, always the same
texts = (text.split() for name in sorted(topics) for text in topics[name].split("\n\n"))
paragraphs = [words for words in texts if len(words) > WORDS]


def some_words() -> str:
    """Eight words that follow each other."""
    words = draw.choice(paragraphs)
    begin = draw.randrange(len(words) - WORDS + 1)
    return " ".join(words[begin : begin + WORDS])


rows = []
while len(rows) < PAIRS:
    prompt, *answers = some_words(), some_words(), some_words()
    (low, fewer), (high, more) = sorted(zip(share_of_vowels([prompt] * 2, answers), answers, strict=True))
    if high - low >= APART:
        rows.append({"prompt": f"{prompt} ", "chosen": more, "rejected": fewer})
path = Path(__file__).parent / "chat-small" / "pairs.jsonl"
path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
