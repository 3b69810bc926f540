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


def take_for_job(store: CheckpointStore, resume: str) -> None:
    """Note the job of a sweep that has the locked directory. Raises: ``CheckpointError`` if another job had it."""
    if "hydra.core.hydra_config" not in sys.modules:  # importing it takes 0.3 s, which a program without Hydra saves
        return
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized() or OmegaConf.is_missing((hydra := HydraConfig.get()).job, "num"):
        return
    own = {"sweep": os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir)), "job": hydra.job.num}
    noted: Any = None
    with contextlib.suppress(ValueError):  # damaged
        noted = json.loads(store.note(SWEEP_JOB) or b"null")
    another = isinstance(noted, dict) and noted != own and noted.get("sweep") == own["sweep"]
    if another and resume == "auto" and not gives_resume(raw(hydra.overrides.task)):
        raise CheckpointError(
            f"job {own['job']} of this sweep would go on from where job {noted.get('job')} has ended, and maybe take "
            "no step. Give each job a directory of its own, as checkpoint.dir is by default; or say that it is meant, "
            "with checkpoint.resume=auto."
        )
    store.backend.replace(SWEEP_JOB, f"{json.dumps(own)}\n".encode())
