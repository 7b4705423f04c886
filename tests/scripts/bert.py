"""BERT from transformers, fine-tuned to classify sentences, with the dropout of its configuration (0.1)."""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

from samestep import Run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--micro-batch", type=int)
parser.add_argument("--attention", default="eager", help="eager or sdpa")
args = parser.parse_args()


class Sentences(Dataset):
    """Sentences of 12 tokens; the label says which of two tokens comes first."""

    def __init__(self, count, seed):
        rng = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(2, 40, (count, 12), generator=rng)
        places = torch.rand(count, 11, generator=rng).argsort(1)[:, :2] + 1
        self.tokens.scatter_(1, places, torch.tensor([[0, 1]]).expand(count, 2))
        self.labels = (places[:, 0] < places[:, 1]).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(12, dtype=torch.int64),
            "labels": self.labels[index],
        }


with Run(global_batch=20, seed=0, folder=args.out) as run:
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12, attn_implementation=args.attention,
    )  # fmt: skip
    bert = BertForSequenceClassification(config)
    model = run.wrap(bert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = run.shard(Sentences(70, seed=0), shuffle=True, micro_batch=args.micro_batch)
    test = run.shard(Sentences(33, seed=1))
    warmup = train.steps_per_epoch
    scheduler = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / warmup))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train}
    checkpoint = run.checkpoint(args.out / "checkpoints", **parts)  # continues, if there is one

    for epoch in train.epochs(args.epochs):
        for step in epoch:
            for batch in step:
                labels = batch.pop("labels")  # with labels the model would return one mean for the whole batch
                losses = cross_entropy(model(**batch).logits, labels, reduction="none")
                step.mean(losses).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        with run.evaluate(model) as net:
            accuracy = run.mean(
                net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1) == batch["labels"]
                for batch in test
            )
        run.log({"test/accuracy": accuracy}, step=epoch.number)
        checkpoint.save()

    run.once(torch.save, bert.state_dict(), run.folder / "weights.pt")
