"""Which expressions depend on what a line computes."""

from samestep.findings import Location
from samestep.verify.data_flow import DataFlow

SOURCE = """\
import time
import torch

class Meter:
    def update(self, value):
        self.total = value

def evaluate(model, loader):
    hits = 0
    count = 0
    for x, y in loader:
        out = model(x)  # the source
        hits += (out == y).sum()
        count += len(out)
    return hits / count

def report(name, value):
    print(name, value)  # a parameter

start = time.time()
score = evaluate(None, [])
print(f"score {score:.3f}")  # a result
print(f"took {time.time() - start}")  # a time
report("score", 100 * score)
outputs = []
outputs.append(score)
print(torch.tensor(outputs))  # a list
print(len(outputs))  # a length
"""


def line(text):
    (number,) = [number for number, each in enumerate(SOURCE.splitlines(), 1) if each.endswith(f"# {text}")]
    return number


def test_values_are_followed_through_names_calls_and_methods_but_not_sizes_and_times(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    flow = DataFlow([str(file)], [Location(str(file), line("the source"))])

    def reaches(text):
        return flow.reaches(Location(str(file), line(text)), ["print"])

    assert [reaches(text) for text in ("a result", "a parameter", "a list")] == [True, True, True]
    assert [reaches(text) for text in ("a time", "a length")] == [False, False]
    assert reaches("the source") is None
