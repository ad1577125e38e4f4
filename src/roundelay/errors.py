"""Errors for users: a message, a location and a hint.

Mistakes of users and failures of peers, disks and data end in one of these classes, never in a traceback. The command line
prints the three parts and exits with the code of the class.
"""

from __future__ import annotations

import difflib
import struct
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RoundelayError(Exception):
    """What happened (`message`), where (rank, file, key) and what to do about it (`hint`)."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        self.message, self.where, self.hint = message, where, hint
        parts = [message]
        if where:
            parts.append(f"  where: {where}")
        if hint:
            parts.append(f"  what to do: {hint}")
        super().__init__("\n".join(parts))


class UsageError(RoundelayError):
    """A command, key or value is wrong."""

    exit_code = 2


class DataError(RoundelayError):
    """A file, a checkpoint or a computed number is invalid."""

    exit_code = 3


class PeerLost(RoundelayError):
    """Another rank ended or stopped answering."""

    exit_code = 4


class Interrupted(RoundelayError):
    """The run was interrupted and its progress is saved."""

    exit_code = 130


PARSE_ERRORS = (
    OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, EOFError, RecursionError,
    MemoryError, AssertionError, struct.error, tokenize.TokenError, zlib.error,
)  # fmt: skip
"""What the parse of a damaged file can raise."""


@contextmanager
def reading(what: str, where: object, hint: str = "write or copy the file again") -> Iterator[None]:
    """Turn the exceptions of a parse into a DataError that names the file. Use it around pure parsing only."""
    try:
        yield
    except RoundelayError:
        raise
    except PARSE_ERRORS as error:
        cause = str(error.strerror if isinstance(error, OSError) and error.strerror else error)[:200].strip()
        detail = f"{type(error).__name__}: {cause}" if cause else type(error).__name__
        raise DataError(f"{what} cannot be read: {detail}", where=str(where).replace("\0", "\\0"), hint=hint) from error


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a hint with the valid name closest to `name`, or with all valid names."""
    names = sorted(valid)
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"did you mean '{lowered[close[0]]}'?" if close else f"choose one of: {', '.join(names)}"
