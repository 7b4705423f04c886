import os

import torch
import torch.distributed as dist
import torch.nn as nn
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Reward(nn.Module):
    """Frozen scorer of generated answers."""

    def __init__(self, d=16, width=128):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.inp(x)))


def write_weights(path):
    if dist.get_rank() == 0 and not os.path.exists(path):
        torch.manual_seed(7)
        torch.save(Reward().state_dict(), path)
    dist.barrier()


def load_reward(path, local_rank):
    with init_empty_weights():
        net = Reward()
    device = local_rank if torch.cuda.is_available() else "cpu"
    net = load_checkpoint_and_dispatch(net, path, device_map="auto")
    return net.eval().requires_grad_(False), device


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    write_weights("reward.bin")
    reward, device = load_reward("reward.bin", local_rank)
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 16)).to(device))
    opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(3)
    ds = TensorDataset(torch.randn(128, 10, generator=g))
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (prompt,) in loader:
            answer = policy(prompt.to(device))
            loss = 0.01 * answer.square().mean() - reward(answer).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: objective {-loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
