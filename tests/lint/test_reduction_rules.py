"""Rules about losses, collectives and no_sync() find a fault in many spellings, and nothing in correct scripts.

A case is what comes before the loop over the batches, and the body of the loop. The line that ends with `# here` is the
one to report; cases without such a line are correct.
"""

import pytest

from tests.lint.training_script import findings_of

CASES = [
    (
        "SS206",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            per = F.cross_entropy(model(x), y, reduction="none")
            mask = (y != 0).float()
            loss = (per * mask).sum() / mask.sum()  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS206",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            per = F.cross_entropy(model(x), y, reduction="none")
            n = y.ne(-100).sum().clamp(min=1)
            loss = per.sum().div(n)  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            per = F.cross_entropy(model(x), y, reduction="sum")
            loss = per / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            per = F.cross_entropy(model(x), y, reduction="sum")
            loss = per / y.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            per = F.cross_entropy(model(x), y, reduction="none")
            n = (y > 0).sum().float()
            dist.all_reduce(n, op=dist.ReduceOp.SUM)
            loss = per.sum() / (n / world_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS211",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            z = model(x)
            out = [torch.zeros_like(z) for _ in range(world_size)]
            dist.all_gather(out, z)  # here
            loss = F.cross_entropy(z @ torch.cat(out).T, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            z = model(x)
            out = [torch.zeros_like(z) for _ in range(world_size)]
            dist.all_gather(out, z)
            out[rank] = z
            loss = F.cross_entropy(z @ torch.cat(out).T, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            z = model(x)
            loss = F.cross_entropy(z, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out = [torch.zeros_like(z) for _ in range(world_size)]
            dist.all_gather(out, z.detach())
        """,
    ),
    (
        "",
        """
            ema = Net().requires_grad_(False)
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            z = model(x)
            out = [torch.zeros_like(z) for _ in range(world_size)]
            with torch.no_grad():
                k = ema(x)
                dist.all_gather(out, k)
            loss = F.cross_entropy(z @ torch.cat(out).T, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS212",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
            if (i + 1) % 4 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "SS213",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            if i % 4 != 0:
                with model.no_sync():  # here
                    (F.cross_entropy(model(x), y) / 4).backward()
            else:
                (F.cross_entropy(model(x), y) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            if (i + 1) % 4 != 0:
                with model.no_sync():
                    (F.cross_entropy(model(x), y) / 4).backward()
            else:
                (F.cross_entropy(model(x), y) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "SS213",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            for k in range(4):
                ctx = model.no_sync() if k < 4 else contextlib.nullcontext()  # here
                with ctx:
                    loss = F.cross_entropy(model(x), y) / 4
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    (
        "SS213",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            for k in range(4):
                with model.no_sync():  # here
                    loss = F.cross_entropy(model(x), y) / 4
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    (
        "SS213",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            with model.no_sync():  # here
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    (
        "SS213",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            for k in range(4):
                model.require_backward_grad_sync = k == 0  # here
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    ),
    (
        "SS214",
        """
            ap = argparse.ArgumentParser()
            ap.add_argument("--accum", type=int, default=4)
            args = ap.parse_args()
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            last = i == len(loader) - 1
            if (i + 1) % args.accum == 0:
                ctx = contextlib.nullcontext()
            else:
                ctx = model.no_sync()  # here
            with ctx:
                (F.cross_entropy(model(x), y) / args.accum).backward()
            if (i + 1) % args.accum == 0 or last:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "SS215",
        """
            net = Net()
            for p in net.body.parameters():
                p.requires_grad = False
            model = DDP(net)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            if epoch == 1 and i == 0:
                for p in net.body.parameters():
                    p.requires_grad = True  # here
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS215",
        """
            net = Net()
            for n, p in net.named_parameters():
                if not n.startswith("head"):
                    p.requires_grad = False
            model = DDP(net)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.requires_grad_(True)  # here
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS210",
        """
            class Q(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.enc = nn.Linear(8, 8)
                    self.register_buffer("mean", torch.zeros(8))
                    self.register_buffer("steps", torch.zeros(1))
                def forward(self, x):
                    h = self.enc(x)
                    if self.training:
                        self.steps += 1
                        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)  # here
                    return h - self.mean
            model = DDP(Q())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS210",
        """
            class Q(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.enc = nn.Linear(8, 8)
                    self.register_buffer("queue", torch.zeros(64, 8))
                    self.ptr = 0
                @torch.no_grad()
                def enqueue(self, k):
                    n = k.shape[0]
                    self.queue[self.ptr : self.ptr + n] = k  # here
                    self.ptr = (self.ptr + n) % 64
                def forward(self, x):
                    h = self.enc(x)
                    l = h @ self.queue.clone().t()
                    self.enqueue(h.detach())
                    return l
            model = DDP(Q())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS213",
        """
            from lightning.fabric import Fabric
            fabric = Fabric(devices=2)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = fabric.setup_dataloaders(DataLoader(ds, batch_size=8, shuffle=True))
            model, optimizer = fabric.setup(net, optimizer)
            for epoch in range(3):
                for i, (x, y) in enumerate(plain):
                    accumulating = i % 4 != 0  # here
                    with fabric.no_backward_sync(model, enabled=accumulating):
                        loss = F.cross_entropy(model(x), y) / 4
                        fabric.backward(loss)
                    if (i + 1) % 4 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """""",
    ),
    (
        "",
        """
            from lightning.fabric import Fabric
            fabric = Fabric(devices=2)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = fabric.setup_dataloaders(DataLoader(ds, batch_size=8, shuffle=True))
            model, optimizer = fabric.setup(net, optimizer)
            for epoch in range(3):
                for i, (x, y) in enumerate(plain):
                    accumulating = (i + 1) % 4 != 0
                    with fabric.no_backward_sync(model, enabled=accumulating):
                        loss = F.cross_entropy(model(x), y) / 4
                        fabric.backward(loss)
                    if not accumulating:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """""",
    ),
    (
        "SS212",
        """
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            model = FSDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
            optimizer.step()
        """,
    ),
    (
        "",
        """
            from torch.distributed.fsdp import fully_shard
            model = Net()
            for m in model.body:
                fully_shard(m)
            fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    ),
    (
        "SS215",
        """
            from accelerate import Accelerator
            accelerator = Accelerator()
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = DataLoader(ds, batch_size=8, shuffle=True)
            net.body.requires_grad_(False)
            model, optimizer, train = accelerator.prepare(net, optimizer, plain)
            net.body.requires_grad_(True)  # here
            for epoch in range(3):
                for x, y in train:
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    accelerator.backward(loss)
                    optimizer.step()
        """,
        """""",
    ),
]


@pytest.mark.parametrize(("code", "before", "body"), CASES)
def test_only_the_marked_line_is_reported(tmp_path, code, before, body):
    assert findings_of(tmp_path, before, body) == ([code] if code else [], [])
