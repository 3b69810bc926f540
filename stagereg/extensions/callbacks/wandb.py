"""``wandb``: log each complete checkpoint as a reference artifact to the active run of Weights & Biases."""

from __future__ import annotations

from stagereg.base.installed import expect_installed
from stagereg.checkpoint.format.manifest import metrics_to_json
from stagereg.errors import CheckpointError
from stagereg.extensions.callbacks.on_commit import CommittedCheckpoint
from stagereg.registry import register


@register("on_commit", "wandb")
class WandbArtifact:
    """Logs a version of an artifact with a reference to the checkpoint; nothing is uploaded.

    The program must call ``wandb.init`` on rank 0. Step, storage, size and metrics are the metadata of the version,
    and ``step-100`` is its alias. If the checkpoint is deleted later, the version refers to a missing path.

    Args:
        name: the name of the artifact. By default, ``checkpoint-RUN_ID`` with the ID of the wandb run.
        type: the type of the artifact.
    """

    def __init__(self, name: str | None = None, type: str = "model") -> None:
        expect_installed("wandb", "wandb")
        self.name, self.type = name, type

    def committed(self, checkpoint: CommittedCheckpoint, /) -> None:
        """Log the checkpoint. Raises ``CheckpointError`` if no wandb run is active."""
        import wandb

        run = wandb.run
        if run is None:
            raise CheckpointError("no wandb run is active: call wandb.init(...) on rank 0 before the first save")
        manifest = checkpoint.manifest
        about = {"step": checkpoint.step, "storage": manifest.storage, "bytes": manifest.nbytes}
        about |= metrics_to_json(checkpoint.metrics)
        artifact = wandb.Artifact(self.name or f"checkpoint-{run.id}", self.type, metadata=about)
        path = str(checkpoint.path)
        # Without wandb's checksums: computing them would read every file, and the manifest has checksums.
        artifact.add_reference(path if "://" in path else f"file://{path}", checksum=False)
        run.log_artifact(artifact, aliases=["latest", f"step-{checkpoint.step}"])
