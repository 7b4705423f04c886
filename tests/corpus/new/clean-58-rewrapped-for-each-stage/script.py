import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run_stage(model, data, batch_size, lr, epochs):
    wrapped = DDP(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=lr, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"stage-{len(trainable)}.pt")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.randn(144, 7, generator=torch.Generator().manual_seed(8))
    data = TensorDataset(x, x[:, 2:5].argmax(1))
    model.requires_grad_(False)
    for stage, first in enumerate((4, 2, 0)):
        model[first].requires_grad_(True)
        run_stage(model, data, 8 + stage * 4, 0.05 / (stage + 1), range(2 * stage, 2 * stage + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
