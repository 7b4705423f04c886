"""The loggers that come with samestep for `Run(loggers=[...])`: TensorBoard, CSV, Weights & Biases and MLflow."""

import csv
import io
import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

from samestep.disk import write_all_or_nothing, write_atomically
from samestep.loggers.logger_thread import RunInfo
from samestep.loggers.run_files import METRICS_FILE, TensorBoardFile, open_tensorboard

TENSORBOARD_FOLDER: Final = "tensorboard"
_TRACKERS_FILE: Final = "trackers.json"  # which runs of trackers belong to the run: NAME -> id
_ids_lock = threading.Lock()


class TensorBoardLogger:
    """Writes curves for TensorBoard into `tensorboard/` of the run's folder; used if you pass no loggers."""

    requires: ClassVar = ("tensorboard", "tensorboard")

    def __init__(self) -> None:
        self._file: TensorBoardFile | None = None

    def open(self, run: RunInfo) -> None:
        """Create an event file."""
        self._file = open_tensorboard(run.folder / TENSORBOARD_FOLDER, run.warn)

    def write(self, step: int, values: Mapping[str, float], epoch: int | None) -> None:
        """Add one point per name."""
        if self._file is not None:
            self._file.write(step, values, epoch)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the pending events."""
        if self._file is not None:
            self._file.close(summary)


class CSVLogger:
    """Writes a table for spreadsheets and pandas: one row per record, with the columns `step`, `epoch` and each metric.

    A metric that appears later becomes a new column, for which samestep writes the file again. After a resume from an
    older checkpoint, rows of repeated steps come again below.
    """

    def __init__(self, name: str = "metrics.csv") -> None:
        """Write to the file `name` in the run's folder."""
        self._name = name
        self._columns = ["step", "epoch"]
        self._path: Path | None = None
        self._file = -1

    def open(self, run: RunInfo) -> None:
        """Continue the file of an earlier start, without a row that a kill has cut off."""
        self._path = run.folder / self._name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_bytes() if self._path.is_file() else b""
        complete = text[: text.rfind(b"\n") + 1]
        self._columns = next(csv.reader([complete.decode().partition("\n")[0]]), None) or self._columns
        self._connect()
        os.ftruncate(self._file, len(complete))
        if not complete:
            write_all_or_nothing(self._file, _line(self._columns))

    def write(self, step: int, values: Mapping[str, float], epoch: int | None) -> None:
        """Append one row."""
        row = {"step": step, "epoch": "" if epoch is None else epoch, **values}
        if new := [name for name in row if name not in self._columns]:
            self._add_columns(new)
        write_all_or_nothing(self._file, _line(row.get(name, "") for name in self._columns))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        del summary
        os.close(self._file)

    def _connect(self) -> None:
        assert self._path is not None
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def _add_columns(self, names: Sequence[str]) -> None:
        assert self._path is not None
        columns = [*self._columns, *names]
        header, _, rows = self._path.read_text(encoding="utf-8").partition("\n")
        del header
        tail = "," * len(names) + "\n"
        write_atomically(self._path, _line(columns).decode() + rows.replace("\n", tail))
        replaced = self._file
        self._connect()
        os.close(replaced)  # after it: if the file cannot be opened, the number must not become that of another file
        self._columns = columns


def _line(cells: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


class WandbLogger:
    """Logs to Weights & Biases. A run that starts again continues the same W&B run, whose id is in `trackers.json`.

    Charts have the step as their axis, and W&B accepts steps that come again after a resume. Without a network pass
    `mode="offline"`, and upload later with `wandb sync`.
    """

    requires: ClassVar = ("wandb", "wandb")

    def __init__(self, project: str, **options: Any) -> None:
        """Log to `project`; `options` are those of `wandb.init`, such as `entity`, `name`, `group`, `tags`, `mode`.

        By default the name is that of the run's folder, W&B's files are in the folder, and W&B does not capture
        standard output, which `logs/` has.
        """
        self._project, self._options = project, options
        self._run: Any = None
        self._next: int | None = None  # W&B's own step of the next record; None: W&B counts

    def open(self, run: RunInfo) -> None:
        """Start or continue the W&B run."""
        import wandb

        mode = self._options.get("mode") or wandb.setup().settings.mode
        is_offline = mode in ("offline", "dryrun")
        # without credentials W&B would ask for them on the terminal
        if mode in ("online", "shared", "run") and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no API key found: run `wandb login`, set WANDB_API_KEY, or pass mode='offline'")
        run.folder.mkdir(parents=True, exist_ok=True)
        ids = TrackerIds(run.folder, f"wandb/{self._project}")
        if ids.get() is None:
            ids.set(str(self._options.get("id") or secrets.token_hex(4)))
        defaults: dict[str, Any] = {
            "name": run.name,
            "dir": str(run.folder),
            "resume": "allow",
            "settings": wandb.Settings(console="off", finish_timeout=50.0),
        }
        options: dict[str, Any] = {**defaults, **self._options, "id": ids.get()}
        self._run = wandb.init(project=self._project, **options)
        self._run.config.update(_plain(run.config), allow_val_change=True)
        # W&B drops a record whose W&B step is not above the last one, so the step of training is a value.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if is_offline:
            # W&B does not know what an earlier offline start has logged, and `wandb sync --append` needs other steps.
            # Every record is a line of metrics.jsonl, too.
            self._next = _count_lines(run.folder / METRICS_FILE) if run.resumed else 0

    def write(self, step: int, values: Mapping[str, float], epoch: int | None) -> None:
        """Log one record."""
        position = {"step": step} if epoch is None else {"step": step, "epoch": epoch}
        if self._next is None:
            self._run.log({**position, **values})
        else:
            self._run.log({**position, **values}, step=self._next)
            self._next += 1

    def close(self, summary: Mapping[str, Any]) -> None:
        """Upload what is pending and set the state of the W&B run."""
        status = summary.get("status")
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflowLogger:
    """Logs to MLflow. A run that starts again continues the same MLflow run, whose id is in `trackers.json`.

    Your hyperparameters become parameters, the options of `Run` become tags. Steps that come again after a resume are
    second points at the same step.
    """

    requires: ClassVar = ("mlflow", "mlflow")

    def __init__(
        self,
        experiment: str,
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log to `experiment` on `tracking_uri`, by default MLFLOW_TRACKING_URI; `name` is that of the run."""
        self._experiment, self._uri, self._name, self._tags = experiment, tracking_uri, name, dict(tags or {})
        self._client: Any = None
        self._id = ""
        self._epoch: int | None = None

    def open(self, run: RunInfo) -> None:
        """Start or continue the MLflow run."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        ids = TrackerIds(run.folder, f"mlflow/{self._experiment}")
        known = ids.get()
        if known is None:
            experiment = self._client.get_experiment_by_name(self._experiment)
            number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            self._id = self._client.create_run(number, run_name=self._name or run.name).info.run_id
            ids.set(self._id)
        else:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")
        self._log_config(run)

    def _log_config(self, run: RunInfo) -> None:
        from mlflow.entities import Param, RunTag

        given = {name: value for name, value in run.config.items() if name != "samestep"}
        own = {f"samestep.{name}": value for name, value in run.config.get("samestep", {}).items()}
        kept = self._client.get_run(self._id).data.params
        parameters = {name: str(value)[:6000] for name, value in _flatten(given)}
        others = {name: value for name, value in parameters.items() if kept.get(name, value) != value}
        changed = [f"{name}={value} (was {kept[name]})" for name, value in others.items()]
        if changed:
            run.warn(f"MLflow keeps the first value of a parameter, but this start has {', '.join(changed)}")
        new = [Param(name, value) for name, value in parameters.items() if name not in kept]
        for batch in _batches(new, 100):
            self._client.log_batch(self._id, params=batch)
        tags = [RunTag(name, str(value)[:5000]) for name, value in _flatten({**own, **self._tags})]
        for batch in _batches(tags, 100):
            self._client.log_batch(self._id, tags=batch)

    def write(self, step: int, values: Mapping[str, float], epoch: int | None) -> None:
        """Log one record."""
        from mlflow.entities import Metric

        if epoch is not None and epoch != self._epoch:
            self._epoch, values = epoch, {**values, "epoch": float(epoch)}
        milliseconds = round(time.time() * 1000)
        metrics = [Metric(name, value, milliseconds, step) for name, value in values.items()]
        for batch in _batches(metrics, 1000):
            self._client.log_batch(self._id, metrics=batch)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Set the status of the MLflow run."""
        states = {"finished": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, states.get(str(summary.get("status")), "KILLED"))


class TrackerIds:
    """The id that a tracker has given to this run, kept in the run's folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._name = folder / _TRACKERS_FILE, name

    def get(self) -> str | None:
        """The id; None if this is the first start."""
        return self._read().get(self._name)

    def set(self, value: str) -> None:
        """Keep the id."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _ids_lock:  # another logger works in another thread
            write_atomically(self._path, json.dumps({**self._read(), self._name: value}, indent=2) + "\n")

    def _read(self) -> dict[str, str]:
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _plain(value: object) -> Any:
    """The value as JSON types, which trackers show as they are."""
    return json.loads(json.dumps(value, default=str))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested mappings, with names such as `model.depth`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch
