"""Which measures there are, by the names that ``task.writing.measures`` takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from privet.config import unknown
from privet.errors import ConfigError
from privet.measures.meteor import check_java, meteor
from privet.measures.words import words

#: From texts and the references of each to one number over all of them.
Measure = Callable[[Sequence[str], Sequence[Sequence[str]]], float]


def bleu(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return BLEU over the corpus as sacrebleu computes it by default, from 0 to 100."""
    from sacrebleu import corpus_bleu

    most = max(len(texts) for texts in references)
    streams: Any = [[texts[i] if i < len(texts) else None for texts in references] for i in range(most)]
    return float(corpus_bleu(list(written), streams).score)


def nist(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return NIST over the corpus with word sequences of up to five; 0 where no text is as long as that."""
    from nltk.translate.nist_score import corpus_nist

    wanted = [[words(text) for text in texts] for texts in references]
    try:
        return float(corpus_nist(wanted, [words(text) for text in written], n=5))
    except ZeroDivisionError:
        return 0.0


def rouge_l(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return ROUGE-L's F-measure, of each text with its nearest reference, from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    scores = [
        scorer.score_multi(list(texts), text)["rougeL"].fmeasure
        for text, texts in zip(written, references, strict=True)
    ]
    return float(sum(scores) / len(scores))


def cider(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return CIDEr-D, from 0 to 10; word weights come from the references."""
    from pycocoevalcap.cider.cider import Cider

    said = {i: [" ".join(words(text))] for i, text in enumerate(written)}
    wanted = {i: [" ".join(words(text)) for text in texts] for i, texts in enumerate(references)}
    return float(Cider().compute_score(wanted, said)[0])


def exact_match(written: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the share of texts that equal a reference, apart from white space."""
    hits = [
        " ".join(text.split()) in {" ".join(wanted.split()) for wanted in texts}
        for text, texts in zip(written, references, strict=True)
    ]
    return sum(hits) / len(hits)


MEASURES: dict[str, Measure] = {
    "bleu": bleu,
    "nist": nist,
    "meteor": meteor,
    "rouge_l": rouge_l,
    "cider": cider,
    "exact_match": exact_match,
}
_PACKAGES = {
    "bleu": ("sacrebleu",),
    "nist": ("sacrebleu", "nltk"),
    "meteor": ("pycocoevalcap",),
    "rouge_l": ("rouge_score",),
    "cider": ("sacrebleu", "pycocoevalcap"),
}


def check_measures(names: Sequence[str]) -> None:
    """Find out whether measures can be computed here.

    Raises
    ------
    ConfigError
        For an unknown name, a missing package, or METEOR without Java.
    """
    for name in names:
        if name not in MEASURES:
            raise ConfigError(unknown("measure", name, MEASURES) + ", set by task.writing.measures")
        for package in _PACKAGES.get(name, ()):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"the measure {name} needs the package {package}: pip install 'privet[measures]', "
                    "or leave it out of task.writing.measures"
                )
    if "meteor" in names:
        check_java()


def measure(
    names: Sequence[str], written: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return the named measures of some texts, each with one or more references."""
    return {name: MEASURES[name](written, references) for name in names}
