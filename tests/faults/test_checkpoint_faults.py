"""Checkpoint folders that are damaged, shared, full or changed during training: the exit code and the sentence."""

import pytest

from tests.faults.harness import Fault, cases, check
from tests.faults.trainings import training

RESUME = """
            with Run(global_batch=4) as run:
                train(run, epochs=2)
            print("names:", *sorted(path.name for path in OUT.iterdir() if path.name.startswith(("step-", "."))))
"""


def second_run(change: str, resume: str = RESUME) -> str:
    """A run that ends, a change of its folder, and a run that resumes."""
    return training(f"\n            first_run()\n            {change}\n{resume}")


FAULTS = [
    Fault("garbage in run.lock", "restored step 4", 0, second_run(r'(OUT / "run.lock").write_bytes(b"\xff\xfe\x00{")')),
    Fault("run.lock is a directory", r"run\.lock is a directory, and samestep needs a file of this name", 1,
          second_run('(OUT / "run.lock").mkdir()')),
    Fault("run.lock is a symbolic link", r"run\.lock is a symbolic link, and samestep needs a file", 1,
          second_run('(OUT / "run.lock").symlink_to("nowhere")')),
    Fault("run.lock is a named pipe", r"run\.lock is a named pipe, and samestep needs a file", 1,
          second_run('os.mkfifo(OUT / "run.lock")')),
    Fault("manifest is a directory", r"is corrupt: manifest\.json is not a file.*restored step 3", 0,
          second_run('p = OUT / "step-00000004/manifest.json"; p.unlink(); p.mkdir()')),
    Fault("manifest is a named pipe", r"is corrupt: manifest\.json is not a file.*restored step 3", 0,
          second_run('p = OUT / "step-00000004/manifest.json"; p.unlink(); os.mkfifo(p)')),
    Fault("manifest is empty", r"is corrupt: manifest\.json cannot be parsed.*restored step 3", 0,
          second_run('(OUT / "step-00000004/manifest.json").write_text("")')),
    Fault("manifest is huge", r"manifest\.json has 1\.0 TiB, so samestep did not write it.*restored step 3", 0,
          second_run('os.truncate(OUT / "step-00000004/manifest.json", 1 << 40)')),
    Fault("manifest is nested too deeply", r"is corrupt: manifest\.json cannot be parsed.*restored step 3", 0,
          second_run('(OUT / "step-00000004/manifest.json").write_text("[" * 100_000)')),
    Fault("manifest with numbers that are too large", r"is corrupt: manifest\.json.*restored step 3", 0,
          second_run('p = OUT / "step-00000004/manifest.json"; '
                     'p.write_text(p.read_text().replace("\\"version\\": 1", "\\"version\\": 1e999"))')),
    Fault("a file where the next step folder should be", "names: .*step-00000005-2", 0,
          second_run('(OUT / "step-00000005").touch()', RESUME.replace("epochs=2", "epochs=2, keep=9"))),
    Fault("a broken link where the next step folder should be", "names: .*step-00000005-2", 0,
          second_run('(OUT / "step-00000005").symlink_to("nowhere")', RESUME.replace("epochs=2", "epochs=2, keep=9"))),
    Fault("a step folder is a symbolic link", "names: step-00000006 step-00000007 step-00000008$", 0,
          second_run('p = OUT / "step-00000003"; p.rename("elsewhere"); p.symlink_to("../elsewhere")')),
    Fault("a leftover is a symbolic link", "names: step-00000006 step-00000007 step-00000008$", 0,
          second_run('(OUT / ".deleting-step-00000001").symlink_to("step-00000004")')),
    Fault("a leftover is a file", "names: step-00000006 step-00000007 step-00000008$", 0,
          second_run('(OUT / ".writing-step-00000009-0").touch()')),
    Fault("latest is a folder", "latest is a folder, and samestep writes the name of the newest checkpoint", 1,
          second_run('(OUT / "latest").unlink(); (OUT / "latest").mkdir()')),
    Fault("the folder is a file", "a file is where a folder is needed|is a file", 1,
          training('OUT.touch(); first_run()')),
    Fault("the folder is a broken link",
          "CheckpointError: creating a checkpoint in .*/out failed: .* it is a link to a folder that does not exist", 1,
          training('OUT.symlink_to("nowhere/deeper"); first_run()')),
    Fault("every checkpoint is corrupt", r"none of 3 checkpoint\(s\) in .* is valid, training starts at step 0", 0,
          second_run('[os.truncate(p, 1) for p in OUT.glob("step-*/state.json")]')),
    Fault("another model", "cannot be restored: .*weight", 1,
          second_run("", RESUME.replace("epochs=2", "epochs=2, model=nn.Linear(1, 2)"))),
    Fault("another optimizer", "cannot be restored: .*SGD", 1,
          second_run("", RESUME.replace("epochs=2", "epochs=2, optimizer=torch.optim.Adam"))),
    Fault("another global batch", "the saved position has global_batch=4 and this shard has global_batch=8", 1,
          second_run("", RESUME.replace("global_batch=4", "global_batch=8"))),
    Fault("another dataset", "the saved position has n=16 and this shard has n=12", 1,
          second_run("", RESUME.replace("epochs=2", "epochs=2, dataset=data(12)"))),
    Fault("the folder is removed between two saves", "names: .*step-00000003 step-00000004", 0,
          training('''
            with Run(global_batch=4, folder="logs") as run:
                train(run, each=lambda done: done == 3 and shutil.rmtree(OUT))
            print("names:", *sorted(path.name for path in OUT.iterdir()))
          ''')),
    Fault("the folder is replaced by a file during training",
          "creating a checkpoint in .* failed: the folder was removed or replaced during the run", 1,
          training('''
            def replace(done):
                if done == 3:
                    shutil.rmtree(OUT)
                    OUT.touch()

            with Run(global_batch=4, folder="logs") as run:
                train(run, each=replace)
          ''')),
    Fault("the folder is removed during a save",
          "failed: the folder was removed or replaced during the run, .*leave it in place", 1,
          training('''
            from samestep.checkpoint import save

            write = save.write_verified

            def remove(path, blocks):
                shutil.rmtree(OUT)
                return write(path, blocks)

            save.write_verified = remove
            with Run(global_batch=4, folder="logs") as run:
                train(run)
          ''')),
    Fault("the part of a checkpoint raises in state_dict", "ZeroDivisionError", 1,
          training('''
            class Part:
                def state_dict(self):
                    return 1 // 0
                def load_state_dict(self, state):
                    pass

            with Run(global_batch=4) as run:
                train(run, part=Part())
          ''')),
    Fault("a clock that was set back", "names: step-00000006 step-00000007 step-00000008$", 0,
          second_run('now = time.time; time.time = lambda: now() - 1e9; time.time_ns = lambda: int(1e9)')),
]  # fmt: skip

# Where a save can end, as a function of samestep or Python, before or after its call; and what is restored then.
PHASES = [
    ("before the file of the rank", "save.write_verified", "before", 1),
    ("before fsync", "manifest.os.fsync", "before", 1),
    ("after fsync", "manifest.os.fsync", "after", 1),
    ("before the manifest", "save.write_manifest", "before", 1),
    ("after the manifest", "save.write_manifest", "after", 1),
    ("after the folder was flushed", "save.fsync_folder", "after", 1),
    ("before the name is written to latest", "checkpoint_folder.write_latest", "before", 2),
    ("after the name was written to latest", "checkpoint_folder.write_latest", "after", 2),
    ("before an old checkpoint is removed", "checkpoint_folder.remove_folder", "before", 2),
    ("while an old checkpoint is removed", "checkpoint_folder.shutil.rmtree", "before", 2),
    ("after an old checkpoint was removed", "checkpoint_folder.remove_folder", "after", 2),
]


def ending(where: str, when: str, how: str) -> str:
    """A run whose second save ends in the middle, in a process of its own; then a run that resumes."""
    return training(f"""
from samestep.checkpoint import checkpoint_folder, manifest, save

def end():
    {how}

def damage():
    owner, name = "{where}".rpartition(".")[::2]
    owner = eval(owner)
    function = getattr(owner, name)
    def wrapped(*args, **kwargs):
        if "{when}" == "before":
            end()
        answer = function(*args, **kwargs)
        end()
        return answer
    setattr(owner, name, wrapped)

def half():
    with Run(global_batch=4, folder="logs") as run:
        train(run, keep=1, each=lambda done: done == 2 and damage() or done == 3 and os._exit(9))

if not (child := os.fork()):
    try:
        half()
    except BaseException as error:
        print(f"{{type(error).__name__}}: {{error}}", flush=True)
    os._exit(0)
print("half ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
with Run(global_batch=4, folder="logs") as run:
    train(run, keep=1)
names = sorted(path.name for path in OUT.iterdir() if path.name.startswith("."))
print("ended with", (OUT / "latest").read_text(), *names)
""")


KILLED = [
    Fault(f"a kill {name}", f"half ended with -9 .*restored step {step} .*ended with step-00000004$", 0,
          ending(where, when, "os.kill(os.getpid(), signal.SIGKILL)"))
    for name, where, when, step in PHASES
]  # fmt: skip
FULL = 'raise OSError(errno.ENOSPC, "No space left on device")'
FULL_DISKS = [
    Fault(f"a full disk {name}", f"CheckpointError: .* failed: the disk is full: free some space.*restored step {step} "
          ".*ended with step-00000004$", 0, ending(where, when, FULL))
    for name, where, when, step in PHASES[:8]
]  # fmt: skip


@pytest.mark.slow
@cases([*KILLED, *FULL_DISKS])
def test_a_save_that_ends_in_the_middle_leaves_a_valid_checkpoint(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.slow
@cases(FAULTS)
def test_a_fault_ends_with_its_sentence(fault, tmp_path):
    check(fault, tmp_path)
