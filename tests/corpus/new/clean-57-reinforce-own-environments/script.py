import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Bandits:
    def __init__(self, seed, n=16):
        self.g, self.n = torch.Generator().manual_seed(seed), n

    def reset(self):
        self.state = torch.randn(self.n, 5, generator=self.g)
        return self.state

    def step(self, action):
        best = self.state[:, :3].argmax(1)
        return (action == best).float() + 0.1 * torch.randn(self.n, generator=self.g)


def global_moments(x):
    sums = torch.stack([x.sum(), (x * x).sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean, (sums[1] / sums[2] - mean**2).clamp(min=1e-6).sqrt()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    env = Bandits(seed=500 + rank)
    choose = torch.Generator().manual_seed(900 + rank)
    for update in range(16):
        logits = policy(env.reset())
        action = torch.multinomial(logits.detach().softmax(1), 1, generator=choose).squeeze(1)
        reward = env.step(action)
        mean, std = global_moments(reward)
        logp = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
        loss = -(logp * (reward - mean) / std).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 8 == 7:
            average = reward.mean()
            dist.all_reduce(average)
            if rank == 0:
                print(f"update {update}: reward {average / world:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
