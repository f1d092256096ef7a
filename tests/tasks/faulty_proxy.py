"""A real HTTP proxy in front of a server, which fails as a test tells it to: 500s, cut bodies, silence."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fault:
    """What becomes of one request. At most one of the fields is set."""

    status: int | None = None  # answer this, and ask nobody
    cut_after: int | None = None  # bytes of the answer's body, then hang up
    silent_s: float | None = None  # hold the answer's body back so long after its first half
    flip: bool = False  # change the first byte of the answer's body
    lost: bool = False  # do as asked, and hang up without an answer


@dataclass
class FaultyProxy:
    """Its address, what it was asked (method, path, range), and the fault for the n-th request."""

    url: str
    fault: Callable[[int, str, str], Fault | None] = lambda number, method, path: None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: int = 0  # bytes of bodies that were handed on
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextlib.contextmanager
def faulty_proxy(target: str) -> Iterator[FaultyProxy]:
    """A proxy for the length of a test."""
    found: FaultyProxy
    host = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            if self.headers.get("expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            body = self.rfile.read(size)
            with found.lock:
                found.asked.append((self.command, self.path, self.headers.get("range")))
                number = len(found.asked)
            fault = found.fault(number, self.command, self.path) or Fault()
            if fault.status is not None:
                self.send_response(fault.status)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            upstream = http.client.HTTPConnection(host)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            upstream.close()
            if fault.lost:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = answer.getheader("content-length") if self.command == "HEAD" else str(len(data))
            self.send_header("content-length", length or "0")
            self.end_headers()
            self._send(data, fault)

        def _send(self, data: bytes, fault: Fault) -> None:
            if fault.flip and data:
                data = bytes([data[0] ^ 1]) + data[1:]
            with contextlib.suppress(OSError):
                if fault.cut_after is not None and fault.cut_after < len(data):
                    data = data[: fault.cut_after]
                    self.close_connection = True
                if fault.silent_s is not None:
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    time.sleep(fault.silent_s)
                    data = data[len(data) // 2 :]
                self.wfile.write(data)
                self.wfile.flush()
            with found.lock:
                found.sent += len(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up is what these tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        found = FaultyProxy(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
