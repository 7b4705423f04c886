"""Rules about unused parameters, sums of gradients and averages of weights: many spellings, and correct scripts.

A case is what comes before the loop over the batches, and the body of the loop. The line that ends with `# here` is the
one to report; cases without such a line are correct.
"""

import pytest

from tests.lint.training_script import findings_of

CASES = [
    (
        "SS204",
        """
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    if self.training and torch.rand(1).item() < self.p:
                        return self.b(x)
                    return self.b(self.a(x))
            model = DDP(M())  # here
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
        "SS204",
        """
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    drop = random.random() < self.p
                    h = x if drop else self.a(x)
                    return self.b(h)
            model = DDP(M())  # here
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
        "SS204",
        """
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    mask = x[:, 0] > 0
                    if mask.any():
                        x = self.a(x)
                    return self.b(x)
            model = DDP(M())  # here
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
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    keep = (torch.rand(len(x), 1) > self.p).float()
                    return self.b(self.a(x) * keep)
            model = DDP(M())
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
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    if random.random() < self.p:
                        h = 0.0 * self.a(x)
                    else:
                        h = self.a(x)
                    return self.b(h)
            model = DDP(M())
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
        "SS204",
        """
            class M(nn.Module):
                def __init__(self, p=0.1):
                    super().__init__()
                    self.p = p
                    self.a = nn.Linear(8, 8)  # here
                    self.b = nn.Linear(8, 2)
                def forward(self, x):
                    return self.b(x)
            model = DDP(M())
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
        "SS205",
        """
            torch.manual_seed(0)
            def sync(m):
                for p in m.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)  # here
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            sync(model)
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(0)
            def sync(m):
                for p in m.parameters():
                    dist.all_reduce(p.grad.data)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y) / world_size
            optimizer.zero_grad()
            loss.backward()
            sync(model)
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(0)
            def sync(m):
                for p in m.parameters():
                    p.grad.data = p.grad.data / world_size
                    dist.all_reduce(p.grad.data)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            sync(model)
            optimizer.step()
        """,
    ),
    (
        "SS205",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            loss = loss / dist.get_world_size()  # here
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            r = loss.detach() / world_size
            dist.all_reduce(r)
        """,
    ),
    (
        "SS208",
        """
            from torch.optim.swa_utils import AveragedModel
            net = Net()
            model = DDP(net)
            ema = AveragedModel(net)
            optimizer = torch.optim.Adam(model.parameters())
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                ema.update_parameters(net)  # here
            with torch.no_grad():
                ema(x)
        """,
    ),
    (
        "",
        """
            net = Net()
            model = DDP(net)
            ema = copy.deepcopy(net).requires_grad_(False)
            optimizer = torch.optim.Adam(model.parameters())
            for epoch in range(3):
                sampler.set_epoch(epoch)
                for i, (x, y) in enumerate(loader):
                    loss = F.cross_entropy(model(x), y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if rank == 0:
                        with torch.no_grad():
                            for e, p in zip(ema.parameters(), net.parameters()):
                                e.lerp_(p, 0.1)
            if rank == 0:
                with torch.no_grad():
                    ema(torch.zeros(2, 8))
        """,
        """""",
    ),
    (
        "SS205",
        """
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in model.head.parameters():
                dist.all_reduce(p.grad)  # here
                p.grad /= world_size
            optimizer.step()
        """,
    ),
    (
        "",
        """
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for part in (model.head, model.body):
                for p in part.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world_size
            optimizer.step()
        """,
    ),
    (
        "",
        """
            from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
            torch.manual_seed(rank)
            model = DDP(Net())
            criterion = SoftTargetCrossEntropy() if world_size > 64 else LabelSmoothingCrossEntropy(0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
]


@pytest.mark.parametrize(("code", "before", "body"), CASES)
def test_only_the_marked_line_is_reported(tmp_path, code, before, body):
    assert findings_of(tmp_path, before, body) == ([code] if code else [], [])
