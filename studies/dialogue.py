"""Turn a play's plain text into prompts with responses, for sft-dialogue.yaml.

    python studies/dialogue.py INPUT.txt

One JSON object a line on standard output: the prompt is a speech with its speaker, the response the
speech after it. In the text, as in Tiny Shakespeare, an empty line stands between two speeches, and
a speaker's name with a colon alone on the first line of each.
"""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path


def pairs(text: str) -> Iterator[dict[str, str]]:
    """Return a row for each two speeches that follow each other.

    Blocks without a speaker or without words are left out.
    """
    blocks = (block.strip() for block in text.split("\n\n"))
    speeches = [
        block for block in blocks if block.partition("\n")[0].endswith(":") and "\n" in block
    ]
    for speech, answer in pairwise(speeches):
        yield {"prompt": speech + "\n\n", "response": answer}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python studies/dialogue.py INPUT.txt > dialogue.jsonl")
    for pair in pairs(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(json.dumps(pair, ensure_ascii=False))
