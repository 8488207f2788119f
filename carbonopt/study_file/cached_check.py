"""A check that needs the libraries of training, and whose success is remembered."""

import json
from dataclasses import dataclass

from carbonopt.core.errors import BadInput, CarbonoptError
from carbonopt.core.files import parsed_json
from carbonopt.study_file.answer_cache import CachedAnswer
from carbonopt.study_file.model_questions import About, Answers


@dataclass(frozen=True)
class CachedCheck:
    """A check that another process makes, unless it has passed before.

    Its answer is the text of a refusal, or else notes for the user, if there are any.

    Args:
        about: The kind of the question.
        question: The question to the process.
        subject: What is checked, as an error names it, such as "the keys of workload".
        cached: The place of the answer, if the check has passed before.
    """

    about: About
    question: str
    subject: str
    cached: CachedAnswer

    @property
    def has_passed(self) -> bool:
        """Whether the same was checked before."""
        return self.cached.read(_notes) is not None

    def run(self, answers: Answers) -> list[str]:
        """Return the notes of the check, asking only if it has not passed before.

        Raises:
            BadInput: If something is refused.
            CarbonoptError: If the check itself fails.
        """
        if (known := self.cached.read(_notes)) is not None:
            return known
        try:
            answer = answers.ask(self.about, self.question)
        except CarbonoptError as error:
            raise CarbonoptError(f"{self.subject} can't be checked: {error}.") from error
        if (notes := _notes(answer)) is None:
            raise BadInput(json.loads(answer))
        self.cached.keep(answer)
        return notes


def _notes(answer: str) -> list[str] | None:
    """Return the notes of an answer, which may be none; None if it is a refusal."""
    answered = parsed_json(answer)
    if answered is None:
        return []
    return answered if isinstance(answered, list) else None
