"""Rules about optimizers and accumulation find a fault in many spellings, and nothing in correct scripts like it.

A case is what comes before the loop over the batches, and the body of the loop. The line that ends with `# here` is the
one to report; cases without such a line are correct.
"""

import pytest

from tests.lint.training_script import findings_of

CASES = [
    (
        "SS601",
        """
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # here
            model = FSDP(model)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS601",
        """
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # here
            net = Net(16)
            model = DDP(net)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS601",
        """
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # here
            model = DDP(copy.deepcopy(net))
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
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            model = DDP(torch.compile(net.cuda()))
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS602",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            ctx = contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync()
            with ctx:
                loss = F.cross_entropy(model(x), y)
                loss.backward()  # here
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "SS602",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) + 0.5 * model.module.head.weight.norm()
                loss.backward()  # here
            if (i + 1) % 4 != 0:
                continue
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
                loss = F.cross_entropy(model(x), y, reduction="sum")
                (loss / (4 * 8)).backward()
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
                loss = F.cross_entropy(model(x), y)
                loss.mul(1 / 4).backward()
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
                F.cross_entropy(model(x), y).backward()
            if (i + 1) % 4 == 0:
                for p in model.parameters():
                    p.grad.div_(4)
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
    (
        "SS603",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            optimizer.zero_grad()  # here
            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / 4
                loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
        """,
    ),
    (
        "SS603",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # here
        """,
    ),
    (
        "SS603",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            for k in range(4):
                with model.no_sync() if k < 3 else contextlib.nullcontext():
                    optimizer.zero_grad()  # here
                    loss = F.cross_entropy(model(x), y) / 4
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
            loss = F.cross_entropy(model(x), y)
            for p in model.parameters():
                p.grad = None
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS606",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()  # here
        """,
    ),
    (
        "",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
        """,
    ),
    (
        "SS607",
        """
            def resume(path, net, opt):
                if not os.path.exists(path):
                    return
                if rank != 0:
                    return
                ck = torch.load(path, map_location="cpu")
                net.load_state_dict(ck["m"])
                opt.load_state_dict(ck["o"])  # here
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            resume("a.pt", net, optimizer)
            model = DDP(net)
        """,
        """
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "SS603",
        """
            from accelerate import Accelerator
            accelerator = Accelerator(gradient_accumulation_steps=4)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = DataLoader(ds, batch_size=8, shuffle=True)
            model, optimizer, train = accelerator.prepare(net, optimizer, plain)
            for epoch in range(3):
                for x, y in train:
                    with accelerator.accumulate(model):
                        optimizer.zero_grad()  # here
                        loss = F.cross_entropy(model(x), y)
                        accelerator.backward(loss)
                        optimizer.step()
        """,
        """""",
    ),
    (
        "",
        """
            from accelerate import Accelerator
            accelerator = Accelerator(gradient_accumulation_steps=4)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = DataLoader(ds, batch_size=8, shuffle=True)
            model, optimizer, train = accelerator.prepare(net, optimizer, plain)
            for epoch in range(3):
                for x, y in train:
                    with accelerator.accumulate(model):
                        loss = F.cross_entropy(model(x), y)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """""",
    ),
    (
        "SS602",
        """
            from accelerate import Accelerator
            accelerator = Accelerator()
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            plain = DataLoader(ds, batch_size=8, shuffle=True)
            model, optimizer, train = accelerator.prepare(net, optimizer, plain)
            for epoch in range(3):
                for i, (x, y) in enumerate(train):
                    with accelerator.no_sync(model) if (i + 1) % 4 else contextlib.nullcontext():
                        loss = F.cross_entropy(model(x), y)
                        accelerator.backward(loss)  # here
                    if (i + 1) % 4 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """""",
    ),
    (
        "SS602",
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
                        loss = F.cross_entropy(model(x), y)
                        fabric.backward(loss)  # here
                    if not accumulating:
                        optimizer.step()
                        optimizer.zero_grad()
        """,
        """""",
    ),
    (
        "SS604",
        """
            model = DDP(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        """,
        """
            loss = F.cross_entropy(model(x), y) / 4
            if (i + 1) % 4 != 0:
                with model.no_sync():  # here
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    ),
]


@pytest.mark.parametrize(("code", "before", "body"), CASES)
def test_only_the_marked_line_is_reported(tmp_path, code, before, body):
    assert findings_of(tmp_path, before, body) == ([code] if code else [], [])
