"""Samples of RULER are made at half the speed, or more, of tokenising their text once.

    python -m pytest -s tests/benchmarks/test_ruler_speed.py

RULER_LENGTH and RULER_SAMPLES set the size: the paper's is 32768 and 500.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.ruler import Corpus
from data_prep.tasks.samples import SampleFolder
from data_prep.tasks.tables import NEEDLES, NEW_TOKENS
from data_prep.text import encode_prompt, haystack_words
from tests.ruler_case import TOKENIZER

LENGTH = int(os.environ.get("RULER_LENGTH", "32768"))
SAMPLES = int(os.environ.get("RULER_SAMPLES", "60"))


def test_samples_are_made_at_half_the_speed_of_tokenising(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerSpec(str(TOKENIZER)))
    corpus = Corpus(haystack_words(None))
    all_making = all_tokenising = 0.0
    for task in NEEDLES:
        folder = SampleFolder(tmp_path, task, LENGTH, NEW_TOKENS[task], 42, corpus, tokenizer)
        started = time.process_time()
        folder.make(SAMPLES)
        making = time.process_time() - started
        texts = [tokenizer.decode(sample.ids) for sample in folder.read(range(SAMPLES))]
        started = time.process_time()
        for text in texts:
            encode_prompt(tokenizer, text)
        tokenising = time.process_time() - started
        all_making, all_tokenising = all_making + making, all_tokenising + tokenising
        ratio = tokenising / making
        print(f"{task}: made in {making:.1f} s, tokenised once in {tokenising:.1f} s, {ratio:.2f}")
    ratio = all_tokenising / all_making
    print(f"{SAMPLES} samples of {len(NEEDLES)} tasks at {LENGTH:,}: {ratio:.2f}")
    assert ratio >= 0.5
