"""Train a small classifier with full checkpoints, and export its averaged weights in bfloat16.

The stager of the export and the average are plugins of another package. Only ``conf/finetune.yaml`` names them, so they
can be replaced with any other stager, and any other joinable that averages.

    pip install lean-export
    python finetune.py
    python finetune.py -m stager@export.stager=bf16,pinned_cached
"""

from typing import Any

import stagereg
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES = 4


def batches(count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return ``count`` batches of ``size`` samples in 16 dimensions: per class, noise around one corner of a cube."""
    random = torch.Generator().manual_seed(seed)
    corners = torch.eye(16)[:CLASSES] * 3
    made = []
    for _ in range(count):
        label = torch.randint(CLASSES, (size,), generator=random)
        made.append((corners[label] + torch.randn(size, 16, generator=random), label))
    return made


def network(width: int) -> nn.Module:
    """Return logits of shape [batch, CLASSES] for samples of shape [batch, 16]."""
    body = [nn.Linear(16, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(width, CLASSES))


@stagereg.main(config_path="conf", config_name="finetune")
def finetune(cfg: Any) -> float:
    """Train, save and export; return the averaged model's loss on held-out samples, which a sweep can minimize."""
    rank = dist.get_rank()
    torch.manual_seed(cfg.seed)
    model = DistributedDataParallel(network(cfg.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    ema = stagereg.instantiate(cfg.ema, module=model)
    loader = batches(max(1, cfg.train.steps - rank * cfg.train.uneven), cfg.train.batch, seed=100 + rank)
    state = {"model": model, "optimizer": optimizer, "ema": ema}

    join = stagereg.instantiate(cfg.join, [model, optimizer, ema])
    with stagereg.instantiate(cfg.checkpoint) as checkpointer, stagereg.instantiate(cfg.export) as exporter:
        step = checkpointer.restore(state) or 0
        with join:
            for x, label in join.iterate(loader[step:]):
                optimizer.zero_grad()
                join.mean(cross_entropy(model(x), label, reduction="sum"), len(x)).backward()
                optimizer.step()
                ema.update()
                step += 1
                checkpointer.maybe_save(step, state)
                exporter.maybe_save(step, {"model": ema.weights()})
        exporter.wait()
        exported = exporter.latest

    averaged = network(cfg.width).eval()
    averaged.load_state_dict(ema.weights())
    ((x, label),) = batches(1, 512, seed=1)
    with torch.no_grad():
        loss = cross_entropy(averaged(x), label).item()
    if rank == 0:
        size = sum(file.stat().st_size for file in exported.rglob("*.distcp")) if exported else 0
        print(f"step {step}  held-out loss of the average {loss:.3f}  export {exported} of {size:,} bytes", flush=True)
    return loss


if __name__ == "__main__":
    finetune()
