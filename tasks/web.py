"""Ask a web server once, within bounds, and never show what its address may hide.

An address may say `${NAME}` where the environment holds what must not stand in a file. Invariant: a call
takes at most MOST_BYTES, no longer than `limit_s` for the body nor for any wait before it, and fails in one
line that carries neither user, password nor query of the address. No retries and no redirects: the step that
calls decides, or degrades.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tasks.secrets import MissingReferenceError, redacted, resolved

MOST_BYTES = 64 << 20
CONNECT_S = 5.0

# At INFO it logs whole addresses, and tokens with them.
logging.getLogger("httpx").setLevel(logging.WARNING)


class WebError(Exception):
    """A call without an answer; the message is one line that is safe to show."""


@dataclass(frozen=True)
class Answer:
    """What came back, whatever its status; `said` is the status in words."""

    ok: bool
    said: str
    body: bytes


def call(
    method: str, url: str, *, params: dict[str, str] | None = None, json: Any = None, limit_s: float = 30.0
) -> Answer:
    """The answer. Raises WebError when there is none; a bad status is an answer, with `ok` false."""
    end = time.monotonic() + limit_s
    body = bytearray()
    try:
        address = httpx.URL(resolved(url))
        auth = (address.username, address.password) if address.userinfo else None
        address = address.copy_with(userinfo=b"")
        if params:
            address = address.copy_merge_params(params)
        timeout = httpx.Timeout(limit_s, connect=min(CONNECT_S, limit_s))
        with httpx.stream(method, address, json=json, auth=auth, timeout=timeout) as answer:
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise WebError(f"{shown(url)}: the answer has more than {MOST_BYTES >> 20} MiB")
                if time.monotonic() > end:
                    raise WebError(f"{shown(url)}: no whole answer within {limit_s:g} s")
            return Answer(
                answer.is_success, f"answered {answer.status_code} {answer.reason_phrase}", bytes(body)
            )
    except MissingReferenceError as error:
        raise WebError(f"{shown(url)}: {error}") from None
    except httpx.TimeoutException:
        raise WebError(f"{shown(url)}: no answer within {limit_s:g} s") from None
    except httpx.HTTPError as error:
        raise WebError(f"{shown(url)}: {_without_address(error, url)}") from None
    except (httpx.InvalidURL, httpx.StreamError, ValueError) as error:
        raise WebError(f"{shown(url)}: not a usable address ({type(error).__name__})") from None


def shown(url: str) -> str:
    """The address without user, password, query and fragment."""
    try:
        return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx.InvalidURL, ValueError):
        return "the configured address"


def _without_address(error: httpx.HTTPError, url: str) -> str:
    """The error's text, unless it repeats parts of the address."""
    text = redacted(str(error) or type(error).__name__)
    address = httpx.URL(resolved(url))
    secrets = (address.password, address.username, address.query.decode(errors="replace"))
    return type(error).__name__ if any(secret and secret in text for secret in secrets) else text
