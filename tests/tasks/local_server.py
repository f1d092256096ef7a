"""A real HTTP server on a free port, answering as a test tells it to."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Reply = tuple[int, bytes]


@dataclass
class LocalServer:
    """Its address, what it was asked, and how it answers (which a test may change)."""

    url: str
    answer: Callable[[Asked], Reply]
    asked: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def local_server(answer: Callable[[Asked], Reply]) -> Iterator[LocalServer]:
    """A server for the length of a test."""
    found: LocalServer

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            asked = Asked(self.command, self.path, dict(self.headers.items()), self.rfile.read(size))
            found.asked.append(asked)
            status, body = found.answer(asked)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            if status in (301, 302):
                self.send_header("location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _reply

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = LocalServer(f"http://127.0.0.1:{server.server_port}", answer)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
