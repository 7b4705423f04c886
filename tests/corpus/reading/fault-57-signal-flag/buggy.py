import signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

stop = False


def request_stop(signum, frame):
    global stop
    stop = True


def main():
    signal.signal(signal.SIGUSR1, request_stop)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            opt.zero_grad()
            model(x).pow(2).mean().backward()
            opt.step()
            if stop:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
