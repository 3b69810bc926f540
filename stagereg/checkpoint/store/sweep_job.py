"""Prevents a Hydra sweep job from resuming in another job's directory, which would mix two combinations of overrides.

Rank 0 records the sweep, the job number and the combination of overrides in ``.sweep-job.json``. A job with the same
combination resumes as usual, even in another sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from stagereg.base.overrides import Identity, gives_resume, raw
from stagereg.checkpoint.format.manifest import SWEEP_JOB
from stagereg.checkpoint.store.checkpoint_store import CheckpointStore
from stagereg.errors import MALFORMED, CheckpointError


def expect_own_job(store: CheckpointStore, resume: str) -> None:
    """Raise ``CheckpointError`` if another sweep job has used the directory, unless the user gave ``resume``.

    Another job is a job with another combination of overrides, or with another number in the same sweep.
    """
    own = _own_job()
    noted: dict[str, str] | None = None
    if own is None or resume != "auto":
        return
    from hydra.core.hydra_config import HydraConfig

    with contextlib.suppress(*MALFORMED):
        noted = {key: str(value) for key, value in json.loads(store.note(SWEEP_JOB) or b"null").items()}
    if noted is None or gives_resume(raw(HydraConfig.get().overrides.task)):
        return
    here, combination = noted.get("sweep") == own["sweep"], noted.get("combination")
    if combination == own["combination"] and not (here and noted.get("job") != str(own["job"])):
        return
    of = "" if combination == own["combination"] else f", which ran with {combination} instead of {own['combination']}"
    raise CheckpointError(
        f"job {own['job']} of this sweep would resume from the checkpoints of job {noted.get('job')}"
        f"{'' if here else ' of ' + str(noted.get('sweep'))}{of}. Give each job its own directory, which is the "
        "default of checkpoint.dir. If resuming is intended, add checkpoint.resume=auto to the command."
    )


def note_job(store: CheckpointStore) -> None:
    """Record in the checkpoint directory that this sweep job uses it. The directory must be locked."""
    if (own := _own_job()) is not None:
        store.backend.replace(SWEEP_JOB, f"{json.dumps(own)}\n".encode())


def _own_job() -> dict[str, Any] | None:
    if "hydra.core.hydra_config" not in sys.modules:  # importing Hydra takes 0.3 s
        return None
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized() or OmegaConf.is_missing((hydra := HydraConfig.get()).job, "num"):
        return None
    sweep = os.path.join(hydra.runtime.cwd, str(hydra.sweep.dir))
    return {"sweep": sweep, "job": hydra.job.num, "combination": str(Identity.of(raw(hydra.overrides.task)))}
