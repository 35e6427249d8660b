"""What one piece of code did in a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The outcome of one `run`."""

    value: object = None
    """The value of the last expression, or what the function returned. None if it cannot be sent
    back: `value_error` says why."""
    text: str = ""
    """The `repr` of the value, if it is not None."""
    exception: BaseException | None = None
    """What the code raised. Its `__cause__` has the traceback as text."""
    value_error: BaseException | None = None
    """Why the value was not sent back."""
    stdout: str = ""
    """What was written to standard output, at most OUTPUT_BYTES_MAX bytes of it."""
    stderr: str = ""
    """The same for standard error."""
    wall_seconds: float = 0.0
    """How long it ran."""

    @property
    def success(self) -> bool:
        """Whether the code raised nothing."""
        return self.exception is None

    def result(self) -> object:
        """Returns the value.

        Raises:
            BaseException: What the code raised.
            ProcessBranchError: The value cannot be sent back; use `text`, or return plain data.
        """
        error = self.exception or self.value_error
        if error is not None:
            raise error
        return self.value
