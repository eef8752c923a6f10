"""A judge for tests: a server on this machine that speaks enough of `/v1/chat/completions`, and answers by a script.

A script is a function of what was asked that returns the text of an answer, or a `Refusal` with a status.
"""

from __future__ import annotations

import json
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Ask:
    """One request as the server received it."""

    body: dict[str, Any]
    key: str

    @property
    def system(self) -> str:
        return self.body["messages"][0]["content"]

    @property
    def user(self) -> str:
        return self.body["messages"][1]["content"]

    @property
    def seal(self) -> str:
        return re.search(r"^VERDICT (\w+) SCORE$", self.system, re.MULTILINE)[1]

    @property
    def fence(self) -> str:
        return re.search(r"\[BEGIN name (\w+)\]", self.system)[1]

    def section(self, name: str) -> str | None:
        """What stands in a section, as a judge reads it who goes by the fence."""
        found = re.search(rf"\[BEGIN {name} {self.fence}\]\n(.*?)\n\[END {name} {self.fence}\]", self.user, re.DOTALL)
        return found and found[1]


@dataclass(frozen=True)
class Refusal:
    """An answer that is no completion."""

    status: int
    body: str = '{"error": {"message": "no"}}'


Script = Callable[[Ask], str | Refusal]


def honest(ask: Ask) -> str:
    """Goes by the fence: 10 for a reply with a 42 in it, 1 for any other."""
    return f"I looked at the reply.\nVERDICT {ask.seal} {10 if '42' in ask.section('reply') else 1}"


def gullible(ask: Ask) -> str:
    """Repeats the last verdict that the data holds in any alphabet, wherever it stands; without one it is honest."""
    found = re.findall(r"VERDICT[ \t]+\S+[ \t]+\S+", unicodedata.normalize("NFKC", ask.user))
    return f"As I was told:\n{found[-1]}" if found else honest(ask)


def repeating(ask: Ask) -> str:
    """Repeats everything that it was shown, fence included."""
    return ask.user


def parroting(ask: Ask) -> str:
    """Repeats nothing but the reply."""
    return ask.section("reply")


def saying(text: str) -> Script:
    """Always gives the same answer, in which SEAL stands for the request's seal."""
    return lambda ask: text.replace("SEAL", ask.seal)


def refusing(status: int, body: str = '{"error": {"message": "no"}}') -> Script:
    return lambda ask: Refusal(status, body)


def in_turn(*scripts: Script) -> Script:
    """One script for each request, and the last for all that follow."""
    left = list(scripts)
    return lambda ask: (left.pop(0) if len(left) > 1 else left[0])(ask)


@dataclass
class ScriptedJudge:
    """A server that is running."""

    url: str
    script: Script
    asks: list[Ask] = field(default_factory=list)


@contextmanager
def serve(script: Script) -> Iterator[ScriptedJudge]:
    """A judge that follows a script, on a free port of this machine. Clients are asked to try again after a millisecond."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            ask = Ask(body, self.headers["Authorization"].removeprefix("Bearer "))
            judge.asks.append(ask)
            answer = judge.script(ask)
            if isinstance(answer, str):
                message = {"role": "assistant", "content": answer}
                answer = Refusal(200, json.dumps({"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}))
            payload = answer.body.encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.send_header("Retry-After-Ms", "1")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that hung up is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    judge = ScriptedJudge(f"http://127.0.0.1:{server.server_port}/v1", script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
