"""``huggingface``: the model of each complete checkpoint as files that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from stagereg.base.installed import expect_installed
from stagereg.base.sizes import ByteSize
from stagereg.base.small_files import replace_small
from stagereg.errors import ConfigError
from stagereg.extensions.interop.export import TensorOptions, export
from stagereg.extensions.interop.opening import open_checkpoint
from stagereg.registry import register

_BESIDE = (".json", ".txt", ".model", ".jinja", ".py")
_WEIGHTS = ".index.json"


class _Committed(Protocol):
    """The part of a committed checkpoint that an export reads."""

    @property
    def step(self) -> int: ...

    @property
    def path(self) -> Path | str: ...


@register("on_commit", "huggingface")
class HuggingFaceExport:
    """Writes ``model.safetensors`` of the checkpoint into a folder, beside the config and tokenizer of the model.

    The export reads the checkpoint once, in the background, tensor by tensor. A file is replaced in one step.

    Args:
        dir: the folder. With ``{step}`` in it each checkpoint gets one of its own, which nobody deletes; otherwise the
            newest replaces the one before.
        pretrained: a folder of ``save_pretrained`` whose config and tokenizer are copied (what is small and no
            weights), as ``model.config.save_pretrained(folder)`` makes it. ``None`` writes weights alone.
        model: the entry of the state that is the model.
        dtype: of floating-point tensors in the files; ``None`` for what they have.
        max_shard_size: of one file; larger models get several and an index.
        upload: a repository, ``user/name``, to which ``huggingface_hub`` uploads the folder; ``None`` for none.
    """

    def __init__(
        self,
        dir: str,
        pretrained: str | None = None,
        model: str = "model",
        dtype: torch.dtype | None = None,
        max_shard_size: ByteSize = ByteSize("5GB"),  # noqa: B008
        upload: str | None = None,
    ) -> None:
        if upload is not None:
            expect_installed("huggingface_hub", "transformers")
        if pretrained is not None and not Path(pretrained, "config.json").is_file():
            raise ConfigError(f"on_commit/huggingface: pretrained={pretrained} has no config.json")
        self.dir, self.pretrained, self.model, self.upload = dir, pretrained, model, upload
        self.options = TensorOptions(dtype, file_bytes=ByteSize(max_shard_size))

    def committed(self, checkpoint: _Committed, /) -> None:
        """Write the files, and upload them if that was asked for.

        Raises:
            CheckpointError: there is no such entry, or safetensors cannot hold it. ``OSError``.
        """
        folder = Path(self.dir.replace("{step}", str(checkpoint.step))).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with open_checkpoint(checkpoint.path) as opened:
            export(opened, self.model, folder / "model.safetensors", True, self.options)
        for each in [] if self.pretrained is None else sorted(Path(self.pretrained).expanduser().iterdir()):
            if each.suffix in _BESIDE and not each.name.endswith(_WEIGHTS) and each.is_file():
                replace_small(folder / each.name, each.read_bytes(), flush=False)
        if self.upload is not None:
            import huggingface_hub

            text = f"step {checkpoint.step}"
            huggingface_hub.HfApi().upload_folder(repo_id=self.upload, folder_path=folder, commit_message=text)
