"""Made-up data with something in it to learn."""

from __future__ import annotations

import numpy as np


def words(rows: int, length: int, vocab: int, seed: int) -> np.ndarray:
    """Rows in which a word tells the next one, by a rule that is the same for every seed."""
    alphabet = min(vocab, 32)
    follows = np.random.default_rng(0).permutation(alphabet)
    found = np.empty((rows, length), np.int32)
    found[:, 0] = np.random.default_rng(seed).integers(0, alphabet, rows)
    for place in range(1, length):
        found[:, place] = follows[found[:, place - 1]]
    return found


def images(count: int, side: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures and their classes; a class is a colour and a coarse pattern in it.

    What a class looks like is the same for every seed.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count).astype(np.int32)
    looks = np.random.default_rng(0)
    patterns = looks.normal(size=(classes, 1, 1, 3)) + looks.normal(size=(classes, 4, 4, 3))
    places = np.arange(side) * 4 // side
    clean = patterns[labels][:, places][:, :, places]
    return (clean + 0.3 * random.normal(size=clean.shape)).astype(np.float32), labels
