"""Findings that follow from another one are put below it, whatever their order."""

from itertools import permutations

import pytest

from samestep.findings import Finding
from samestep.verify.verification import fold


def finding(code):
    return Finding(code, "name", "error", None, "summary", "consequence", "repair")


def codes(findings):
    return {each.code: sorted(follow.code for follow in each.follows) for each in findings}


@pytest.mark.parametrize("order", list(permutations(["SS607", "SS201", "SS501"])), ids=" ".join)
def test_the_order_of_cause_and_consequence_does_not_matter(order):
    assert codes(fold([finding(code) for code in order])) == {"SS607": ["SS201"], "SS501": []}


@pytest.mark.parametrize("order", list(permutations(["SS404", "SS402", "SS401"])), ids=" ".join)
def test_a_chain_of_explanations_has_one_cause(order):
    assert codes(fold([finding(code) for code in order])) == {"SS404": ["SS401", "SS402"]}


@pytest.mark.parametrize("order", [("SS301", "SS901"), ("SS901", "SS301")], ids=" ".join)
def test_the_first_of_two_that_explain_each_other_is_the_cause(order):
    assert codes(fold([finding(code) for code in order])) == {order[0]: [order[1]]}
