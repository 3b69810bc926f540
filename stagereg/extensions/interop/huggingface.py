"""``huggingface``: export the model of each complete checkpoint as files for ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stagereg.base.installed import expect_installed
from stagereg.base.sizes import ByteSize
from stagereg.base.small_files import replace_small
from stagereg.errors import ConfigError
from stagereg.extensions.interop.export import TensorOptions, export
from stagereg.extensions.interop.opening import open_checkpoint
from stagereg.registry import register

_COPIED = (".json", ".txt", ".model", ".jinja", ".py")  # suffixes of config and tokenizer files
_WEIGHTS = ".index.json"


@register("on_commit", "huggingface")
class HuggingFaceExport:
    """Writes the model of a checkpoint to ``model.safetensors`` in a directory, with its config and tokenizer files.

    The export reads the checkpoint once, in the background, tensor by tensor. Each file is replaced atomically.

    Args:
        dir: the target directory. With ``{step}`` in the path, each checkpoint gets its own directory, which is never
            deleted; otherwise each checkpoint replaces the previous one.
        pretrained: a directory that ``save_pretrained`` wrote, for example ``model.config.save_pretrained(path)``. Its
            config and tokenizer files are copied, without weights. ``None`` exports only the weights.
        model: the name of the state entry that contains the model.
        dtype: the dtype of all floating-point tensors in the files; ``None`` keeps the saved dtypes.
        max_shard_size: the largest size of one file; a larger model is written to several files with an index.
        upload: the repository, ``user/name``, to which ``huggingface_hub`` uploads the directory. By default, the
            directory is not uploaded.
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
            raise ConfigError(f"on_commit/huggingface: pretrained={pretrained}: expected a directory with config.json.")
        self.dir, self.pretrained, self.model, self.upload = dir, pretrained, model, upload
        self.options = TensorOptions(dtype, file_bytes=ByteSize(max_shard_size))

    def committed(self, checkpoint: Any, /) -> None:
        """Write the files of a :class:`.CommittedCheckpoint`, and upload them if ``upload`` is set.

        Raises:
            CheckpointError: the entry does not exist, or safetensors cannot store its tensors. Also ``OSError``.
        """
        folder = Path(self.dir.replace("{step}", str(checkpoint.step))).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with open_checkpoint(checkpoint.path) as opened:
            export(opened, self.model, folder / "model.safetensors", True, self.options)
        for each in [] if self.pretrained is None else sorted(Path(self.pretrained).expanduser().iterdir()):
            if each.suffix in _COPIED and not each.name.endswith(_WEIGHTS) and each.is_file():
                replace_small(folder / each.name, each.read_bytes(), flush=False)
        if self.upload is not None:
            import huggingface_hub

            text = f"step {checkpoint.step}"
            huggingface_hub.HfApi().upload_folder(repo_id=self.upload, folder_path=folder, commit_message=text)
