"""Drafters: they propose the next tokens.

Each method has its own file, and `registry` is the only place that knows the methods by name. It
maps them to what `spec` says of a method; drafters that need models or files are made in `build`.
`base` defines the interface `Drafter`, which `speculation` calls before and after every target
pass. The methods fall into groups. Lookup methods search text (`ngram`, `suffix`, `copy`, `rest`,
`corpus_ngram`, with their data structures in `text/`). Model methods run a smaller model or a part
of the target (`model_drafter`). `lookahead`, `pad` and `recycle` read the target's own logits.
`cascade`, `horizontal` and `combine` build one drafter from others.
"""
