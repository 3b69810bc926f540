"""``mlflow``: where each complete checkpoint lies, with its metrics, in a run of MLflow."""

from __future__ import annotations

from stagereg.base.installed import expect_installed
from stagereg.checkpoint.format.manifest import metrics_to_json
from stagereg.errors import CheckpointError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "mlflow")
class MlflowArtifact:
    """Logs ``checkpoints/step-00000100.json`` to a run: path, step, metrics, size; the files too, if asked to.

    Args:
        run_id: of the run; ``None`` for the one that is active on rank 0 when the checkpointer is made, or, if none is,
            the one that was active last.
        upload: whether to upload the files of the checkpoint, which lies in a directory then, to
            ``checkpoints/step-00000100``.
    """

    def __init__(self, run_id: str | None = None, upload: bool = False) -> None:
        expect_installed("mlflow", "mlflow")
        import mlflow

        active = mlflow.active_run()  # of this thread, and not of the one that calls
        self.run_id = run_id if run_id is not None or active is None else active.info.run_id
        self.upload = upload

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Log it. Raises: ``CheckpointError`` if there is no run, or a URL is to be uploaded."""
        import mlflow

        last = None if self.run_id is not None else mlflow.last_active_run()
        run_id = self.run_id or (last and last.info.run_id)
        if run_id is None:
            raise CheckpointError("there is no run of MLflow: call mlflow.start_run() before the checkpointer is made")
        name, manifest = f"checkpoints/step-{checkpoint.step:08}", checkpoint.manifest
        client = mlflow.MlflowClient()
        if self.upload:
            if isinstance(checkpoint.path, str):
                raise CheckpointError(f"{checkpoint.path} is a URL, and only files of a directory can be uploaded")
            client.log_artifacts(run_id, str(checkpoint.path), name)
        about = {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "storage": manifest.storage,
            "bytes": manifest.nbytes,
            "metrics": metrics_to_json(checkpoint.metrics),
        }
        client.log_dict(run_id, about, f"{name}.json")
