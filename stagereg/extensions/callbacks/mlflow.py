"""``mlflow``: log the path and the metrics of each complete checkpoint to a run of MLflow."""

from __future__ import annotations

from stagereg.base.installed import expect_installed
from stagereg.checkpoint.format.manifest import metrics_to_json
from stagereg.errors import CheckpointError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "mlflow")
class MlflowArtifact:
    """Logs a file ``checkpoints/step-00000100.json`` with the checkpoint's path, step, metrics and size to a run.

    Args:
        run_id: the ID of the MLflow run. By default, the run that is active on rank 0 when the checkpointer is
            constructed; if no run is active then, the last active run.
        upload: whether to upload also the files of the checkpoint, to ``checkpoints/step-00000100``. Requires a
            checkpoint directory that is a path, not a URL.
    """

    def __init__(self, run_id: str | None = None, upload: bool = False) -> None:
        expect_installed("mlflow", "mlflow")
        import mlflow

        active = mlflow.active_run()  # depends on the thread, and ``committed`` runs on another thread
        self.run_id = run_id if run_id is not None or active is None else active.info.run_id
        self.upload = upload

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Log the checkpoint. Raises ``CheckpointError`` if no run exists, or with ``upload`` if the path is a URL."""
        import mlflow

        last = None if self.run_id is not None else mlflow.last_active_run()
        run_id = self.run_id or (last and last.info.run_id)
        if run_id is None:
            raise CheckpointError("no MLflow run is active: call mlflow.start_run() before Checkpointer(...)")
        name, manifest = f"checkpoints/step-{checkpoint.step:08}", checkpoint.manifest
        client = mlflow.MlflowClient()
        if self.upload:
            if isinstance(checkpoint.path, str):
                raise CheckpointError(f"{checkpoint.path} is a URL, but upload=true requires a local directory")
            client.log_artifacts(run_id, str(checkpoint.path), name)
        about = {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "storage": manifest.storage,
            "bytes": manifest.nbytes,
            "metrics": metrics_to_json(checkpoint.metrics),
        }
        client.log_dict(run_id, about, f"{name}.json")
