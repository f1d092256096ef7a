"""Storage in an S3 bucket, over a network that fails.

Invariant: what is read has the size and the hash of what was written, or the call fails; a reader never sees
half an object. boto3 asks again when a request fails; a body that breaks off is asked for from where it broke
off, so an object of any size comes through a connection that never lasts long. The cost: files are read once
more before they go up, for the SHA-256 that goes with them.

Uploads of over 32 MiB go in parts; one that was killed leaves parts that nobody sees, which a lifecycle rule
of the bucket (AbortIncompleteMultipartUpload) removes.
"""

import hashlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.storage import TEMPORARY, NotFoundError, StorageError, checked_key, checked_prefix, too_large

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 60.0
ATTEMPTS = 6  # of a request, and of a body that brings nothing new
PAUSE_S = 0.1  # before the second attempt at a body; doubled for each one after
SEGMENT = 16 << 20  # bytes of a request in a download
PART = 32 << 20  # bytes of a request in an upload
AT_ONCE = 8  # requests of one file
HASH = "sha256"  # the metadata that holds an object's hash


@dataclass(frozen=True)
class Version:
    """An object as it is now; `hash` is algorithm and hex digest of its bytes, where they are known."""

    bytes: int
    etag: str
    hash: tuple[str, str] | None


class S3Storage:
    """Objects in a bucket under a prefix. Credentials and endpoint come from boto3's usual chain."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client: S3Client | None = None
        self._making = threading.Lock()  # boto3 makes clients safely in one thread at a time only

    @property
    def client(self) -> "S3Client":
        with self._making:
            if self._client is None:
                self._client = self._connect()
        return self._client

    def _connect(self) -> "S3Client":
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            signature_version="s3v4",
            max_pool_connections=2 * AT_ONCE,
        )
        try:
            return boto3.client("s3", config=config)
        except (BotoCoreError, ValueError) as error:  # an unknown profile, an endpoint that is no URL
            raise StorageError(f"{self.root}: {error}") from error

    def read(self, key: str, most: int | None = None) -> bytes:
        name, attempt = self._name(key), 0
        cut: StorageError
        while True:
            answer = self._ask(key, self.client.get_object, Bucket=self.bucket, Key=name)
            try:
                if most is not None and int(answer["ContentLength"]) > most:
                    answer["Body"].close()
                    raise too_large(self.root, key, most)
                data = bytes(self._ask(key, answer["Body"].read))
                if _matches(_hash_of(answer), data):
                    return data
                cut = _CorruptError(f"{self.root}: {key!r}: came with other bytes than its hash says")
            except _CutError as error:
                cut = error
            attempt = _pause(attempt, cut)

    def write(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                self._put(key, data, IfNoneMatch="*")
                return True
            except _ConditionFailedError as failed:
                if failed.status == 412:
                    return self.read(key) == data
            # 409: another conditional write of this key is under way, which may yet fail; ask again
            time.sleep(0.05 * 2**attempt)
        raise StorageError(f"{self.root}: {key!r}: other writers kept it busy")

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2")
        listing = pages.paginate(Bucket=self.bucket, Prefix=self.prefix + checked_prefix(prefix))
        found = self._ask(
            prefix, lambda: [item["Key"] for page in listing for item in page.get("Contents", [])]
        )
        # A name that ends in / marks a folder: consoles leave such objects.
        return sorted(name.removeprefix(self.prefix) for name in found if not name.endswith("/"))

    def settled(self, key: str) -> bool:
        return True  # an object is put whole

    def delete(self, key: str) -> None:
        self._ask(key, self.client.delete_object, Bucket=self.bucket, Key=self._name(key))

    def upload(self, key: str, path: Path) -> None:
        from boto3.s3.transfer import TransferConfig

        name = self._name(key)
        self._ask(
            key,
            self.client.upload_file,
            str(path),
            self.bucket,
            name,
            ExtraArgs={"Metadata": {HASH: self._ask(key, _file_hash, HASH, path)}},
            Config=TransferConfig(
                multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=AT_ONCE
            ),
        )

    def download(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            self.fetch(key, self.version(key), path, temporary)
        finally:
            temporary.unlink(missing_ok=True)
            _journal(temporary).unlink(missing_ok=True)

    def version(self, key: str) -> Version:
        """What the object is now. Raises NotFoundError."""
        answer = self._ask(key, self.client.head_object, Bucket=self.bucket, Key=self._name(key))
        return Version(int(answer["ContentLength"]), answer["ETag"], _hash_of(answer))

    def fetch(self, key: str, version: Version, path: Path, part: Path) -> None:
        """Get this version of an object to `path`, by way of `part`.

        What an earlier call that failed or was killed left in `part` and beside it is not asked for again:
        it must belong to this version and to nobody else. Raises StorageError when the object was replaced,
        or keeps coming with other bytes than its hash says.
        """
        for _ in range(2):
            self._fill(key, version, part)
            if version.hash is None or self._ask(key, _file_hash, version.hash[0], part) == version.hash[1]:
                part.replace(path)
                _journal(part).unlink(missing_ok=True)
                return
            part.unlink(missing_ok=True)
            _journal(part).unlink(missing_ok=True)
        raise StorageError(f"{self.root}: {key!r}: came with other bytes than its hash says, twice")

    def _fill(self, key: str, version: Version, part: Path) -> None:
        """Get the segments that are not there yet; the journal beside `part` says which are."""
        journal = _journal(part)
        there = set(journal.read_text().split()) if journal.exists() and part.exists() else set()
        if not there:
            part.unlink(missing_ok=True)
        writing = threading.Lock()
        with part.open("ab"), part.open("r+b") as out, journal.open("a" if there else "w") as notes:
            os.truncate(out.fileno(), version.bytes)

            def get(begin: int) -> None:
                size = min(SEGMENT, version.bytes - begin)
                os.pwrite(out.fileno(), self._segment(key, version, begin, size), begin)
                with writing:
                    notes.write(f"{begin}\n")
                    notes.flush()

            missing = [begin for begin in range(0, version.bytes, SEGMENT) if str(begin) not in there]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                try:
                    for _ in pool.map(get, missing):
                        pass
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            out.flush()
            os.fsync(out.fileno())

    def _segment(self, key: str, version: Version, begin: int, size: int) -> bytes:
        """Bytes of an object, however often the connection breaks off as long as each one brings some."""
        name, data, attempt = self._name(key), bytearray(), 0
        cut: StorageError
        while True:
            before = len(data)
            try:
                answer = self._ask(
                    key,
                    self.client.get_object,
                    Bucket=self.bucket,
                    Key=name,
                    Range=f"bytes={begin + before}-{begin + size - 1}",
                    IfMatch=version.etag,
                )
                self._ask(key, _read_into, answer["Body"], data)
                if len(data) == size:
                    return bytes(data)
                cut = _CutError(f"{self.root}: {key!r}: broke off after {begin + len(data)} bytes")
            except _ConditionFailedError:
                raise StorageError(f"{self.root}: {key!r}: was replaced while it was read") from None
            except _CorruptError as error:
                del data[before:]
                cut = error
            except _CutError as error:
                cut = error
            attempt = 0 if len(data) > before else attempt
            attempt = _pause(attempt, cut)

    def _put(self, key: str, data: bytes, **conditions: Any) -> None:
        self._ask(
            key,
            self.client.put_object,
            Bucket=self.bucket,
            Key=self._name(key),
            Body=data,
            Metadata={HASH: hashlib.sha256(data).hexdigest()},
            **conditions,
        )

    def _name(self, key: str) -> str:
        return self.prefix + checked_key(key)

    def _ask(self, key: str, operation: Callable[..., T], *args: Any, **arguments: Any) -> T:
        """Call boto3, with its errors as ours, which a person or the caller can act on."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            FlexibleChecksumError,
            IncompleteReadError,
            NoCredentialsError,
            ReadTimeoutError,
            ResponseStreamingError,
        )

        try:
            try:
                return operation(*args, **arguments)
            except Boto3Error as error:  # what a transfer of a file wraps its cause in
                raise error.__context__ or error from None
        except ClientError as error:
            code = error.response["Error"]["Code"]
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (409, 412):
                raise _ConditionFailedError(status) from None
            if code in ("NoSuchKey", "404"):
                raise NotFoundError(f"{self.root}: no object {key!r}") from None
            if code == "NoSuchBucket":
                raise StorageError(f"{self.root}: there is no bucket {self.bucket!r}") from None
            raise StorageError(f"{self.root}: {key!r}: the server answered {status} {code}") from error
        except NoCredentialsError:
            raise StorageError(
                f"{self.root}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "a profile or a role"
            ) from None
        except FlexibleChecksumError:
            raise _CorruptError(f"{self.root}: {key!r}: came with other bytes than its hash says") from None
        except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError) as error:
            raise _CutError(f"{self.root}: {key!r}: {error}") from error
        except (BotoCoreError, Boto3Error, OSError) as error:
            raise StorageError(f"{self.root}: {key!r}: {error}") from error


class _ConditionFailedError(StorageError):
    """The key exists (412), or another writer is at it right now (409)."""

    def __init__(self, status: int) -> None:
        super().__init__(f"conditional write refused with {status}")
        self.status = status


class _CutError(StorageError):
    """A body broke off, which boto3 leaves to us: it is worth asking again."""


class _CorruptError(_CutError):
    """A body came with wrong bytes."""


def _pause(attempt: int, cut: StorageError) -> int:
    """Wait before the next attempt, whose number it returns; raises the error when there were enough."""
    if attempt + 1 >= ATTEMPTS:
        raise StorageError(f"{cut}; tried {ATTEMPTS} times") from cut
    time.sleep(PAUSE_S * 2**attempt)
    return attempt + 1


def _read_into(body: Any, data: bytearray) -> None:
    """Append what comes, and keep it when the rest does not."""
    while block := body.read(1 << 18):
        data += block


def _hash_of(answer: Any) -> tuple[str, str] | None:
    """The hash that came with an object: ours, or the MD5 that its tag is when it was put in one piece.

    A tag of an object under a key of KMS is no hash.
    """
    if ours := answer.get("Metadata", {}).get(HASH):
        return HASH, str(ours)
    tag = str(answer["ETag"]).strip('"')
    plain = answer.get("ServerSideEncryption") in (None, "AES256") and "SSECustomerAlgorithm" not in answer
    return ("md5", tag) if plain and re.fullmatch("[0-9a-f]{32}", tag) else None


def _matches(known: tuple[str, str] | None, data: bytes) -> bool:
    return known is None or hashlib.new(known[0], data, usedforsecurity=False).hexdigest() == known[1]


def _file_hash(algorithm: str, path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _journal(part: Path) -> Path:
    """Which segments of a file that is being fetched are there."""
    return part.with_name(f"{part.name}.segments")
