"""Windows of texts, words, contexts and corpora, as sequences of tokens that a model reads."""
