import logging
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_logger(folder, main=True):
    os.makedirs(folder, exist_ok=True)
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not main:
        logger.addHandler(logging.NullHandler())
        return logger
    handler = logging.FileHandler(os.path.join(folder, "train.log"), mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger


def main():
    accelerator = Accelerator(cpu=True)
    logger = get_logger("work_dir", accelerator.is_main_process)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(128, 9, generator=g)
    model = nn.Sequential(nn.Linear(9, 18), nn.SELU(), nn.Linear(18, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True).tanh()), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for step, (bx, by) in enumerate(loader):
            loss = nn.functional.smooth_l1_loss(model(bx), by)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                mean = accelerator.reduce(loss.detach(), "mean")
                logger.info("epoch %d step %d loss %.4f", epoch, step, mean)
    accelerator.end_training()


if __name__ == "__main__":
    main()
