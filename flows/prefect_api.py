"""Ask a Prefect server over HTTP without importing Prefect, which costs a command a second of start.

For the few calls that the command line, `flows.server` and `flows.orchestration` make.
"""

import base64
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from tasks.secrets import redacted

# SQLite under load: "database is locked", answered as 503 after nothing was done. Prefect retries too.
BUSY = (429, 502, 503)
TRIES = 6


class ApiError(Exception):
    """The server does not answer, or refuses; the message is one line."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(redacted(message))
        self.status = status


def call(url: str, method: str, path: str, body: Any = None, timeout_s: float = 10.0) -> Any:
    """The decoded JSON answer of `method url+path`; None for an empty one. Raises ApiError."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, _headers(), method=method)
    # A proxy that the environment names is for the outside world; this server is ours.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(TRIES):
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                content = answer.read()
            break
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(300).decode(errors="replace")
            if error.code not in BUSY or attempt == TRIES - 1:
                raise ApiError(f"{method} {url}{path}: {error.code} {detail}", error.code) from None
            time.sleep(0.1 * 2**attempt)
        except (OSError, ValueError) as error:
            raise ApiError(f"{method} {url}{path}: {getattr(error, 'reason', error)}") from None
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise ApiError(f"{method} {url}{path}: the answer is not JSON; is this a Prefect server?") from None


def _headers() -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    elif login := os.environ.get("PREFECT_API_AUTH_STRING", os.environ.get("PREFECT_SERVER_API_AUTH_STRING")):
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return headers
