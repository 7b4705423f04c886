"""Which numbers of a printed line come from which expressions of the source."""

import ast

import pytest

from samestep.findings import Location
from samestep.verify.printed_numbers import numbers_of


def metrics(tmp_path, statement, text):
    """The numbers in a printed text that come from `score`, which is assigned before the statement."""
    file = tmp_path / "train.py"
    file.write_text(f"score = 0.75\nline = f'epoch {{epoch}}: {{score:.2f}}'\n{statement}\n")

    def is_score(value: ast.expr) -> bool:
        return any(isinstance(node, ast.Name) and node.id == "score" for node in ast.walk(value))

    return numbers_of(Location(str(file), 3), text, is_score)


@pytest.mark.parametrize(
    ("statement", "text", "expected"),
    [
        ("print(f'epoch {epoch}: {score:.2f} in {seconds:.1f} s')", "epoch 3: 0.75 in 9.5 s", ["0.75"]),
        ("print('epoch', epoch, score)", "epoch 3 0.75", ["0.75"]),
        ("print('epoch', epoch, score, sep=';')", "epoch;3;0.75", ["0.75"]),
        ("print('epoch %d: %.2f in %.1f s' % (epoch, score, seconds))", "epoch 3: 0.75 in 9.5 s", ["0.75"]),
        ("print('epoch {}: {s:.2f}, {1}'.format(epoch, 8, s=score))", "epoch 3: 0.75, 8", ["0.75"]),
        ("log.info('epoch %d: %.2f', epoch, score)", "epoch 3: 0.75", ["0.75"]),
        ("print(line)", "epoch 3: 0.75", ["0.75"]),
        ("print(epoch, loss)", "3 0.2", []),
    ],
)
def test_numbers_are_those_of_the_wanted_expression(tmp_path, statement, text, expected):
    assert metrics(tmp_path, statement, text) == expected


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("print(*scores)", "0.75 0.5"),
        ("print('%d %d' % (epoch, score, loss))", "3 4 5"),
        ("print('{missing}'.format(score))", "0.75"),
        ("print(score, sep=separator)", "0.75"),
        ("print(f'epoch {epoch}')", "another text 3"),
        ("score += 1", "0.75"),
    ],
)
def test_nothing_is_known_if_the_source_does_not_explain_the_text(tmp_path, statement, text):
    assert metrics(tmp_path, statement, text) is None
