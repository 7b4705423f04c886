"""SIGKILL during a save: at any moment, the next run resumes from the last published checkpoint."""

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


def save_forever(folder, report):
    """Restore, then save step after step; report each that was published."""
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
    """Restore and report from where; weights that are not all of one step are reported as mixed."""
    import torch

    from samestep import Run

    with Run(global_batch=1, folder=folder / "logs") as run:
        model = torch.nn.Linear(64, 64)
        restored = run.checkpoint(folder, model=model, optimizer=torch.optim.SGD(model.parameters())).restored
        name = "nothing" if restored is None else restored.name
        values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).unique().tolist()
        os.write(report, json.dumps([name, values if len(values) == 1 else "mixed"]).encode())


def fork(work, folder):
    """Run `work` in a fork of this process, which has imported torch but started none of its threads."""
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
    except BaseException:  # noqa: BLE001  # the fork must not continue as the parent
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
    """Kill and resume many times; print for each kill what was published before it, and what was resumed."""
    import torch

    import samestep.training.run  # noqa: F401  # imported once here, and not in every fork

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])
    rng, kills = random.Random(0), []
    for number in range(KILLS):
        child, pipe = fork(save_forever, folder)
        if number % 5:
            os.set_blocking(pipe, True)
            first = os.read(pipe, 1 << 16).decode()  # a save is in progress
        else:
            first = ""
        time.sleep(rng.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        published = (first + read_all(pipe)).split()
        left = sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) if folder.exists() else []
        child, pipe = fork(resume, folder)
        answer = read_all(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kills.append({"published": published, "left": left, "status": status, "resumed": json.loads(answer or "null")})
    print(json.dumps(kills))


@pytest.mark.slow
def test_fifty_kills_during_saves_never_corrupt_the_folder(tmp_path):
    code = "import sys; from pathlib import Path; from tests.unit import test_checkpoint_kill as here; "
    code += "here.kill_often(Path(sys.argv[1]))"
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "out")],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=280,
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
        assert step in (last, last + 1), kill  # published, and killed before it could report
        assert weights == [float(step)], kill
        last = step
    assert last > KILLS, "too few checkpoints were published for the kills to have hit a save"
    assert sum(bool(kill["left"]) for kill in kills) > 5, "too few kills happened during a save"
