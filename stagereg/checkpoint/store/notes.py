"""Small files beside the checkpoints of a store: named notes, and what was logged about steps after their manifests."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping

from stagereg.checkpoint.format.manifest import METRICS, Manifest, metrics_from_json, metrics_to_json
from stagereg.checkpoint.store.backend import Backend

_log = logging.getLogger(__name__)


class Notes:
    """The notes of a store; any process reads, and the run that holds the lock writes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._late: dict[int, dict[str, float]] | None = None  # metrics by serial, once they are read
        self._late_text = "{}"  # as they are on the disk

    def read(self, name: str) -> bytes:
        """Return a note; empty if it is not there."""
        try:
            return self._backend.read(f"{self._backend.root}/{name}")
        except FileNotFoundError:
            return b""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a note in one step, safely stored; delete it if empty."""
        self._backend.replace(name, data)

    def metrics_of(self, manifest: Manifest) -> dict[str, float]:
        """Return what rank 0 has logged about the step of a checkpoint of this store, after its manifest too.

        The file with what came after is read once; a store that is written to knows it as it is.
        """
        return {**manifest.metrics, **self._late_metrics().get(manifest.serial, {})}

    def add_metrics(self, late: Mapping[int, Mapping[str, float]]) -> None:
        """Take what was logged after a manifest, by its serial; :meth:`write_metrics` writes it."""
        for serial, metrics in late.items():
            self._late_metrics().setdefault(serial, {}).update(metrics)

    def write_metrics(self, serials: Collection[int] | None = None) -> None:
        """Replace the file of what was logged after manifests, if there is something new; in one step.

        Args:
            serials: of the manifests that there are, if what was logged about others is to go.
        """
        late = self._late_metrics()
        if serials is not None:
            self._late = late = {serial: late[serial] for serial in late if serial in serials}
        text = json.dumps({serial: metrics_to_json(each) for serial, each in late.items()}, indent=1)
        if text != self._late_text:
            self.write(METRICS, f"{text}\n".encode())
            self._late_text = text

    def _late_metrics(self) -> dict[int, dict[str, float]]:
        if self._late is None:
            self._late = {}
            try:
                text = self._backend.read(f"{self._backend.root}/{METRICS}").decode().strip()
                read = json.loads(text)
                self._late = {int(serial): metrics_from_json(metrics) for serial, metrics in read.items()}
                self._late_text = text
            except FileNotFoundError:
                pass
            except (OSError, ValueError, AttributeError, RecursionError) as error:
                _log.warning("stagereg: %s/%s is passed over: %s", self._backend.root, METRICS, error)
        return self._late
