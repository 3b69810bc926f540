"""Train a tiny language model with the Hugging Face Trainer, stop it anywhere, and start the same command again.

    torchrun --nproc-per-node=2 transformers_train.py --output-dir runs/hf --steps 12

Stop the run with SIGTERM or kill it. The next run resumes from the newest valid checkpoint, and its weights have the
same digest as after an uninterrupted run. The model comes from a config and the data from a seed, without downloads.
"""

import argparse
import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from stagereg.integrations.transformers import StageregCallback


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Samples of 8 random tokens each, the same in each run."""

    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(64, (samples, 8), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer(output_dir: str, steps: int, callbacks: list[Any], **changes: Any) -> Trainer:
    """Return a Trainer with dropout, a schedule and 2.5 epochs, so that a resume must restore all of this state."""
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(1)
    arguments = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    args = TrainingArguments(output_dir, **{**arguments, **changes})
    data = Sentences(20), Sentences(8)
    return Trainer(GPT2LMHeadModel(config), args, train_dataset=data[0], eval_dataset=data[1], callbacks=callbacks)


def digest(model: torch.nn.Module) -> str:
    """Return a digest of all bytes of the weights and buffers."""
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[name].cpu().numpy().tobytes() for name in sorted(state))).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="runs/hf")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    hf = trainer(options.output_dir, options.steps, callbacks=[StageregCallback()])
    hf.train(resume_from_checkpoint=True)
    if hf.is_world_process_zero():
        print("step", hf.state.global_step, "digest", digest(hf.model), flush=True)


if __name__ == "__main__":
    main()
