"""Directories in S3 as directories here: packed data and checkpoints of runs that are started by hand.

Invariant: what is fetched is whole or not there, as its manifest says; what is put has its manifest last.
Credentials, region and endpoint come from boto3's usual chain. (Jobs of the cluster use its storage instead.)
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from training.manifest import MANIFEST, ManifestError, manifest_bytes, parse_manifest, verify

T = TypeVar("T")
_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>.+)")


class ObjectError(Exception):
    """An object that is not there or cannot be had; the message names it."""


def is_url(text: str) -> bool:
    """Whether a text names something in S3."""
    return text.startswith("s3://")


def fetched(url: str, cache: Path | None = None) -> Path:
    """The directory under an S3 prefix, with a manifest, as a directory on this machine; fetched once.

    A single object comes as a file. Raises ObjectError when there is none, ManifestError when it is damaged.
    """
    bucket, key = _parts(url)
    named = hashlib.sha256(url.encode()).hexdigest()[:16]
    target = (cache or _cache()) / named / key.rpartition("/")[2]
    names = keys(url.rstrip("/") + "/")
    if MANIFEST not in names:
        if names:
            raise ManifestError(f"{url}: has no {MANIFEST}; it is not complete")
        target.parent.mkdir(parents=True, exist_ok=True)
        _ask(url, lambda client: client.download_file(bucket, key, str(target)))
        return target
    wanted = _ask(
        url, lambda client: bytes(client.get_object(Bucket=bucket, Key=f"{key}/{MANIFEST}")["Body"].read())
    )
    entries = parse_manifest(wanted, url)
    if (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == wanted:
        verify(target, url)
        return target
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    for name in entries:
        file = partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        get(f"{url.rstrip('/')}/{name}", file)
    (partial / MANIFEST).write_bytes(wanted)
    try:
        verify(partial, url)
        shutil.rmtree(target, ignore_errors=True)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def put_directory(url: str, directory: Path) -> None:
    """Put a directory that has a manifest under an S3 prefix; until it is done its manifest says so."""
    bucket, key = _parts(url)
    entries = verify(directory)
    begun = manifest_bytes({}, complete=False)
    _ask(url, lambda client: client.put_object(Bucket=bucket, Key=f"{key}/{MANIFEST}", Body=begun))
    for name in [*entries, MANIFEST]:
        put(f"{url}/{name}", directory / name)


def put(url: str, file: Path) -> None:
    """Put one file."""
    bucket, key = _parts(url)
    _ask(url, lambda client: client.upload_file(str(file), bucket, key))


def get(url: str, file: Path) -> None:
    """Fetch one object into a file."""
    bucket, key = _parts(url)
    _ask(url, lambda client: client.download_file(bucket, key, str(file)))


def keys(url: str) -> list[str]:
    """What lies under a prefix, relative to it."""
    bucket, key = _parts(url)

    def listed(client: Any) -> list[str]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
        return [item["Key"].removeprefix(key) for page in pages for item in page.get("Contents", [])]

    return _ask(url, listed)


def delete(url: str) -> None:
    """Remove one object."""
    bucket, key = _parts(url)
    _ask(url, lambda client: client.delete_object(Bucket=bucket, Key=key))


def _parts(url: str) -> tuple[str, str]:
    match = _URL.fullmatch(url)
    if not match:
        raise ObjectError(f"{url!r}: expected s3://bucket/key")
    return match["bucket"], match["key"] if url.endswith("/") else match["key"].rstrip("/")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotwise" / "objects"


def _ask(url: str, operation: Callable[[Any], T]) -> T:
    """Do something with a client, with boto3's errors as ours."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return operation(boto3.client("s3"))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in ("NoSuchKey", "404"):
            raise ObjectError(f"{url}: no such object") from None
        raise ObjectError(f"{url}: the server answered {code}") from None
    except (BotoCoreError, OSError, ValueError) as error:
        raise ObjectError(f"{url}: {' '.join(str(error).split())}") from None
