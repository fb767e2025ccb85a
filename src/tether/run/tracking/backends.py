"""The four trackers behind one protocol. Each package is imported only when it is used.

Nothing leaves the machine unless the tracker's own environment variables say so: Weights & Biases
is offline, MLflow and Trackio keep their files in the run, and what these packages would tell
their makers is switched off. A variable that the user has set is never overruled.
"""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tether.errors import UserError

NAMES = ("tensorboard", "wandb", "trackio", "mlflow")
PROJECT = "tether"
MAX_PARAMS = 100  # that MLflow takes in one call

QUIET = {
    "wandb": {
        "WANDB_MODE": "offline",
        "WANDB_CONSOLE": "off",
        "WANDB_SILENT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_X_DISABLE_META": "true",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_X_DISABLE_MACHINE_INFO": "true",
        "WANDB_X_SAVE_REQUIREMENTS": "false",
    },
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
    "trackio": {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"},
}


@runtime_checkable
class Sink(Protocol):
    """One run in one tracker. Opened with the same `key`, it continues that run."""

    key: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def flush(self) -> None:
        """Make what was logged survive the end of this process."""
        ...

    def close(self) -> None: ...


def open_sink(
    tracker: str, name: str, folder: Path, config: Mapping[str, Any], key: str | None
) -> Sink:
    """Start a run called `name`, or continue the one of that key."""
    for variable, value in QUIET.get(tracker, {}).items():
        os.environ.setdefault(variable, value)
    try:
        match tracker:
            case "tensorboard":
                return TensorBoard(folder)
            case "wandb":
                return WandB(name, folder, config, key)
            case "trackio":
                return Trackio(name, folder, config, key)
            case "mlflow":
                return MLflow(name, folder, config, key)
    except ModuleNotFoundError as error:
        if error.name != tracker:
            raise
        raise UserError(
            f"{tracker} is not installed: pip install {tracker}, or '.[trackers]' in tether's "
            f"source folder for all of them."
        ) from None
    raise ValueError(tracker)


class TensorBoard:
    """Event files in the tracker's folder, by TensorBoard's own writer: no torch, no TensorFlow."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event: Any = vars(event_pb2)["Event"]  # made when the module is imported
        self.summary: Any = vars(summary_pb2)["Summary"]
        self.key = folder.name  # every file in the folder is a part of the same run
        self.writer = EventFileWriter(str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self.summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        event = self.event(wall_time=time.time(), step=step, summary=self.summary(value=values))
        self.writer.add_event(event)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Steps are a column of their own: wandb drops what comes for a step before its newest."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], key: str | None):
        import wandb  # pyright: ignore[reportMissingImports]

        self.key = key or uuid.uuid4().hex[:12]
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", name),
            id=self.key,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(folder)),
            config=dict(config),
        )
        self.run.define_metric("*", step_metric="iteration")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"iteration": step, **numbers})

    def flush(self) -> None:
        """Its own process has everything already."""

    def close(self) -> None:
        self.run.finish()


class Trackio:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], key: str | None):
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        import trackio  # pyright: ignore[reportMissingImports]

        self.key = key or f"{name}-{uuid.uuid4().hex[:6]}"
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.key,
            resume="allow",
            config=dict(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def flush(self) -> None:
        """It writes from a thread of its own, twice a second."""

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """By the plain client, which adds no user, host, source file or git commit."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], key: str | None):
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve() / 'mlflow.db'}")
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self.metric, self.client = Metric, MlflowClient()
        self.key = key or self._begin(name, config, Param)
        self.client.update_run(self.key, status="RUNNING")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(name, x, now, step) for name, x in numbers.items()]
        self.client.log_batch(self.key, metrics=metrics, synchronous=True)

    def flush(self) -> None:
        """Every call waits until it is written."""

    def close(self) -> None:
        self.client.set_terminated(self.key)

    def _begin(self, name: str, config: Mapping[str, Any], param: type) -> str:
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        key = self.client.create_run(experiment, run_name=name).info.run_id
        params = [param(field, str(value)) for field, value in _flat(config).items()]
        for i in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(key, params=params[i : i + MAX_PARAMS])
        return key


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, Mapping) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found
