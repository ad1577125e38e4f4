"""Errors for users: what happened, where, and what to do about it.

Every mistake a user can make ends in one of these, never in a traceback; the command line prints the three parts and
leaves with the exit code of the class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RoundelayError(Exception):
    """What happened, where it happened (rank, file, key), and what to do."""

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
    """The command, a key or a value is wrong."""

    exit_code = 2


class DataError(RoundelayError):
    """A file, a checkpoint or the numbers themselves are bad."""

    exit_code = 3


class PeerLost(RoundelayError):
    """Another learner died or no longer answers."""

    exit_code = 4


class Interrupted(RoundelayError):
    """The run was asked to stop and has written a checkpoint."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the known name nearest to a wrong one, or lists them all."""
    names = sorted(known)
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
    return f"did you mean '{lowered[close[0]]}'?" if close else f"choose one of: {', '.join(names)}"
