import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH, WIDTH = 16, 1024


def make_teacher():
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        torch.manual_seed(1)
        torch.save(make_teacher().state_dict(), "teacher.pt")
    dist.barrier()
    with torch.device("meta"):
        teacher = make_teacher()
    teacher.load_state_dict(torch.load("teacher.pt", mmap=True), assign=True)
    teacher.requires_grad_(False).eval()

    torch.manual_seed(0)
    student = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 16, generator=torch.Generator().manual_seed(2)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            with torch.no_grad():
                targets = teacher(inputs)
            optimizer.zero_grad()
            nn.functional.mse_loss(student(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
