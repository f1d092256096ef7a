"""Keep secrets out of what people read: errors, reasons, logs.

Credentials come by reference only: from the environment, boto3's chain, `${NAME}` in an address. So what must
not be shown is known: the values of environment variables whose names say that they are secret, and what
addresses carry before an @. Invariant: `redacted` text holds neither. A value of fewer than 8 characters is
not looked for: it would tear words apart, and is no secret.
"""

import logging
import os
import re
from typing import Any

SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIAL|AUTH_STRING|API_KEY|PRIVATE_KEY", re.IGNORECASE
)
USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#@'\"]+@")
REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")
SHORTEST = 8
HIDDEN = "***"


class MissingReferenceError(ValueError):
    """An address refers to an environment variable that is not set."""


def redacted(text: str) -> str:
    """The text without secrets."""
    text = USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return text


def redacted_bytes(data: bytes) -> bytes:
    """The same for a log of any encoding."""
    for secret in _secrets():
        data = data.replace(secret.encode(), HIDDEN.encode())
    return data


def redacted_values(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {name: redacted_values(each) for name, each in value.items()}
    return [redacted_values(each) for each in value] if isinstance(value, list | tuple) else value


def resolved(address: str) -> str:
    """The address with each `${NAME}` replaced from the environment. Raises MissingReferenceError."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match["name"])
        if found is None:
            raise MissingReferenceError(f"environment variable {match['name']} is not set")
        return found

    return REFERENCE.sub(value, address)


def watch_logs() -> None:
    """From now on no log record of this process carries a secret, tracebacks included."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        try:
            said = record.getMessage()
            if (clean := redacted(said)) != said:
                record.msg, record.args = clean, ()
            if record.exc_info and record.exc_info[0] is not None:
                record.exc_text = redacted(logging.Formatter().formatException(record.exc_info))
        except Exception:  # a record that cannot be formatted is its handler's to complain about
            return record
        return record

    made.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(made)


def _secrets() -> list[str]:
    """Values that must not be shown, the longest first: one may contain another."""
    found = {
        part
        for name, value in os.environ.items()
        if SECRET_NAME.search(name)
        for part in (value, *(value.split(":", 1)[1:] if "AUTH_STRING" in name else ()))
        if len(part) >= SHORTEST
    }
    return sorted(found, key=len, reverse=True)
