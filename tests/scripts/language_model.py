"""GPT-2 of transformers on texts of different lengths: padded per batch, the mean over real tokens, dropout 0.1."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--attention", default="sdpa", help="sdpa or eager")
args = parser.parse_args()

VOCABULARY, LONGEST = 32, 16
LIMITS = (0, VOCABULARY), (1, 4), (3, LONGEST + 1)  # of the first token, the step to the next one, and the length


class Texts(Dataset):
    """Synthetic texts of 3 to 16 tokens, in which each token depends on the one before it."""

    def __init__(self, count):
        rng = torch.Generator().manual_seed(0)
        self.texts = []
        for _ in range(count):
            start, step, length = (int(torch.randint(low, high, (), generator=rng)) for low, high in LIMITS)
            self.texts.append((start + step * torch.arange(length)) % VOCABULARY)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def collate(texts):
    """Pad to the longest text of the batch."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


def token_losses(model, tokens, attention_mask):
    """The loss of every token, and which of them are not padding."""
    logits = model(input_ids=tokens, attention_mask=attention_mask).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses, attention_mask[:, 1:].bool()


with Run(global_batch=20, seed=0, folder=args.out) as run:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, attn_implementation=args.attention, use_cache=False,
    )  # fmt: skip
    gpt = GPT2LMHeadModel(config)
    model = run.wrap(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = run.shard(Texts(70), shuffle=True, collate_fn=collate, micro_batch=args.micro_batch)

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for tokens, attention_mask in step:
                losses, mask = token_losses(model, tokens, attention_mask)
                step.mean(losses, mask=mask).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        with run.evaluate(model) as net:
            loss = run.mean(losses[mask] for losses, mask in (token_losses(net, *batch) for batch in train))
        run.log({"epoch/loss_per_token": loss}, step=epoch.number)

    run.once(torch.save, gpt.state_dict(), run.folder / "weights.pt")
