"""SIGKILL in the midst of saving: whatever the moment, the folder can be resumed from what was last published."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = 50


def save_for_ever(folder, report):
    """Restore, then save step after step; tell each that was published."""
    import torch

    from samestep import Run

    with Run(global_batch=1, folder=folder / "logs") as run:
        model = torch.nn.Linear(64, 64)
        checkpoint = run.checkpoint(folder, keep=2, model=model, optimizer=torch.optim.SGD(model.parameters()))
        step = 0 if checkpoint.restored is None else int(model.bias[0].item())
        while True:
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            checkpoint.save(step=step)
            checkpoint.wait()
            os.write(report, f"{step}\n".encode())


def resume(folder, report):
    """Restore and tell from where; weights that are not all of one step are told as a fault."""
    import torch

    from samestep import Run

    with Run(global_batch=1, folder=folder / "logs") as run:
        model = torch.nn.Linear(64, 64)
        restored = run.checkpoint(folder, model=model, optimizer=torch.optim.SGD(model.parameters())).restored
        name = "nothing" if restored is None else restored.name
        held = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).unique().tolist()
        os.write(report, json.dumps([name, held if len(held) == 1 else "mixed"]).encode())


def fork(work, folder):
    """Run `work` in a copy of this process, which has loaded torch but started no thread of it."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work(folder, write)
        code = 0
    except BaseException:  # noqa: BLE001  # a copy must not go on where the original does
        traceback.print_exc()
    finally:
        os._exit(code)


def read_all(pipe):
    data = b""
    while block := os.read(pipe, 1 << 16):
        data += block
    os.close(pipe)
    return data.decode()


def kill_often(folder):
    """Kill and resume again and again; for each kill what was published before it, and what was resumed."""
    import torch

    import samestep.training.run  # noqa: F401  # what is loaded here need not be loaded a hundred times

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])
    luck, told = random.Random(0), []
    for number in range(KILLS):
        child, pipe = fork(save_for_ever, folder)
        if number % 5:
            os.set_blocking(pipe, True)
            first = os.read(pipe, 1 << 16).decode()  # saving is under way
        else:
            first = ""
        time.sleep(luck.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        published = (first + read_all(pipe)).split()
        left = sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) if folder.exists() else []
        child, pipe = fork(resume, folder)
        answer = read_all(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        told.append({"published": published, "left": left, "status": status, "resumed": json.loads(answer or "null")})
    print(json.dumps(told))


@pytest.mark.slow
def test_fifty_kills_in_the_midst_of_saving_never_spoil_the_folder(tmp_path):
    code = "import sys; from pathlib import Path; from tests.unit import test_checkpoint_kill as here; "
    code += "here.kill_often(Path(sys.argv[1]))"
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    kills = json.loads(answer.stdout.splitlines()[-1])
    assert len(kills) == KILLS
    last = 0
    for kill in kills:
        assert kill["status"] == 0, answer.stderr
        last = max(last, *(int(step) for step in kill["published"]), 0)
        name, weights = kill["resumed"]
        if last == 0 and name == "nothing":
            continue
        step = int(name.split("-")[1])
        assert step in (last, last + 1), kill  # published and killed before it could be told
        assert weights == [float(step)], kill
        last = step
    assert last > KILLS, "too few checkpoints were published for the kills to have met saving"
    assert sum(bool(kill["left"]) for kill in kills) > 5, "too few kills fell into the midst of a save"
