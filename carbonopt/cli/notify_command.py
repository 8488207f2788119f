"""`carbonopt notify`: send a test message."""

from typing import Annotated

import typer

from carbonopt.cli.options import StudyFile
from carbonopt.core.errors import BadInput, CarbonoptError


def notify(
    study: StudyFile,
    test: Annotated[bool, typer.Option("--test", help="Send a test message.")] = False,
) -> None:
    """Send a test message to the addresses that a study's messages go to."""
    from carbonopt.study.notifications import Message, deliver
    from carbonopt.study_file.notify_addresses import addresses
    from carbonopt.study_file.reader import load_study

    if not test:
        raise BadInput("notify sends test messages alone; give --test.")
    config = load_study(study)
    if config.notify is None:
        raise BadInput(f"{study} has no notify; add it, such as notify: {{on: [finished]}}.")
    to = addresses(config.notify)
    text = "This is a test. The messages of the study will come to this address."
    message = Message(f"carbonopt: {config.name}: test", text)
    answers = [deliver(message, number, address) for number, address in enumerate(to, start=1)]
    problems = [f"{problem[0].upper()}{problem[1:]}" for problem in answers if problem is not None]
    named = f"{len(to)} {'address' if len(to) == 1 else 'addresses'}"
    if problems:
        raise CarbonoptError(f"sent to {len(to) - len(problems)} of {named}. {' '.join(problems)}")
    print(f"sent to {named}")
