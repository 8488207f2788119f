"""Turn a play's text into prompts with responses, for sft-dialogue.yaml and opt-1.3b-sft.yaml.

    python studies/dialogue.py INPUT.txt [--characters N]

One JSON object a line on standard output: the prompt is a speech with its speaker, the response the
speech after it. With --characters, prompt and response are each as many speeches as have N
characters, and no speech is in two rows.

In the text, as in Tiny Shakespeare, an empty line stands between two speeches, and a speaker's name
with a colon alone on the first line of each.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path


def rows(text: str, characters: int = 0) -> Iterator[dict[str, str]]:
    """Yield the rows, in the order of the text.

    Blocks without a speaker or without words are left out.
    """
    blocks = (block.strip() for block in text.split("\n\n"))
    speeches = [
        block for block in blocks if block.partition("\n")[0].endswith(":") and "\n" in block
    ]
    if not characters:
        for speech, answer in pairwise(speeches):
            yield {"prompt": speech + "\n\n", "response": answer}
        return
    parts = [""]
    for speech in speeches:
        if len(parts[-1]) >= characters:
            parts.append("")
        parts[-1] += speech + "\n\n"
    for prompt, response in zip(parts[::2], parts[1::2], strict=False):
        yield {"prompt": prompt, "response": response}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--characters", type=int, default=0)
    options = parser.parse_args()
    for row in rows(options.text.read_text(encoding="utf-8"), options.characters):
        print(json.dumps(row, ensure_ascii=False))
