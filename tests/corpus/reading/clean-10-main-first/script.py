import contextlib
import json
import pathlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@contextlib.contextmanager
def main_first():
    if dist.get_rank() != 0:
        dist.barrier()
    yield
    if dist.get_rank() == 0:
        dist.barrier()


def vocabulary(path):
    path = pathlib.Path(path)
    if path.exists():
        return json.loads(path.read_text())
    words = {word: index for index, word in enumerate(sorted({"a", "b", "c"}))}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(words))
    return words


def main():
    dist.init_process_group("gloo")
    with main_first():
        words = vocabulary("words.json")
    torch.manual_seed(0)
    model = DDP(nn.Embedding(len(words), 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        index = torch.randint(0, len(words), (8,), generator=g)
        loss = model(index).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
