"""torchtitan's optimizers, schedule and loader with stagereg: ``torchrun --nproc-per-node=2 torchtitan_train.py``.

torchtitan's ``Trainer`` needs a GPU. This program makes the same calls in the same order on CPU. Stop and restart it.
"""

import argparse
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from stagereg.integrations.torchtitan import StageregCheckpointManager


class Count(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A counter with a state: the data of a rank, and the training state that torchtitan's Trainer saves."""

    step = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.step += 1
            yield torch.sin(torch.arange(8.0) * self.step)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="outputs")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[adamw], implementation="for-loop").build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=60)
    rank, progress = dist.get_rank(), Count()
    loader = ParallelAwareDataloader(Count(), rank, dist.get_world_size(), batch_size=4)
    checkpointer = StageregCheckpointManager.Config(enable=True, interval=5, last_save_model_only=False).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=given.dir,
    )
    checkpointer.load(step=-1)
    for step, batch in zip(range(progress.step + 1, given.steps + 1), loader, strict=False):
        progress.step = step
        optimizers.zero_grad()
        loss = (model(batch + rank) - batch.flip(-1)).square().mean()
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedule.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        checkpointer.save(step, last_step=step == given.steps)
    checkpointer.close()
    weights = torch.cat([x.full_tensor().flatten() for x in model.state_dict().values()])
    if rank == 0:
        print("digest", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
