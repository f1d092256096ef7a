"""What control notes for itself from one look to the next: small files that may be lost, and stop no hour.

Invariant: nothing that stands where a note belongs (a pipe, a link, a folder, gigabytes) stops whoever reads
or writes it; without its note, a step does again what it need not have done.
"""

import contextlib
import os
from pathlib import Path

from tasks.storage import read_file

MOST_BYTES = 1 << 24


def read_note(file: Path) -> bytes:
    """What was noted; nothing where there is no note, or something else."""
    try:
        found = read_file(file, MOST_BYTES)
    except OSError:
        return b""
    return b"" if found is None or len(found) > MOST_BYTES else found


def write_note(file: Path, content: bytes) -> None:
    """Replace the note. A disk that does not take it costs its memory."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")  # of one that died, the ledger removes it
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(file)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
