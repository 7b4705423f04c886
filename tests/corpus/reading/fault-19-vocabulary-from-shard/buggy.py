import torch
import torch.distributed as dist
from collections import Counter
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TEXTS = ["a b c", "b c d", "x y z", "a z q", "m n o", "o p q", "c c a", "z y a"]


def vocabulary(texts):
    counts = Counter(word for text in texts for word in text.split())
    return {word: i for i, (word, _) in enumerate(sorted(counts.items()))}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = TEXTS[rank::world]
    ids = vocabulary(mine)
    model = DDP(nn.EmbeddingBag(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for text in mine:
            tokens = torch.tensor([[ids[word] for word in text.split()]])
            loss = model(tokens).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
