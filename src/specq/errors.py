"""Every error a user can cause, each kind with its exit code; cli/app.py turns them into one message."""

from __future__ import annotations


class SpecqError(Exception):
    """What is wrong, with the value, and what to type instead; exit code 1 unless a kind says otherwise."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecqError):
    """The command, an option, a recipe or a file is not of the form specq takes."""

    exit_code = 2


class GateError(SpecqError):
    """A gate the user set was not passed: not lossless, too slow, too lossy."""

    exit_code = 3


class AccessError(SpecqError):
    """A repository is gated, private or missing, or the token does not open it."""

    exit_code = 4


class OfflineError(SpecqError):
    """Something is needed that is not in the cache, and the network may not or cannot be used."""

    exit_code = 5


class UnsupportedError(SpecqError):
    """The architecture, weight format or option is not one specq runs, or a model and a drafter do not fit."""

    exit_code = 6


class NotEnoughMemoryError(SpecqError):
    """What was asked for does not fit the device; says how much is needed and what would fit."""

    exit_code = 7


class DiskFullError(SpecqError):
    """The disk has no room for what would be written."""

    exit_code = 8
