"""`SourceRows`: rows that read a source, if the network is that of an encoder-decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenleap.core.source import Source
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import Network
from tokenleap.runtime.rows import INTERNAL_KEY, Rows
from tokenleap.runtime.source_network import RowState, SourceNetwork

__all__ = ["SourceRows"]


class SourceRows(Rows):
    """The rows of a network's KV slab, and the sources that they read.

    Args:
        network: the rows are its.
        slab: holds the rows' KV and state.
        max_model_len: most tokens of a row.
    """

    def __init__(self, network: Network, slab: KVSlab, max_model_len: int) -> None:
        super().__init__(slab, max_model_len)
        self.network = network
        self._probe_state: RowState | None = None

    @property
    def source_network(self) -> SourceNetwork | None:
        """The network of an encoder-decoder; None of a decoder-only model."""
        return self.network if isinstance(self.network, SourceNetwork) else None

    @property
    def reads_source(self) -> bool:
        """Whether rows need a source: the model is an encoder-decoder."""
        return self.source_network is not None

    def add(self, key: int) -> None:
        """Open an empty row. Rows of checks and measurements read the network's `probe_source`.

        Raises:
            SlabFull: there is no room for it.
        """
        super().add(key)
        network = self.source_network
        if network is None or key > INTERNAL_KEY:
            return
        if self._probe_state is None:
            self._probe_state = self._encoded(network.probe_source)
        try:
            self.set_state(key, self._probe_state)
        except Exception:
            self.remove(key)
            raise

    def encode(self, key: int, source: Source) -> None:
        """Read a source: run the encoder, and give the row the state that its decoder reads.

        Raises:
            SlabFull: there is no room for the state.
        """
        self.share_state(key, self._encoded(source))

    @torch.inference_mode()
    def encoded(self, key: int, source: Source) -> Tensor:
        """[n, E] what the encoder makes of a source: of this row, if it has that, else anew.

        A row has it if the network `keeps_encoded`, unless its state was made before that.
        """
        if key in self and self.has_source(key) and len(kept := self.row_state(key).encoded):
            return kept
        return self._needed_source_network().encoded(source)

    @torch.inference_mode()
    def read_encoded(self, key: int, encoded: Tensor) -> None:
        """Give the row the state that its decoder reads of another model's encoder [n, E].

        Raises:
            SlabFull: there is no room for the state.
        """
        self.share_state(key, self._needed_source_network().read(encoded))

    def share_state(self, key: int, state: RowState) -> None:
        """Give a row the state of a source that was read before, as `row_state` returned it.

        Raises:
            SlabFull: there is no room for the state.
        """
        self.set_state(key, state)

    def row_state(self, key: int) -> RowState:
        """The state of the source that the row has read."""
        return RowState(*self.state(key))

    def has_source(self, key: int) -> bool:
        """Whether the row has read its source; True of a decoder-only model."""
        return not self.reads_source or bool(self.state(key))

    def state_bytes(self, source: Source | None) -> int:
        """Bytes of the state of a row that has read this source; 0 of a decoder-only model."""
        network = self.source_network
        return 0 if network is None or source is None else network.state_bytes(source)

    @torch.inference_mode()
    def _encoded(self, source: Source) -> RowState:
        return self._needed_source_network().encode(source)

    def _needed_source_network(self) -> SourceNetwork:
        network = self.source_network
        assert network is not None, "a decoder-only model reads no source"
        return network
