import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def train(model, optimizer, loader, epochs):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        norm = norm.full_tensor()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: norm {norm.item():.3f}", flush=True)


def main():
    dist.init_process_group("gloo")
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model, optimizer = build()
    train(model, optimizer, loader, range(1))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")

    model, optimizer = build()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, loader, range(1, 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
