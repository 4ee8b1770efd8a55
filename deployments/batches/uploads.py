"""Contents on their way to become files: each counts towards its tenant's storage from its start.

Otherwise any number of uploads of a tenant without room would fill the disk before each is refused at its end.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.batches.values import MIN_FILE_BYTES
from deployments.errors import RETRY_S, UnavailableError
from engine.errors import RequestError

UPLOAD_LASTS_S = 3600.0
"""An upload that has not grown for this long is considered abandoned."""


@dataclass(slots=True)
class _Open:
    """An upload in progress.

    Attributes:
        num_bytes: what it takes, as far as is known.
        grown_at_s: monotonic, as nobody can set it; uploads do not outlive this process.
    """

    tenant: str
    num_bytes: int
    grown_at_s: float


class Uploads:
    """The uploads in progress, by generated ids, in a folder of their own. For one thread at a time.

    Args:
        check_room: raises if a tenant's storage has no room for a file of so many bytes, besides those it has and so
            many bytes of others on their way.
    """

    def __init__(self, folder: Path, check_room: Callable[[str, int, int], None]) -> None:
        self._folder = folder
        self._check_room = check_room
        self._open_by_id: dict[str, _Open] = {}

    def begin(self, tenant: str, num_bytes: int) -> str:
        """Create an empty upload that will have at least `num_bytes`, and return its id.

        Raises:
            RequestError: the tenant's storage limit would be exceeded.
        """
        self._check_room(tenant, num_bytes, self._bytes_of(tenant))
        upload_id = uuid.uuid4().hex
        (self._folder / upload_id).touch(mode=0o600)
        self._open_by_id[upload_id] = _Open(tenant, num_bytes, time.monotonic())
        return upload_id

    def grow(self, upload_id: str, num_bytes: int) -> None:
        """Note that an upload will have at least `num_bytes`, and still goes on.

        Raises:
            RequestError: the tenant's storage limit would be exceeded; the upload is deleted.
            UnavailableError: the upload does not exist any more.
        """
        upload = self._open_by_id.get(upload_id)
        if upload is None:
            # The process that had it has died, or it stood still for too long: a client may just try again.
            raise UnavailableError("The upload was interrupted; send the file again.", retry_after_s=RETRY_S)
        if num_bytes > upload.num_bytes:
            try:
                self._check_room(upload.tenant, num_bytes, self._bytes_of(upload.tenant, besides=upload))
            except RequestError:
                self.drop(upload_id)
                raise
            upload.num_bytes = num_bytes
        upload.grown_at_s = time.monotonic()

    def append(self, upload_id: str, offset: int, data: bytes) -> None:
        """Write the next part of a content at its offset; repeating a part is harmless. Errors as `grow`."""
        self.grow(upload_id, offset + len(data))
        with self._file(upload_id) as file:
            file.seek(offset)
            file.write(data)

    def complete(self, upload_id: str) -> tuple[Path, int]:
        """Return where a content is safely on the disk, and its bytes; whoever moves it away calls `drop`.

        Raises:
            UnavailableError: the upload does not exist any more.
        """
        self.grow(upload_id, 0)
        with self._file(upload_id) as file:
            num_bytes = file.seek(0, os.SEEK_END)
            os.fsync(file.fileno())
        return self._folder / upload_id, num_bytes

    def drop(self, upload_id: str) -> None:
        """Delete an upload, if there is one."""
        if self._open_by_id.pop(upload_id, None) is not None:
            (self._folder / upload_id).unlink(missing_ok=True)

    def drop_abandoned(self) -> None:
        """Delete what has not grown for `UPLOAD_LASTS_S`."""
        now_s = time.monotonic()
        left = [i for i, upload in self._open_by_id.items() if now_s - upload.grown_at_s > UPLOAD_LASTS_S]
        for upload_id in left:
            self.drop(upload_id)

    def _bytes_of(self, tenant: str, besides: _Open | None = None) -> int:
        opened = (upload for upload in self._open_by_id.values() if upload.tenant == tenant and upload is not besides)
        return sum(max(upload.num_bytes, MIN_FILE_BYTES) for upload in opened)

    def _file(self, upload_id: str) -> Any:
        return open(self._folder / upload_id, "r+b")
