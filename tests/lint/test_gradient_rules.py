"""Rules about wrappers find a fault in many spellings, and nothing in correct scripts like it.

A case is what comes before the loop over the batches, and the body of the loop. The line that ends with `# here` is the
one to report; cases without such a line are correct.
"""

import pytest

from tests.lint.training_script import findings_of

CASES = [
    (
        "SS201",
        """
            enc = nn.Linear(8, 8)
            model = DDP(Net())
            groups = [{"params": model.parameters()}, {"params": enc.parameters(), "lr": 1e-4}]  # here
            optimizer = torch.optim.Adam(groups)
        """,
        """
            z = enc(x)
            loss = F.cross_entropy(model(z), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS201",
        """
            import itertools
            enc = nn.Linear(8, 8)
            model = DDP(Net())
            optimizer = torch.optim.Adam(itertools.chain(model.parameters(), enc.parameters()))  # here
        """,
        """
            z = enc(x)
            loss = F.cross_entropy(model(z), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS201",
        """
            class Crit(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.w = nn.Parameter(torch.ones(2))
                def forward(self, o, y):
                    return F.cross_entropy(o * self.w, y)
            crit = Crit()
            model = DDP(Net())
            params = [*model.parameters(), *crit.parameters()]  # here
            optimizer = torch.optim.Adam(params)
        """,
        """
            loss = crit(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS201",
        """
            model = DDP(Net())
            scale = nn.Parameter(torch.ones(1))  # here
            optimizer = torch.optim.Adam(list(model.parameters()) + [scale])
        """,
        """
            loss = F.cross_entropy(model(x) * scale, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS201",
        """
            model = Net()  # here
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS201",
        """
            net = Net()
            model = DDP(net)
            net.head = nn.Linear(8, 5)  # here
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            net = Net()
            net.head = nn.Linear(8, 5)
            model = DDP(net)
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            enc = nn.Linear(8, 8).requires_grad_(False)
            model = DDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            with torch.no_grad():
                z = enc(x)
            loss = F.cross_entropy(model(z), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(0)
            enc = nn.Linear(8, 8)
            model = DDP(Net())
            optimizer = torch.optim.Adam([*model.parameters(), *enc.parameters()])
        """,
        """
            z = enc(x)
            loss = F.cross_entropy(model(z), y)
            optimizer.zero_grad()
            loss.backward()
            for p in enc.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
        """,
    ),
    (
        "SS202",
        """
            model = DDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model.module(x), y)  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS202",
        """
            def trainer_step(m, x, y):
                return F.cross_entropy(m(x), y)
            raw = Net()
            model = DDP(raw)
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = trainer_step(raw, x, y)  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS202",
        """
            model = DDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            h = model.module.features(x)  # here
            loss = h.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS202",
        """
            class T:
                def __init__(self):
                    self.net = Net()
                    self.ddp = DDP(self.net)
                    self.opt = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
                def step(self, x, y):
                    self.opt.zero_grad()
                    loss = F.cross_entropy(self.net(x), y)  # here
                    loss.backward()
                    self.opt.step()
                def run(self):
                    for epoch in range(2):
                        sampler.set_epoch(epoch)
                        for x, y in loader:
                            self.step(x, y)
            T().run()
        """,
        """""",
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                acc = model.module(x)
        """,
    ),
    (
        "",
        """
            net = Net()
            model = DDP(net)
            optimizer = torch.optim.Adam(net.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y) + 0.1 * net.head.weight.norm()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS203",
        """
            def set_seed(s):
                random.seed(s)
                torch.manual_seed(s)
                torch.cuda.manual_seed_all(s)
            set_seed(42 + rank)
            model = Net().cuda()  # here
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for n, p in model.named_parameters():
                dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
                p.grad.data /= world_size
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(42 + rank)
            model = DDP(Net())
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(42)
            model = Net()
            torch.manual_seed(42 + rank)
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(world_size)
            optimizer.step()
        """,
    ),
    (
        "SS203",
        """
            net = Net()
            model = DDP(net)
            if rank == 0:
                net.load_state_dict(torch.load("x.pt", map_location="cpu"))  # here
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            net = Net()
            if rank == 0:
                net.load_state_dict(torch.load("x.pt", map_location="cpu"))
            model = DDP(net)
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS202",
        """
            from accelerate import Accelerator
            accelerator = Accelerator()
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = DataLoader(ds, batch_size=8, shuffle=True)
            model, optimizer, train = accelerator.prepare(net, optimizer, plain)
            for epoch in range(3):
                for x, y in train:
                    loss = F.cross_entropy(net(x), y)  # here
                    optimizer.zero_grad()
                    accelerator.backward(loss)
                    optimizer.step()
        """,
        """""",
    ),
    (
        "SS201",
        """
            from lightning.fabric import Fabric
            fabric = Fabric(devices=2)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = fabric.setup_dataloaders(DataLoader(ds, batch_size=8, shuffle=True))
            optimizer = fabric.setup_optimizers(optimizer)  # here
            for epoch in range(3):
                for x, y in plain:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(net(x), y)
                    fabric.backward(loss)
                    optimizer.step()
        """,
        """""",
    ),
    (
        "SS201",
        """
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p in model.parameters():
                dist.all_reduce(p.grad)  # here
                p.grad /= world_size
        """,
    ),
]


@pytest.mark.parametrize(("code", "before", "body"), CASES)
def test_only_the_marked_line_is_reported(tmp_path, code, before, body):
    assert findings_of(tmp_path, before, body) == ([code] if code else [], [])
