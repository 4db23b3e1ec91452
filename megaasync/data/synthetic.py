"""A seeded Markov chain over tokens: something to learn, with a known best loss, and no file."""

import numpy as np

_DOCUMENT = 1024  # tokens per independent piece of chain


class MarkovSource:
    """Every token has `branching` possible successors, with probabilities that fall like 1, 1/2, 1/4, ...

    Attributes:
        entropy: mean loss in nats of a model that knows the chain.
    """

    def __init__(self, *, vocab_size: int, branching: int, seed: int) -> None:
        draws = np.random.Generator(np.random.PCG64([seed, 1]))
        self._successors = np.stack([draws.choice(vocab_size, branching, replace=False) for _ in range(vocab_size)])
        weights = 0.5 ** np.arange(branching)
        self._cumulative = np.cumsum(weights / weights.sum())
        probabilities = weights / weights.sum()
        self.entropy = float(-(probabilities * np.log(probabilities)).sum())
        self._vocab_size, self._seed = vocab_size, seed

    def tokens(self, *, num_tokens: int, stream: int) -> np.ndarray:
        """[num_tokens] int32 of the given stream; the same for the same seed."""
        draws = np.random.Generator(np.random.PCG64([self._seed, 2, stream]))
        documents = -(-num_tokens // _DOCUMENT)
        chain = np.empty((_DOCUMENT, documents), dtype=np.int32)
        chain[0] = draws.integers(0, self._vocab_size, documents)
        for position in range(1, _DOCUMENT):
            choice = np.searchsorted(self._cumulative, draws.random(documents), side="right")
            choice = np.minimum(choice, len(self._cumulative) - 1)
            chain[position] = self._successors[chain[position - 1], choice]
        return chain.T.reshape(-1)[:num_tokens]
