"""A model behind HTTP without a network: OpenAI's chat completions on 127.0.0.1, scripted.

    with served(script) as server:
        model = server.model()              # pydantic-ai's, through the real openai client
        ...
    server.requests                         # what was asked, as JSON

A script is called with the request's messages and returns the reply: a text, tool calls, an HTTP
status to fail with. It is called in the server's threads, one for each connection; a script that
waits holds up its own request alone. Streaming is served when it is asked for: piece by piece, each
sent before the next one is made.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply of the model."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    tokens: tuple[int, int] = (10, 5)
    """Of the prompt, and of the answer."""
    status: int = 200
    hold: threading.Event | None = None
    """Streamed, it waits for this between the first word and the rest."""


Script = Callable[[list[dict[str, Any]]], Reply]


class Server:
    """The server and the requests that it received."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        """A client went away in the middle of a stream."""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def model(self, name: str = "loopback") -> OpenAIChatModel:
        """Returns pydantic-ai's model of this server."""
        provider = OpenAIProvider(base_url=self.url, api_key="none")
        return OpenAIChatModel(name, provider=provider)

    def reply(self, request: dict[str, Any]) -> Reply:
        self.requests.append(request)
        return self.script(request["messages"])


@contextmanager
def served(script: Script) -> Iterator[Server]:
    """Serves a script for the length of the `with`."""
    server = Server(script)
    thread = threading.Thread(target=server._http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server._http.shutdown()
        server._http.server_close()
        thread.join()


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            reply = server.reply(request)
            if reply.status != 200:
                self._send(reply.status, "application/json", b'{"error": {"message": "scripted"}}')
            elif request.get("stream"):
                self._stream(request, reply)
            else:
                self._send(200, "application/json", json.dumps(_whole(request, reply)).encode())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, request: dict[str, Any], reply: Reply) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()  # the end of the connection is the end of the stream
            try:
                for line in _lines(request, reply):
                    self.wfile.write(line)
                    self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                server.hung_up.set()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call-{call.name}-{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(reply.calls)
    ]


def _usage(reply: Reply) -> dict[str, int]:
    prompt, answer = reply.tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _head(request: dict[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "reply", "object": kind, "created": 1, "model": request["model"]}


def _whole(request: dict[str, Any], reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    finish = "tool_calls" if reply.calls else "stop"
    return {
        **_head(request, "chat.completion"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": _usage(reply),
    }


def _lines(request: dict[str, Any], reply: Reply) -> Iterator[bytes]:
    """Yields the text by words, and the arguments of a call in pieces, as servers do."""
    head = _head(request, "chat.completion.chunk")

    def line(**chunk: Any) -> bytes:
        return f"data: {json.dumps({**head, **chunk})}\n\n".encode()

    def delta(finish: str | None = None, **change: Any) -> bytes:
        return line(choices=[{"index": 0, "delta": change, "finish_reason": finish}])

    yield delta(role="assistant", content="")
    for number, word in enumerate(reply.text.split()):
        if number == 1 and reply.hold is not None:
            while not reply.hold.wait(0.05):
                yield b": still there\n\n"  # a comment: so a client that went is noticed
        yield delta(content=f"{word} ")
    for index, call in enumerate(_calls(reply)):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        first = {**call, "function": {**call["function"], "arguments": arguments[:half]}}
        yield delta(tool_calls=[{"index": index, **first}])
        yield delta(tool_calls=[{"index": index, "function": {"arguments": arguments[half:]}}])
    yield delta("tool_calls" if reply.calls else "stop")
    yield line(choices=[], usage=_usage(reply))
    yield b"data: [DONE]\n\n"
