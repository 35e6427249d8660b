"""Failures before the command runs. In every case nothing was started and the directory is unchanged.

WrapperError (exit 125, as docker's own failures)
├── SettingsError       a flag, a variable or a configuration file makes no sense
├── WorkspaceError      the directory cannot be worked on, or something else works on it
├── EngineError         Docker is missing, stopped, or out of reach
└── ImageError          the image is not there, or could not be built
"""

from __future__ import annotations


class WrapperError(Exception):
    """A failure of the wrapper: one sentence, the cause if it is known, and what to do next."""

    exit_code = 125

    def __init__(self, message: str, *, hint: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.hint = hint

    def lines(self) -> list[str]:
        """Returns the text for the terminal, line by line."""
        lines = [f"branching-docker: {self.message}"]
        if self.cause:
            lines.append(f"Cause: {self.cause}")
        return [*lines, f"Hint: {self.hint}"]


class SettingsError(WrapperError):
    """A setting has an impossible value, or is not allowed in its place."""


class WorkspaceError(WrapperError):
    """The directory given by -w is missing, is no directory, cannot be read, or is being worked on."""


class EngineError(WrapperError):
    """The engine is not installed, not running, not permitted, or on another machine."""


class ImageError(WrapperError):
    """The image does not exist, and none was built or pulled."""
