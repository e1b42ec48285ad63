"""What can go wrong with one sample, and how it is told."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass


class SkipSample(Exception):  # noqa: N818 - a signal to the loader, not an error
    """Raised by a dataset's `__getitem__` for a sample that cannot be used: it is dropped, counted and reported.

    Attributes:
        reason: Why, in words; listed in the loader's `skipped`.
    """

    def __init__(self, reason: str = "the dataset rejected it") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """An exception that a sample caused, in a form that travels between processes.

    Attributes:
        where: The sample or samples, in words.
        error: The exception itself if it pickles, else a RuntimeError that quotes it.
        details: Its traceback.
        advice: What to do about it, in words; "" where that is not known.
    """

    where: str
    error: BaseException
    details: str
    advice: str = ""

    @classmethod
    def of(cls, where: str, error: BaseException, advice: str = "") -> SampleFailure:
        """Captures an exception that is being handled."""
        details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(where, _portable(error), details, f" ({advice})" if advice else "")

    @property
    def message(self) -> str:
        """One line for the other ranks."""
        return f"{self.where}: {type(self.error).__name__}: {self.error}{self.advice}"

    def raised_by(self, rank: int) -> BaseException:
        """The exception to raise on the rank where it happened: of the same type, naming rank and sample."""
        text = f"{self.where} on rank {rank}: {self.error}{self.advice}\n\nOriginal traceback:\n{self.details}"
        try:
            named = type(self.error)(text)
        except Exception:
            named = RuntimeError(text)
        if self.where not in str(named) or not isinstance(named, Exception):
            named = RuntimeError(text)
        named.__cause__ = self.error
        return named


def _portable(error: BaseException) -> BaseException:
    """The exception, if it survives pickling, without its traceback's frames."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            return copy
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
