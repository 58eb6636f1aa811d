"""Rows of texts with blocks of masks behind several prefixes of each, for Spec-Drafters.

A row has the columns of its text, and behind them k masks for each prefix. Text is causal, and
masks see a prefix and their own block. So the text is computed once for all its blocks, and each
block gets what it would get alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.runtime.seq2seq.structure import position_table

__all__ = ["MaskRows", "mask_rows", "mask_states"]


class MaskRows(NamedTuple):
    """R texts of T columns with P blocks of k masks each, W = T + P k columns.

    Args:
        tokens: [R, W].
        positions: [R, W] those of masks go on behind their prefix.
        sees: [R, 1, W, W] which columns each column sees.
        places: [R, P, k] the places in the text that masks stand for.
    """

    tokens: Tensor
    positions: Tensor
    sees: Tensor
    places: Tensor

    def showing(self, shown: Tensor, labels: Tensor) -> MaskRows:
        """The same with `labels` [R, P, k] in place of the masks that are `shown`."""
        size = self.tokens.shape[1] - self.places[0].numel()
        masks = self.tokens[:, size:]
        filled = torch.where(shown.flatten(1), labels.flatten(1), masks)
        return self._replace(tokens=torch.cat([self.tokens[:, :size], filled], 1))


def mask_rows(tokens: Tensor, prefixes: Tensor, count: int, mask_token_id: int) -> MaskRows:
    """So many masks behind prefixes of texts.

    Args:
        tokens: [R, T].
        prefixes: [R, P] their lengths.
        count: k.
        mask_token_id: the token of masks.
    """
    rows, blocks = prefixes.shape
    text = tokens[:, : int(prefixes.max())]
    size, masks = text.shape[1], blocks * count
    columns = torch.arange(size + masks, device=tokens.device)
    number = (columns - size).div(count, rounding_mode="floor")  # of the block; below 0 in the text
    places = prefixes[:, :, None] + columns[:count]
    positions = torch.cat([columns[:size].expand(rows, -1), places.flatten(1)], 1)
    # Text sees the text up to itself, and a mask what is in front of its block.
    last = torch.cat([columns[:size].expand(rows, -1) + 1, prefixes.repeat_interleave(count, 1)], 1)
    in_text = (number < 0) & (columns < last[:, :, None])
    in_block = (number >= 0) & (number == number[:, None])
    return MaskRows(
        torch.cat([text, text.new_full((rows, masks), mask_token_id)], 1),
        positions,
        (in_text | in_block)[:, None],
        places,
    )


def mask_states(lm: Any, rows: MaskRows, encoded: Tensor, source_mask: Tensor) -> Tensor:
    """[R, P, k, E] the states of all masks.

    Args:
        lm: a Spec-Drafter.
        rows: its rows.
        encoded: [R, S, E] what an encoder made of the sources.
        source_mask: [R, S] where they are.
    """
    decoder = lm.get_decoder()
    with _at_positions(lm, decoder, rows):
        hidden: Tensor = decoder(
            input_ids=rows.tokens,
            attention_mask=_additive_mask(rows.sees),
            encoder_hidden_states=encoded,
            encoder_attention_mask=source_mask,
            use_cache=False,
        ).last_hidden_state
    masks = hidden[:, -rows.places[0].numel() :]
    return masks.reshape(*rows.places.shape, masks.shape[-1])


def _additive_mask(sees: Tensor) -> Tensor:
    """What attention adds to its scores."""
    device = sees.device.type
    low = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if low else torch.float32
    added = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return added.masked_fill_(~sees, torch.finfo(dtype).min)


@contextmanager
def _at_positions(lm: Any, decoder: Any, rows: MaskRows) -> Iterator[None]:
    """Within it, the decoder's tokens are at the positions of these rows.

    Its own forward pass counts columns, and takes no positions.
    """
    module = decoder.embed_positions
    found = F.embedding(rows.positions, position_table(lm, module))
    if not isinstance(module, nn.Embedding):  # M2M100's: padding has none
        found = found.masked_fill((rows.tokens == module.padding_idx)[..., None], 0)
    module.forward = lambda *_given, **_named: found
    try:
        yield
    finally:
        del module.forward  # that of its class is seen again
