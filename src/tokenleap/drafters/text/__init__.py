"""Indexes of the user's own text files, which the lookup drafters search.

`corpus` reads and tokenises text files. `ngrams` counts unigrams, bigrams and trigrams for the
drafter `corpus_ngram`, and `datastore` builds the suffix array for `rest`. Both save their arrays
as a `tensor_file`. The commands `tokenleap ngrams build` and `tokenleap datastore build` make these
files, and drafters only read them.
"""
