"""Writing a checkpoint beside training: each rank its own file, then one rank publishes what all have written."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from samestep.checkpoint import checkpoint_folder as catalog
from samestep.checkpoint import tensor_storage as index_file
from samestep.checkpoint.manifest import Manifest, Written, explain, remove_folder, write_checked, write_manifest
from samestep.checkpoint.tensor_storage import Staged, tensor_blocks
from samestep.disk import fsync_folder
from samestep.errors import CheckpointError

STATE: Final = "state.json"
_POLL_SECONDS: Final = 0.02
_PATIENCE_AFTER_FAILURE: Final = 5.0


@dataclass(frozen=True)
class Task:
    """One checkpoint to be written."""

    rank: int
    """This rank."""
    size: int
    """The world size."""
    store: dist.Store | None
    """Where ranks tell each other that they are done; none for one rank."""
    label: str
    """What this checkpoint is called there."""
    folder: Path
    """The folder of checkpoints."""
    writing: Path
    """Where it is written."""
    name: str
    """Under which name it is published."""
    staged: Staged
    """What this rank writes."""
    values: dict[str, object]
    """All that is no tensor; the first rank writes it."""
    manifest: Manifest
    """What is known of it, but for its files."""
    retire: Callable[[Path], str | None]
    """Removes what is too old once this one is published; may have something to tell."""


@dataclass
class Writing:
    """A checkpoint on its way to the disk; `error` is the same text on every rank, `seconds` is known at its end."""

    task: Task
    began: float
    seconds: float = 0.0
    error: str | None = None
    told: str | None = None
    _abandoned: float | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"samestep {self.task.label}", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether it is not over yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for the end, but not longer."""
        self._thread.join(seconds)

    def abandon(self) -> None:
        """The run has failed: let what is staged reach the disk, but do not wait for ranks that may be gone."""
        self._abandoned = time.monotonic()

    def _run(self) -> None:
        try:
            mine = _own_file(self.task)
            told = json.dumps({"files": {name: [file.bytes, file.sha256] for name, file in mine.items()}})
        except Exception as error:  # noqa: BLE001  # whatever it is, all ranks must hear of it
            told = json.dumps({"error": _text(error, self.task)})
        try:
            self.error = self._publish(told) if self.task.rank == 0 else self._follow(told)
        except Exception as error:  # noqa: BLE001  # the store is gone with its host, or nobody came in time
            self.error = _text(error, self.task)
        self.seconds = time.monotonic() - self.began

    def _publish(self, told: str) -> str | None:
        """On the first rank: publish if all have written, clear away if not, and tell all which."""
        error: str | None = None
        try:
            answers = [json.loads(told), *(json.loads(self._await(str(r))) for r in range(1, self.task.size))]
            if wrong := [answer["error"] for answer in answers if "error" in answer]:
                error = wrong[0]
            else:
                files = {name: Written(*file) for answer in answers for name, file in answer["files"].items()}
                self.told = publish(self.task, files)
        except Exception as failure:  # noqa: BLE001  # likewise
            error = _text(failure, self.task)
        self._post("end", json.dumps(error))
        if error is not None:
            with suppress(OSError):  # what stays here is cleared away by the next writer
                remove_folder(self.task.writing)
        return error

    def _follow(self, told: str) -> str | None:
        self._post(str(self.task.rank), told)
        return json.loads(self._await("end"))

    def _post(self, key: str, value: str) -> None:
        if self.task.store is not None:
            self.task.store.set(f"{self.task.label}/{key}", value)

    def _await(self, key: str) -> str:
        # The store serves one call at a time: to wait inside it would keep the training thread out.
        assert self.task.store is not None
        name = f"{self.task.label}/{key}"
        while not self.task.store.check([name]):
            if self._abandoned is not None and time.monotonic() - self._abandoned > _PATIENCE_AFTER_FAILURE:
                raise CheckpointError(f"{self.task.name} was not published: the run failed while it was written")
            time.sleep(_POLL_SECONDS)
        return self.task.store.get(name).decode()


def _own_file(task: Task) -> dict[str, Written]:
    task.writing.mkdir(exist_ok=True)  # another node may not see yet that the first rank has made it
    if not task.staged.entries:
        return {}
    return {task.staged.file: write_checked(task.writing / task.staged.file, tensor_blocks(task.staged.entries))}


def publish(task: Task, files: dict[str, Written]) -> str | None:
    """Complete the folder, make sure of it, give it its name; then point to it and remove what is too old."""
    for name, file in files.items():
        path = task.writing / name
        if not path.exists() or path.stat().st_size != file.bytes:
            raise CheckpointError(
                f"{path} was written by another rank and is not here: {task.folder} must lie on a disk that all nodes "
                "share"
            )
    index = json.dumps(index_file.to_record(task.staged.index)).encode()
    files[index_file.NAME] = write_checked(task.writing / index_file.NAME, [index])
    files[STATE] = write_checked(task.writing / STATE, [json.dumps(task.values, allow_nan=False).encode()])
    write_manifest(task.writing, replace(task.manifest, files=files))
    fsync_folder(task.writing)
    published = task.folder / task.name
    task.writing.rename(published)
    fsync_folder(task.folder)
    try:
        catalog.point_to(published)
    except OSError:  # the disk is full, perhaps: what is too old makes room
        told = task.retire(published)
        _point_to(published)
        return told
    return task.retire(published)


def _point_to(published: Path) -> None:
    try:
        catalog.point_to(published)
    except OSError as error:
        raise explain(error, f"{published} is published, but to let `{catalog.LATEST}` name it") from error


def _text(error: Exception, task: Task) -> str:
    doing = f"writing the checkpoint {task.folder / task.name} on rank {task.rank}"
    if isinstance(error, OSError):
        return str(explain(error, doing))
    return str(error) if isinstance(error, CheckpointError) else f"{doing} failed: {type(error).__name__}: {error}"
