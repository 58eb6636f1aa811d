"""Drafters: they propose the next tokens.

`base` has the interface `Drafter`, which `speculation` calls before and after every target pass;
`options` the options of all methods; and `registry`, the only place that knows methods by name,
maps them to their `spec`, whose constructors are in `build`.

- Lookups search text: `lookups`, `suffix`, `copying`; `text/` has the indexes of files.
- `lookahead` and `padding` read the target's own logits.
- A model drafts in `model_drafter`, whose trees are `growth` in a `shapes`: draft models and parts
  of the target (`models`), with another vocabulary (`vocabulary`), with all levels in one pass
  (`blocks`, `spec_drafter`), and heads that were trained for the target (`heads/`).
- `combine` makes one drafter of several, `beams` drafts for beam searches, and `online` and
  `learnable` are about drafters that learn while they serve.
"""
