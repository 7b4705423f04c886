import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def actor_critic():
    actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    return actor, critic


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(5)
    actor, critic = actor_critic()
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    actor, actor_opt = fabric.setup(actor, actor_opt)
    critic, critic_opt = fabric.setup(critic, critic_opt)

    g = torch.Generator().manual_seed(1)
    obs = torch.randn(128, 5, generator=g)
    data = TensorDataset(obs, torch.randint(0, 2, (128,), generator=g), obs.sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    for epoch in range(2):
        for x, action, ret in loader:
            value = critic(x)
            critic_loss = nn.functional.mse_loss(value, ret)
            critic_opt.zero_grad()
            fabric.backward(critic_loss)
            critic_opt.step()
            advantage = (ret - value.detach()).squeeze(1)
            logp = nn.functional.log_softmax(actor(x), dim=1).gather(1, action[:, None]).squeeze(1)
            actor_loss = -(logp * advantage).mean()
            actor_opt.zero_grad()
            fabric.backward(actor_loss)
            actor_opt.step()
        fabric.print(f"epoch {epoch}: critic {critic_loss.item():.3f}")


if __name__ == "__main__":
    main()
