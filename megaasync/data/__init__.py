"""Which tokens: documents, tokenizer, indexed token files, and microbatches addressed by (step, microbatch)."""


class DataError(ValueError):
    """Data that is missing or cannot be used; the message names file or key, and the remedy."""
