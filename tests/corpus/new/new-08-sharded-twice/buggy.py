import torch
import torch.nn as nn
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset, Subset


class Trajectories(Dataset):
    def __init__(self, n=256, horizon=5):
        g = torch.Generator().manual_seed(6)
        self.state = torch.randn(n, horizon, 4, generator=g)
        self.action = torch.tanh(self.state.cumsum(1)[..., :2])

    def __len__(self):
        return self.state.shape[0]

    def __getitem__(self, i):
        return {"obs": self.state[i], "act": self.action[i]}


class Policy(nn.Module):
    def __init__(self, d=4, a=2, hidden=28):
        super().__init__()
        self.rnn = nn.GRU(d, hidden, batch_first=True)
        self.mu = nn.Linear(hidden, a)

    def forward(self, obs):
        h, _ = self.rnn(obs)
        return torch.tanh(self.mu(h))


def load_split(accelerator):
    full = Trajectories()
    # keep only this process' part in memory
    mine = range(accelerator.process_index, len(full), accelerator.num_processes)
    return Subset(full, mine)


def behaviour_cloning(epochs=2):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(14)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    loader = DataLoader(load_split(accelerator), batch_size=8, shuffle=True)
    policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
    for epoch in range(epochs):
        seen, loss_sum = 0, 0.0
        for batch in loader:
            loss = (policy(batch["obs"]) - batch["act"]).abs().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            seen += len(batch["act"])
            loss_sum += loss.item()
        accelerator.print(f"[bc] epoch {epoch} l1 {loss_sum / len(loader):.4f} ({seen} trajectories on this process)")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    behaviour_cloning()
