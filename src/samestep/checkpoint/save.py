"""Write a staged checkpoint in a background thread: every rank writes its file, then rank 0 publishes the folder.

The ranks write into a hidden folder on a disk that they share. When all have reported success through the store, rank 0
adds index, state and manifest, and renames the folder to its final name: it is published completely or not at all.
"""

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from samestep.checkpoint import checkpoint_folder
from samestep.checkpoint.manifest import (
    INDEX_FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    disk_error,
    write_manifest,
    write_verified,
)
from samestep.checkpoint.tensor_storage import HostStaging, index_to_json, safetensors_blocks
from samestep.disk import fsync_folder
from samestep.distributed.communicator import Communicator
from samestep.distributed.rank_status import poll_pause
from samestep.errors import CheckpointError

_TIMEOUT_AFTER_FAILURE: Final = 5.0


@dataclass
class BackgroundSave:
    """One checkpoint that is being written; the thread starts at once."""

    comm: Communicator  # ranks report through its store that they are done
    store_prefix: str  # the prefix of the keys of all checkpoints in the store
    number: int  # of this save, from 1
    staged: HostStaging  # the tensors that this rank writes
    state: dict[str, object]  # everything that is not a tensor; rank 0 writes it
    manifest: Manifest  # complete except for `files`
    writing: Path  # the hidden folder to write to
    published: Path  # its final name
    retention: checkpoint_folder.Retention
    started: float  # time.monotonic() when the save began

    error: str | None = None  # why it failed, the same text on every rank; valid at the end
    message: str | None = None  # A message for the user; valid at the end, on rank 0
    seconds: float = 0.0  # the duration of the save; valid at the end
    size: int = 0  # bytes of all files; valid at the end, on rank 0
    staged_seconds: float = 0.0  # for which training has waited
    _abandoned_at: float | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.staged_seconds = time.monotonic() - self.started
        self._thread = threading.Thread(target=self._run, name=f"samestep {self._key('')}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the checkpoint is still being written."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the end, at most `seconds`."""
        self._thread.join(seconds)

    def describe(self) -> dict[str, object]:
        """The fields of its event; valid at the end, on rank 0."""
        return {
            "checkpoint": str(self.published),
            "step": self.manifest.step,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "waited_seconds": round(self.staged_seconds, 3),
            "metric": self.manifest.metric,
            "error": self.error,
        }

    def abandon(self) -> None:
        """Write what is staged, but stop waiting for the other ranks: the run failed and they may be gone."""
        self._abandoned_at = time.monotonic()

    def _run(self) -> None:
        try:
            files = self._write_own_file()
            report = json.dumps({"files": {name: [file.bytes, file.sha256] for name, file in files.items()}})
        except Exception as error:  # noqa: BLE001  # any failure must reach all ranks
            report = json.dumps({"error": self._describe(error)})
        try:
            if self.comm.world.is_main:
                self.error = self._collect_and_publish(report)
            else:
                own = self._key(self.comm.world.rank)
                self.comm.store.set(own, report)
                (end,) = self._await([self._key("end")])
                self.comm.store.delete_key(own)
                self.error = json.loads(end)
        except Exception as error:  # noqa: BLE001  # the store ended with its host, or the run failed
            self.error = self._describe(error)
        self.seconds = time.monotonic() - self.started

    def _write_own_file(self) -> dict[str, FileRecord]:
        self.writing.mkdir(exist_ok=True)  # another node may not see yet that rank 0 created it
        if not self.staged.entries:
            return {}
        path = self.writing / self.staged.file
        return {path.name: write_verified(path, safetensors_blocks(self.staged.entries))}

    def _collect_and_publish(self, report: str) -> str | None:
        """On rank 0: publish if every rank has written its file, else clean up; post the outcome for all ranks."""
        error: str | None = None
        try:
            others = [self._key(rank) for rank in range(1, self.comm.world.size)]
            reports = [json.loads(each) for each in (report, *self._await(others))]
            if errors := [report["error"] for report in reports if "error" in report]:
                error = errors[0]
            else:
                self._publish({name: FileRecord(*file) for report in reports for name, file in report["files"].items()})
        except Exception as failure:  # noqa: BLE001  # any failure must reach all ranks
            error = self._describe(failure)
        if not self.comm.alone:
            self.comm.store.set(self._key("end"), json.dumps(error))
            # every rank has read the end of the save before: it waits for that before the next one
            self.comm.store.delete_key(self._key("end", self.number - 1))
        if error is not None:
            with suppress(OSError):  # the next run removes leftovers
                checkpoint_folder.remove_folder(self.writing)
        return error

    def _publish(self, files: dict[str, FileRecord]) -> None:
        """Complete the folder, rename it, update `latest`, and remove old checkpoints."""
        for name, file in files.items():
            path = self.writing / name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise CheckpointError(
                    f"{path} was written by another rank and is not visible here: {self.published.parent} must be on a "
                    "disk that all nodes share"
                )
        index = json.dumps(index_to_json(self.staged.index)).encode()
        files[INDEX_FILE] = write_verified(self.writing / INDEX_FILE, [index])
        state = json.dumps(self.state, allow_nan=False).encode()
        files[STATE_FILE] = write_verified(self.writing / STATE_FILE, [state])
        write_manifest(self.writing, replace(self.manifest, files=files))
        self.size = sum(file.bytes for file in files.values())
        fsync_folder(self.writing)
        self.writing.rename(self.published)
        fsync_folder(self.published.parent)
        is_latest = False
        with suppress(OSError):  # perhaps the disk is full, and removing old checkpoints frees space
            checkpoint_folder.write_latest(self.published)
            is_latest = True
        self.message = self.retention.apply(self.published)
        try:
            if not is_latest:
                checkpoint_folder.write_latest(self.published)
        except OSError as error:
            raise disk_error(error, f"{self.published} is published, but writing `latest`") from error

    def _key(self, name: str | int, number: int | None = None) -> str:
        return f"{self.store_prefix}/{self.number if number is None else number}/{name}"

    def _await(self, keys: list[str]) -> list[bytes]:
        # Poll: a blocking get would keep the training thread from using the store.
        since = time.monotonic()
        while keys and not self.comm.store.check(keys):
            now = time.monotonic()
            if self._abandoned_at is not None and now - self._abandoned_at > _TIMEOUT_AFTER_FAILURE:
                raise CheckpointError(f"{self.published.name} was not published: the run failed while it was written")
            time.sleep(poll_pause(since))
        return self.comm.store.multi_get(keys) if keys else []

    def _describe(self, error: Exception) -> str:
        action = f"writing the checkpoint {self.published} on rank {self.comm.world.rank}"
        if isinstance(error, OSError):
            return str(disk_error(error, action))
        if isinstance(error, CheckpointError):
            return str(error)
        return f"{action} failed: {type(error).__name__}: {error}"
