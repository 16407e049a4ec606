"""The check of a learner's file: whether it is right, from data that the processes of the answer send."""

from __future__ import annotations

from pathlib import Path

from .answer import Answer
from .answer_process import SECONDS, AnswerProcesses
from .exercise import WrongAnswerError
from .exercises import exercise

__all__: list[str] = []


def check(number: int, path: Path, seconds: float = SECONDS) -> str:
    """Check a learner's file and return what is right about it; WrongAnswerError if it is wrong.

    ``seconds``: the time that the answer has. This process does not import the file.
    """
    with path.open("rb"), AnswerProcesses(path, seconds) as processes:  # OSError for a file that cannot be read
        return check_answer(number, Answer(processes.ask))


def check_answer(number: int, answer: Answer) -> str:
    """The same for the functions of an answer."""
    compare = exercise(number).check
    try:
        return compare(answer)
    except (WrongAnswerError, OSError):
        raise
    except Exception as error:  # of a value that the check cannot use, such as a text in place of a number
        raise WrongAnswerError(f"{type(error).__name__}: {error}") from error
