"""How does a batch of texts come into its buffer without being a tensor a sample?

Blocks are of one length, and are copied there. Of anything else the ids of all samples are laid one behind the other, and padded at once.
What comes of it is, bit for bit, what collating the single samples gives (law 1).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.datasets.core.base import BaseDataset
from headrace.datasets.core.filling import Filled, Join
from headrace.errors import RemoteError, SampleError
from headrace.memory.ring import empty
from headrace.modes.mode import Mode
from headrace.order.request import BatchRequest
from headrace.storage.text.source import LinesSource
from headrace.storage.tokens.source import BlocksSource
from headrace.tokenizer import CharTokenizer


class TextFilling(BaseDataset):
    """The part of a dataset of texts that writes whole batches."""

    tokenizer: Any
    max_length: int | None

    @property
    def _is_ids_alone(self) -> bool:
        """Are samples ids, and nothing else?"""
        return False

    @property
    def _presents_ids(self) -> bool:
        """Are samples made of ids by nobody but us?"""
        return False

    @property
    def _decodes_plainly(self) -> bool:
        """Are texts decoded and tokenised by nobody but us?"""
        return False

    @property
    def writes_batches(self) -> bool:
        return isinstance(self._source, BlocksSource) and not (self._is_transformed or self.return_index)

    def sample_nbytes(self) -> int | None:
        return self._source.length * (8 + 4) if isinstance(self._source, BlocksSource) and not self._is_transformed else None

    def fill(self, request: BatchRequest) -> Filled | list[Any] | None:
        source = self._source
        if not (request and self.writes_batches and isinstance(source, BlocksSource)) or type(self.mode).keep is not Mode.keep:
            return None
        start, indices = time.perf_counter(), self._whole_indices(request).tolist()
        ids = empty((len(request), source.length), torch.int64)
        documents = empty((len(request), source.length), torch.int32)
        try:
            source.read_into(indices, ids.numpy())
        except RemoteError as error:  # asked for with more patience than what follows it
            self._refused = error.with_traceback(None)
            return None
        except Exception:
            if source.far is None:
                raise
            return None  # they are read in the usual way, where errors are told apart
        source.documents_into(indices, documents.numpy())
        self._counts["read_seconds"] += time.perf_counter() - start  # type: ignore[assignment]
        self._counts["cache_misses"] += len(request)
        self._counts["bytes_read"] += ids.numel() * source.dtype.itemsize
        return Filled({"input_ids": ids, "document_ids": documents}, None, len(request))

    def fill_joined(self, request: BatchRequest, join: Join) -> Filled | list[Any] | None:
        if not (request and self._is_ids_alone and self._presents_ids) or isinstance(self._source, BlocksSource):
            return None
        whole = self._whole_indices(request)
        straight = self._lines_joined(whole)
        batch = None if straight is None else join(*straight)
        if batch is not None:
            return Filled(batch, None, len(request))
        values = self._values(whole)
        if all(type(value) is np.ndarray for value in values):
            batch = join(np.concatenate(values), np.fromiter(map(len, values), np.int64, len(values)))
            if batch is not None:
                return Filled(batch, None, len(request))
        failure = next((value for value in values if isinstance(value, SampleError)), None)
        samples = self._finished(request, values, lambda: False)
        if failure is not None and not samples:
            raise self._nothing_readable(failure, len(request))
        return samples

    def _lines_joined(self, whole: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
        """The ids of lines, one behind the other, and how many each has, where characters are tokens and nothing is held; None where this
        is not so, or a line can't be read, which is then read by itself and named."""
        source, mode, tokenizer = self._source, self.mode, self.tokenizer
        if not isinstance(source, LinesSource) or source.has_records or type(tokenizer) is not CharTokenizer:
            return None
        if source.far is not None:  # whose errors are told apart where samples are read in the usual way
            return None
        holds_nothing = type(mode).keep is Mode.keep and type(mode).get is Mode.get and type(mode).read is Mode.read
        if not (self._decodes_plainly and holds_nothing):
            return None
        start = time.perf_counter()
        try:
            joined, sizes = source.read_joined(whole)
            read = time.perf_counter()
            ids, lengths = tokenizer.encode_bytes(joined, sizes, *source.codec, self.max_length)
        except Exception:
            return None
        counts = self._counts
        counts["cache_misses"] += len(whole)
        counts["read_seconds"] += read - start  # type: ignore[assignment]
        counts["decode_seconds"] += time.perf_counter() - read  # type: ignore[assignment]
        counts["bytes_read"] += len(joined)
        return ids, lengths
