"""``wandb``: each complete checkpoint as an artifact, by reference, of the run of Weights & Biases under way."""

from __future__ import annotations

from stagereg.base.installed import expect_installed
from stagereg.checkpoint.format.manifest import metrics_to_json
from stagereg.errors import CheckpointError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "wandb")
class WandbArtifact:
    """Logs a version of an artifact that refers to the checkpoint where it lies; nothing is uploaded.

    The program has called ``wandb.init`` on rank 0. Step, storage, size and metrics are the metadata of the version,
    and ``step-100`` is its alias. A checkpoint that is deleted later leaves a version that refers to nothing.

    Args:
        name: of the artifact; ``None`` for ``checkpoint-`` and the id of the run.
        type: of the artifact.
    """

    def __init__(self, name: str | None = None, type: str = "model") -> None:
        expect_installed("wandb", "wandb")
        self.name, self.type = name, type

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Log it. Raises: ``CheckpointError`` if there is no run."""
        import wandb

        run = wandb.run
        if run is None:
            raise CheckpointError("there is no run of wandb: call wandb.init(...) on rank 0 before the first save")
        manifest = checkpoint.manifest
        about = {
            "step": checkpoint.step,
            "storage": manifest.storage,
            "bytes": manifest.nbytes,
            **metrics_to_json(checkpoint.metrics),
        }
        artifact = wandb.Artifact(self.name or f"checkpoint-{run.id}", self.type, metadata=about)
        path = str(checkpoint.path)
        # Without checksums of its own, for which it would read every file; the manifest has them.
        artifact.add_reference(path if "://" in path else f"file://{path}", checksum=False)
        run.log_artifact(artifact, aliases=["latest", f"step-{checkpoint.step}"])
