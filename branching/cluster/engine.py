"""The engine that runs attempts on other machines: a small protocol, and files through it.

An engine is Ray, Dask, or anything else that runs functions on a set of nodes and keeps what they
made where it was made until someone asks for it. References travel inside of arguments and results,
and are not resolved on the way: a layer crosses the network only when the caller gets it.

A function is a generator: it yields messages for the caller while it runs, and returns its result.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from typing import IO, Any, Protocol

CHUNK_BYTES = 32 << 20
"""Size of the pieces of a file in the object store, so that no archive is in memory as a whole."""
_COMPRESSION_LEVEL = 1
"""Source code becomes a quarter of its size. Higher levels take several times as long."""


class EngineError(Exception):
    """The engine lost a task or an object, with its node for instance. The text says why."""


class ObjectStore(Protocol):
    """The engine as seen from one of its nodes."""

    node: str
    """Name of the node."""

    def put(self, data: bytes) -> object:
        """Keeps data at this node and returns a reference."""

    def get(self, reference: object) -> bytes:
        """Returns the data, from wherever it is. Raises EngineError if it is lost."""

    def is_cancelled(self, token: str) -> bool:
        """Returns whether the caller has cancelled the tasks that were given this token."""


Function = Callable[[ObjectStore, Any], Generator[object, None, object]]
"""A generator function of this package, which is called on a node.

It yields messages, and None several times a second if it has no message, so that the engine can
pass on earlier ones.
"""


class Engine(Protocol):
    """The engine as seen from the program that calls a pattern. All methods are thread-safe."""

    def put(self, data: bytes) -> object:
        """Keeps data at this machine and returns a reference."""

    def get(self, reference: object) -> bytes:
        """Returns the data, from wherever it is. Raises EngineError if it is lost."""

    def pickle(self, value: object) -> bytes:
        """Returns the value in a form that `pickle.loads` reads on a node."""

    def submit(
        self, function: Function, argument: object, *, needs: Sequence[object], token: str
    ) -> object:
        """Starts `function(store, argument)` once on some node, and returns the task.

        `needs` has the references that the function gets, `token` is its cancellation token.
        """

    def receive(self, task: object, listener: Callable[[Any], None]) -> Any:
        """Calls the listener for each message of the function, in order, and returns its result.

        The messages come while the function runs. One thread receives from a task.

        Raises:
            EngineError: The function has ended early. It is not repeated.
        """

    def give_up(self, task: object) -> None:
        """Lets `receive` raise EngineError for the task, which may go on."""

    def new_token(self) -> str:
        """Returns a cancellation token, which tasks ask for by `ObjectStore.is_cancelled`."""

    def cancel(self, token: str) -> None:
        """Cancels a token. May be repeated. An engine that cannot be reached is logged: it ends the
        tasks with this program."""

    def close(self) -> None:
        """Gives up everything that was put and submitted. The tasks have ended or are cancelled."""


def run_function(
    function: Function, store: ObjectStore, argument: object, pass_on: Callable[[object], None]
) -> object:
    """Runs a function on its node, and returns its result.

    Args:
        function: The function.
        store: The node's store.
        argument: The function's argument.
        pass_on: Called for each message, and with None.
    """
    running = function(store, argument)
    while True:
        try:
            message = next(running)
        except StopIteration as end:
            return end.value
        pass_on(message)


def put_file(store: Engine | ObjectStore, file: IO[bytes]) -> list[object]:
    """Keeps a file, from its present position, and returns references to its pieces."""
    references = []
    while piece := file.read(CHUNK_BYTES):
        references.append(store.put(zlib.compress(piece, _COMPRESSION_LEVEL)))
    return references


def fetch_file(store: Engine | ObjectStore, references: Sequence[object], file: IO[bytes]) -> None:
    """Writes a file that `put_file` keeps. Raises EngineError if a piece is lost."""
    for reference in references:
        file.write(zlib.decompress(store.get(reference)))
    file.flush()
