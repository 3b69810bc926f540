"""Trains a small transformer on a file of tokens, in the way of nanoGPT: docs/nanogpt.md makes it resumable.

torchrun --standalone --nproc-per-node=2 train.py --max_iters=200
"""

import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

out_dir = "out"
resume = False
eval_interval, eval_iters = 10, 2
max_iters = 100
gradient_accumulation_steps = 4  # of all ranks together
batch_size, block_size = 4, 16
vocab_size, n_embd, n_head, dropout = 64, 16, 2, 0.1
learning_rate, warmup_iters, lr_decay_iters = 1e-2, 5, 100
for argument in sys.argv[1:]:  # --name=value
    name, _, value = argument.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)

ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group()
    torch.manual_seed(1337 + dist.get_rank())
    gradient_accumulation_steps //= dist.get_world_size()
master_process = not ddp or dist.get_rank() == 0
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attention = nn.MultiheadAttention(n_embd, n_head, dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        h = self.before(x)
        x = x + self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.body = nn.Sequential(nn.Dropout(dropout), Block(), Block(), nn.LayerNorm(n_embd))
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, x, targets):
        logits = self.head(self.body(self.token(x) + self.place.weight[: x.shape[1]]))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    data = np.memmap(f"{split}.bin", np.uint16, "r")
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    tokens = torch.from_numpy(np.stack([data[start : start + block_size + 1] for start in starts]).astype(np.int64))
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {split: [model(*get_batch(split))[1].item() for _ in range(eval_iters)] for split in ("train", "val")}
    model.train()
    return {split: sum(each) / eval_iters for split, each in losses.items()}


def get_lr(it):
    progress = min(1.0, it / lr_decay_iters)
    return learning_rate * min(1.0, (it + 1) / warmup_iters) * (0.55 + 0.45 * math.cos(math.pi * progress))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
iter_num, best_val_loss = 0, math.inf
if resume:
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if ddp:
    model = DistributedDataParallel(model)

X, Y = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)
        if losses["val"] < best_val_loss and iter_num > 0:
            best_val_loss = losses["val"]
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint |= {"iter_num": iter_num, "best_val_loss": best_val_loss}
            os.makedirs(out_dir, exist_ok=True)
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:  # gradients are reduced with the last one
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        X, Y = get_batch("train")  # the next one, while the device computes
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    dist.destroy_process_group()
