"""An ordinary training script for torch's DistributedDataParallel.  It knows nothing of Lockstep.

lockstep run --nproc 2 examples/plain_ddp.py       # runs on Lockstep, unchanged
torchrun --nproc-per-node 2 examples/plain_ddp.py  # runs on torch's own class
python examples/plain_ddp.py                       # a world of one
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # One batch for the whole world, of which each rank takes its part: any number of ranks learns the same.
    inputs = torch.randn(24, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    own_inputs, own_targets = inputs[rank::world], targets[rank::world]
    for _ in range(options.steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(own_inputs), own_targets).backward()
        optimizer.step()

    if rank == 0:
        with torch.no_grad():
            loss = nn.functional.mse_loss(model.module(inputs), targets).item()
        print(f"world {world}, loss {loss:.6f} after {options.steps} steps, wrapped by {type(model).__module__}")
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads still let go of Python objects; a regular exit right now may abort


if __name__ == "__main__":
    main()
