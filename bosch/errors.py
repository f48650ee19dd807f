"""Failures that end a command, and text made safe to print."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

# Control characters (C0 and C1) without tab and line feed, and surrogates, which UTF-8 lacks.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
NO_SPACE_LEFT = (errno.ENOSPC, errno.EDQUOT)


class UserError(Exception):
    """The user's input is at fault: a message, and the dotted path of the field if it is known."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(f"{path}: {text}" if path else text)
        self.text, self.path = text, path


class RunError(Exception):
    """A run failed for a reason outside the user's input, such as a full disk; exit status 1."""


class DiskFullError(RunError):
    """No space is left where a run writes; other runs fail until there is some."""


class LostRankError(RunError):
    """Another process of the same run has ended or hangs; its log has the reason."""


class StoppedError(Exception):
    """A run stopped on request and saved its work; the same command resumes it."""


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk or quota caused an error; libraries wrap the OSError in their own."""
    return any(
        isinstance(cause, DiskFullError)
        or (isinstance(cause, OSError) and cause.errno in NO_SPACE_LEFT)
        or any(os.strerror(number) in str(cause) for number in NO_SPACE_LEFT)
        for cause in causes(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out on any device; compares class names, as torch may not be loaded."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = (
        "can't allocate memory", "std::bad_alloc", "CUDA out of memory",
        "CUDA error: out of memory", "ALLOC_FAILED",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error with its causes and contexts, latest first, each once (the chain can be a cycle)."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def printable(text: str) -> str:
    """`text` with control characters as escapes (`\\x1b`)."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
