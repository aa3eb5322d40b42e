"""Measures against numbers worked out by hand, and E2E's own references against each other."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from privet.errors import ConfigError
from privet.measures import texts
from privet.measures.texts import MEASURES, bleu, check_measures, cider, exact_match, measure, nist, rouge_l
from privet.measures.words import words

E2E = Path(__file__).resolve().parents[3] / "shared" / "data" / "e2e" / "testset_w_refs.csv"
WRITTEN = ["the cat is on the mat"]
REFERENCES = [["the cat sat on the mat", "there is a cat on the mat"]]

for package in ("sacrebleu", "nltk", "rouge_score", "pycocoevalcap"):
    pytest.importorskip(package)


def test_words() -> None:
    assert words("The Eagle, near Café Rouge, costs £20-25.") == [
        "the", "eagle", ",", "near", "café", "rouge", ",", "costs", "£20", "-", "25", ".",
    ]  # fmt: skip


def test_bleu_by_hand() -> None:
    """Of 6, 5, 4, 3 word sequences 6, 3, 1, 0 stand in a reference; without a hit sacrebleu counts a half."""
    # Single words: the the cat is on mat, each in one reference at least. Pairs: all but "cat is" and "is on" stand in
    # one ("the cat", "on the", "the mat"). Triples: "on the mat". Fours: none.
    precisions = [6 / 6, 3 / 5, 1 / 4, 0.5 / 3]
    want = 100 * math.exp(sum(math.log(p) for p in precisions) / 4)  # a reference is as long: no penalty
    assert bleu(WRITTEN, REFERENCES) == pytest.approx(want, rel=1e-9)


def test_bleu_takes_several_numbers_of_references() -> None:
    assert bleu(["a b c d e", "f g h i j"], [["a b c d e"], ["x", "f g h i j"]]) == pytest.approx(100)


def test_nist_by_hand() -> None:
    """Words weigh log2(all words / how often); longer sequences of words that stand once weigh nothing."""
    # Words, weights log2(6/1) each; each longer sequence's weight is log2(count of its beginning / its count) = 0.
    assert nist(["a b c d e f"], [["a b c d e f"]]) == pytest.approx(math.log2(6))
    # Two of four words hit, none of the pairs: 2 * log2(6) / 4, and the penalty for 4 words against 6.
    beta = math.log(0.5) / math.log(1.5) ** 2
    want = 2 * math.log2(6) / 5 * math.exp(beta * math.log(min(5 / 6, 1)) ** 2)
    assert nist(["a x c y z"], [["a b c d e f"]]) == pytest.approx(want)


def test_rouge_l_by_hand() -> None:
    """Longest common subsequences of 5 in 6 and 6 words, and of 4 in 6 and 7; the better reference counts."""
    assert rouge_l(WRITTEN, REFERENCES) == pytest.approx(5 / 6)
    assert rouge_l(["a b", "c"], [["a b"], ["d"]]) == pytest.approx(0.5)


def test_cider_by_hand() -> None:
    """Equal texts have cosine 1 for every length of word sequences; no shared word has 0. The mean is over texts."""
    same, other = "a b c d e", "f g h i j"
    assert cider([same, other], [[same], [other]]) == pytest.approx(10)
    assert cider([same, "x y z v w"], [[same], [other]]) == pytest.approx(5)


def test_exact_match() -> None:
    assert exact_match(["a  b", "c", "D"], [["x", "a b"], ["c"], ["d"]]) == pytest.approx(2 / 3)


@pytest.mark.skipif(shutil.which("java") is None, reason="METEOR is a Java program")
def test_meteor_by_hand() -> None:
    """Of exact matches in one chunk nothing is missing but the penalty of fragments: 0.6 (chunks / matches)^0.2."""
    score = MEASURES["meteor"]
    assert score(["the cat is on the mat"], [["the cat is on the mat"]]) == pytest.approx(1.0)
    assert score(["zzz"], [["the cat is on the mat"]]) == 0
    near, far = score(["the cat is on a mat"], REFERENCES), score(["a dog"], REFERENCES)
    assert 0 <= far < near < 1


def test_without_java_meteor_says_so_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_measures(["bleu", "exact_match"])
    with pytest.raises(ConfigError, match="meteor is a Java program and there is no java on this machine"):
        check_measures(["bleu", "meteor"])


def test_a_missing_package_and_an_unknown_name_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown measure 'blue' - did you mean 'bleu'"):
        check_measures(["blue"])
    monkeypatch.setattr(texts.importlib.util, "find_spec", lambda name: None)
    check_measures(["exact_match"])
    with pytest.raises(ConfigError, match="the measure cider needs the package sacrebleu: pip install"):
        check_measures(["cider"])


@pytest.mark.skipif(not E2E.exists(), reason="the E2E files are not here")
def test_e2es_own_references_agree_with_each_other_and_not_with_others() -> None:
    import pandas as pd

    rows = pd.read_csv(E2E).groupby("mr", sort=False)["ref"].apply(list)
    several = [refs for refs in rows if len(refs) > 2][:150]
    first, rest = [refs[0] for refs in several], [refs[1:] for refs in several]
    names = ["bleu", "nist", "rouge_l", "cider", "exact_match"]
    own = measure(names, first, rest)
    others = measure(names, first[1:] + first[:1], rest)
    assert all(own[name] > others[name] for name in names[:4])
    assert measure(names, [refs[-1] for refs in rest], rest)["exact_match"] == 1
    assert bleu([refs[-1] for refs in rest], rest) == pytest.approx(100)
