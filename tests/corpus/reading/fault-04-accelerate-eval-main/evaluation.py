import torch


@torch.no_grad()
def evaluate(model, loader, accelerator):
    model.eval()
    correct = total = 0
    for x, y in loader:
        guess = model(x).argmax(dim=-1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        correct += (guess == y).sum().item()
        total += y.numel()
    model.train()
    return correct / total
