import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset


class TokenTagger(nn.Module):
    def __init__(self, vocab=50, tags=6, dim=14):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, tags)

    def forward(self, ids):
        return self.out(self.enc(self.emb(ids))[0])


def corpus(n=128, length=7):
    g = torch.Generator().manual_seed(81)
    ids = torch.randint(0, 50, (n, length), generator=g)
    return TensorDataset(ids, ids % 6)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    model = TokenTagger().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    scheduler = LinearLR(optimizer, start_factor=0.2, total_iters=10)
    loader = DataLoader(corpus(), batch_size=8, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)

    for epoch in range(2):
        model.train()
        total = 0.0
        for ids, tags in loader:
            optimizer.zero_grad()
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "tagger.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
