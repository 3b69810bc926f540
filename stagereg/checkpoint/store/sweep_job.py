"""Refuses a directory of checkpoints that another job of the same sweep has had: resuming from it might train nothing.

Rank 0 notes the job and its sweep in ``.sweep-job.json``. The same job and other sweeps resume as usual.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from stagereg.checkpoint.format.manifest import SWEEP_JOB
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import CheckpointError
from stagereg.launch.command_line import gives_resume, raw


def expect_own_job(store: CheckpointStore, resume: str) -> None:
    """Raise ``CheckpointError`` if another job of this sweep has had the directory, and nothing says that is meant."""
    own = _own_job()
    noted: Any = None
    if own is None or resume != "auto":
        return
    from hydra.core.hydra_config import HydraConfig

    with contextlib.suppress(ValueError):  # damaged
        noted = json.loads(store.note(SWEEP_JOB) or b"null")
    another = isinstance(noted, dict) and noted != own and noted.get("sweep") == own["sweep"]
    if another and not gives_resume(raw(HydraConfig.get().overrides.task)):
        raise CheckpointError(
            f"job {own['job']} of this sweep would go on from where job {noted.get('job')} has ended, and maybe take "
            "no step. Give each job a directory of its own, as checkpoint.dir is by default; or say that it is meant, "
            "with checkpoint.resume=auto."
        )


def note_job(store: CheckpointStore) -> None:
    """Note the job of a sweep that has the locked directory."""
    if (own := _own_job()) is not None:
        store.backend.replace(SWEEP_JOB, f"{json.dumps(own)}\n".encode())


def _own_job() -> dict[str, Any] | None:
    if "hydra.core.hydra_config" not in sys.modules:  # importing it takes 0.3 s, which a program without Hydra saves
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized() or OmegaConf.is_missing((hydra := HydraConfig.get()).job, "num"):
        return None
    return {"sweep": os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir)), "job": hydra.job.num}
